"""Does confidence tell how much of the past a token needs? CONF-KV's mechanism test, in variants (its section 5.4).

At sampled steps the next-token distribution p with everything in view is compared with p' when the newest query alone,
in all layers, cannot see some of the past; older keys and values stay as they were computed with all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstrata.core import InputError
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.policy.confidence import confidence

LEAST_PROBABILITY = 1e-12  # p' is clipped here, so that no KL is infinite


@dataclass(frozen=True, slots=True)
class Ablation:
    """What the newest query, at position t, may not see: t-drop .. t-keep-1, but the first `sinks`; its own key stays.

    `drop` None hides everything older.
    """

    keep: int
    drop: int | None
    sinks: int = 0

    def hidden(self, t: int) -> slice:
        """Positions that are hidden."""
        start = 0 if self.drop is None else max(0, t - self.keep - self.drop)
        return slice(max(self.sinks, start), max(self.sinks, t - self.keep))


ABLATIONS = {
    "drop the newest 256": Ablation(0, 256),
    "drop the newest 64": Ablation(0, 64),
    "keep 32, drop 256 before": Ablation(32, 256),
    "4 sinks and 32": Ablation(32, None, 4),
    "4 sinks and 128": Ablation(128, None, 4),
    "32 without sinks": Ablation(32, None),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one text: how sure the model was, and KL(p || p') in nats by ablation."""

    document: int
    position: int
    confidence: float
    kl: dict[str, float]


@torch.no_grad()
def samples(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    count: int,
    first: int = 300,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> list[Sample]:
    """Sample `count` positions from `first` on, evenly over the documents. Raises `InputError` for short documents."""
    each, run, found = -(-count // len(documents)), cast(Any, model), list[Sample]()
    for number, ids in enumerate(documents):
        if len(ids) < first + each:
            raise InputError(f"a document of {len(ids)} tokens has no {each} steps after {first}: give longer texts")
        draw = torch.Generator().manual_seed(seed * 1009 + number)
        picked = sorted((torch.randperm(len(ids) - first, generator=draw)[:each] + first).tolist())
        given = torch.tensor(ids, device=model.device)[None]
        cache, fed = DynamicCache(), 0
        for t in picked[: count - len(found)]:
            if t > fed:
                run(given[:, fed:t], **{CACHE_KEYWORD: cache}, logits_to_keep=1)
                fed = t
            full = _step(model, cache, given, t, None)
            kl = {name: _kl(full, _step(model, cache, given, t, a.hidden(t))) for name, a in ABLATIONS.items()}
            found.append(Sample(number, t, float(confidence(full)), kl))
            tick()
    return found


def _step(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, t: int, hidden: slice | None) -> Tensor:
    """Logits [V] after token t, whose key is taken back again."""
    mask = torch.ones(1, t + 1, dtype=torch.long, device=ids.device)
    if hidden is not None:
        mask[:, hidden] = 0
    position = torch.tensor([[t]], device=ids.device)
    given = {CACHE_KEYWORD: cache, "attention_mask": mask, "position_ids": position}
    logits = cast(Any, model)(ids[:, t : t + 1], **given).logits[0, -1].float()
    cache.crop(-1)
    return logits


def _kl(full: Tensor, other: Tensor) -> float:
    p, q = full.softmax(dim=-1), other.softmax(dim=-1)
    terms = p * (p.clamp_min(LEAST_PROBABILITY).log() - q.clamp_min(LEAST_PROBABILITY).log())
    return max(0.0, float(terms.sum()))


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of numbers; NaN where one of them is constant."""
    a, b = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
    a, b = a - a.mean(), b - b.mean()
    norm = a.norm() * b.norm()
    return float((a * b).sum() / norm) if norm > 0 else float("nan")


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of ranks, equal numbers sharing their mean rank."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(x: Sequence[float]) -> list[float]:
    values = torch.tensor(x, dtype=torch.float64)
    below = (values[None] < values[:, None]).sum(dim=1)
    equal = (values[None] == values[:, None]).sum(dim=1)
    return (below + (equal - 1) / 2).tolist()


@torch.no_grad()
def own_words(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> list[int]:
    """A prompt and what the model greedily makes of it."""
    given = torch.tensor(ids, device=model.device)[None]
    made = cast(Any, model).generate(given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return made[0].tolist()
