"""What each head keeps where all heads of all layers share one budget: a measure of which heads need their entries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.cache.step import Pending
from kvstrata.calibrate.corpus import named
from kvstrata.calibrate.duo import looking_back, shares_of
from kvstrata.core import InputError
from kvstrata.files import whole
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.files import identity
from kvstrata.hf.together import read_together
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.budget import Share
from kvstrata.policy.shares import FORMAT


@dataclass(frozen=True, slots=True)
class Level:
    """Of one share kept over all heads: that of each layer and head [L][H], and the lowest score kept, if any."""

    kept: list[list[float]]
    tau: float | None


def policy_for(scorer: str, share: Fraction) -> Policy:
    """The scorer's preset at a share of all tokens. Raises `InputError` where its heads do not share one budget."""
    policy = parse_policy(scorer)
    if not policy.across and scorer != "duo":
        raise InputError(f"scorer {scorer!r} gives every head the same: take one whose heads share a budget, as echo")
    if any(rule and rule.scorer.mass and not rule.scorer.columns for rule in policy.rules(0).values()):
        raise InputError(f"scorer {scorer!r} reads one forward's attention, which is gone when shares are measured")
    return policy.with_budget(Share(share))


@torch.no_grad()
def calibrate_heads(
    model: PreTrainedModel,
    scorer: str,
    documents: Sequence[Sequence[int]],
    levels: Sequence[Fraction],
    tokenizer: PreTrainedTokenizerBase | None = None,
    tick: Callable[[], object] = lambda: None,
) -> dict[Fraction, Level]:
    """Read each document under the scorer's preset, once for all levels, and average what its heads keep.

    The scorer "duo" finds passkeys in them instead, and heads keep everything or stream.
    """
    if scorer == "duo":
        worth = looking_back(model, documents, tick=tick)
        return {level: Level(shares_of(worth, level), None) for level in sorted(levels)}
    policies = {level: policy_for(scorer, level) for level in sorted(levels)}
    kept: dict[Fraction, list[list[list[float]]]] = {level: [] for level in policies}
    lowest: dict[Fraction, list[float]] = {level: [] for level in policies}
    for ids in documents:
        with ExitStack() as stack:
            opened = {
                level: stack.enter_context(compress(model, policy, tokenizer=tokenizer))
                for level, policy in policies.items()
            }
            read_together(model, list(opened.values()), torch.tensor(ids, device=model.device)[None])
            for level, cache in opened.items():
                lengths = [layer.store.lengths()[0] for layer in cache.strata.values()]
                kept[level].append([[n / len(ids) for n in layer] for layer in lengths])
                lowest[level].append(_lowest(cache, len(ids)))
        tick()
    return {level: Level(_averaged(kept[level]), mean(lowest[level])) for level in policies}


def _lowest(cache: StrataCache, seen: int) -> float:
    """The lowest score of an entry that its score alone kept."""
    found = float("inf")
    for layer in cache.strata.values():
        rule = layer.rules["prefill"]
        assert rule is not None
        signals = layer.signals(Pending(rule, layer.step, 0, [0]), rule, layer.limits(rule, None))
        free = signals.valid & ~signals.protected
        if bool(free.any()):
            found = min(found, float(rule.score(signals)[free].min()))
    return found


def _averaged(documents: Sequence[list[list[float]]]) -> list[list[float]]:
    table = torch.tensor(documents, dtype=torch.float64).mean(dim=0)
    return [[round(share, 6) for share in layer] for layer in table.tolist()]


def write_heads(
    path: Path, model: PreTrainedModel, scorer: str, texts: Mapping[str, str], found: Mapping[Fraction, Level]
) -> None:
    """Write a file for `heads=FILE`, with the names and contents of the texts it was found on."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "model": identity(model),
        "scorer": scorer,
        "data": named(texts),
        "levels": {f"{float(share):g}": {"kept": level.kept, "tau": level.tau} for share, level in found.items()},
    }
    with whole(path) as scratch:
        scratch.write_text(json.dumps(data, indent=1))
