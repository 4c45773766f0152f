"""Which part of CONF-KV does the work? The same numbers of evictions at the same steps, with other victims.

Every variant follows the confidence of one full-cache run, so that all drop as many tokens at every step and layer
(matched-rate isolation, arXiv:2605.24786, section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvstrata.core import SpecError
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.policy import Policy, Rule, parse_policy
from kvstrata.policy.allocation import ByConfidence
from kvstrata.policy.budget import Shaped
from kvstrata.policy.scorers.combine import Mix, Part
from kvstrata.policy.scorers.recency import Random, Recency

FULL = "full"


@dataclass(slots=True)
class Isolated:
    """One variant on one document: nats per token, and how many entries it dropped in how many steps."""

    variant: str
    document: int
    nats: float
    evicted: int
    steps: int
    evicting: int  # steps at which something was dropped


def variants(spec: str) -> dict[str, Policy]:
    """A policy whose budget follows confidence, and the same with other victims. Raises `SpecError` for others."""
    policy = parse_policy(spec)
    if "logits" not in policy.needs:
        raise SpecError(f"{spec!r} does not follow confidence: take confkv, confkv-l or confkv+")

    def scored(scorer: Callable[[Rule], Any]) -> Policy:
        return policy.map_rules(lambda rule: replace(rule, scorer=scorer(rule), budget=_outside(rule.budget)))

    return {
        "as it is": scored(lambda rule: rule.scorer),
        "random": scored(lambda _: Random()),
        "recency": scored(lambda _: Recency()),
        "attention": scored(_attention),
    }


def _attention(rule: Rule) -> Any:
    """The part of the scorer that reads attention."""
    if not isinstance(rule.scorer, Mix):
        return rule.scorer
    part = next(part for part in rule.scorer.parts if part.scorer.mass)
    return Mix((Part(1.0, part.scorer),))


def _outside(budget: Any) -> Any:
    """The same budget, told its confidence from outside."""
    if isinstance(budget, ByConfidence):
        return replace(budget, signal="processed")
    assert isinstance(budget, Shaped)
    return replace(cast(Any, budget), base=_outside(budget.base))


@torch.no_grad()
def isolate(
    model: PreTrainedModel,
    spec: str,
    documents: Sequence[Sequence[int]],
    prompt: int,
    tick: Callable[[], object] = lambda: None,
) -> list[Isolated]:
    """Feed every document to a full cache and to all variants, a token at a time after the prompt."""
    run, found = cast(Any, model), list[Isolated]()
    for number, ids in enumerate(documents):
        given = torch.tensor(ids, device=model.device)[None]
        with ExitStack() as stack:
            caches = {FULL: stack.enter_context(compress(model, FULL))}
            caches |= {name: stack.enter_context(compress(model, p)) for name, p in variants(spec).items()}
            rows = {name: Isolated(name, number, 0.0, 0, 0, 0) for name in caches}
            logits = {name: run(given[:, :prompt], **{CACHE_KEYWORD: cache}).logits for name, cache in caches.items()}
            _end(caches, rows, logits[FULL])
            for step in range(prompt, len(ids)):
                for name in caches:
                    rows[name].nats -= float(logits[name][0, -1].float().log_softmax(dim=-1)[ids[step]])
                    rows[name].steps += 1
                if step + 1 < len(ids):
                    token = given[:, step : step + 1]
                    logits = {name: run(token, **{CACHE_KEYWORD: cache}).logits for name, cache in caches.items()}
                    _end(caches, rows, logits[FULL])
                tick()
        for row in rows.values():
            row.nats /= row.steps
        found += rows.values()
    return found


def _end(caches: dict[str, StrataCache], rows: dict[str, Isolated], logits: torch.Tensor) -> None:
    """Let all caches settle with the full cache's logits, and count what they dropped."""
    for name, cache in caches.items():
        if name == FULL:
            continue
        cache.engine.end_step(logits)
        evicted = sum(layer.events.evicted for layer in cache.strata.values())
        rows[name].evicting += evicted > rows[name].evicted
        rows[name].evicted = evicted
