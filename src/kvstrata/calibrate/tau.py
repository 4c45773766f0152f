"""The confidence that a share of the steps reaches: CONF-KV's tau for a model and a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvstrata.core import InputError
from kvstrata.policy.confidence import LEAST, MOST, confidence


@dataclass(frozen=True, slots=True)
class Tau:
    """tau, at which `rate` of `steps` steps are sure, and what quantiles confidence has."""

    tau: float
    rate: float
    steps: int
    quantiles: dict[str, float]


def check_rate(rate: float) -> None:
    """Raise `InputError` for a rate that no tau can have."""
    if not 0 < rate < 1:
        raise InputError(f"rate={rate}: give the share of steps that shall be sure, between 0 and 1")


@torch.no_grad()
def calibrate_tau(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    rate: float,
    tick: Callable[[], object] = lambda: None,
) -> Tau:
    """Read texts and find tau. Raises `InputError` for a rate outside 0 .. 1."""
    check_rate(rate)
    found: list[torch.Tensor] = []
    for ids in documents:
        logits = cast(Any, model)(torch.tensor(ids, device=model.device)[None], use_cache=False).logits[0]
        found.append(confidence(logits).double().cpu())
        tick()
    c = torch.cat(found)
    c = c[~c.isnan()]
    tau = min(max(float(c.quantile(1 - rate)), LEAST + 1e-3), MOST - 1e-3)
    quantiles = {f"{q:.0%}": round(float(c.quantile(q)), 3) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
    return Tau(round(tau, 3), float((c >= tau).double().mean()), len(c), quantiles)
