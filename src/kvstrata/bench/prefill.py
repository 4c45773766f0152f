"""How long a prompt takes under every policy and under transformers' own cache, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.bench.contenders import read_prompt
from kvstrata.hf import compress
from kvstrata.hf.compat import CACHE_KEYWORD

HF = "hf"


@torch.no_grad()
def prefill_times(
    model: PreTrainedModel,
    ids: Tensor,
    policies: Sequence[str],
    rounds: int,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, float]:
    """Median seconds of feeding ids [1, T] and compressing them, by policy, and of "hf"; each `rounds` times."""
    found: dict[str, list[float]] = {name: [] for name in (HF, *policies)}
    for number in range(rounds):
        tell(f"prompts, round {number + 1} of {rounds}")
        for name, seconds in found.items():
            seconds.append(_of_hf(model, ids) if name == HF else _of_policy(model, ids, name))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _of_hf(model: PreTrainedModel, ids: Tensor) -> float:
    start = time.perf_counter()
    read_prompt(model, ids)
    return time.perf_counter() - start


def _of_policy(model: PreTrainedModel, ids: Tensor, policy: str) -> float:
    """Without opening the cache, which a peer too does before its clock starts."""
    with compress(model, policy) as cache:
        start = time.perf_counter()
        logits = cast(Any, model)(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits
        logits.cpu()  # the clock stops when a GPU is done
        return time.perf_counter() - start
