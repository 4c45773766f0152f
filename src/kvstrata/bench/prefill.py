"""How long a prompt takes under every policy and under transformers' own cache, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.bench.compare import forward
from kvstrata.bench.contenders import read_prompt
from kvstrata.hf import compress


@torch.no_grad()
def prefill_times(
    model: PreTrainedModel,
    ids: Tensor,
    names: Sequence[str],
    rounds: int,
    tell: Callable[[str], object] = lambda _: None,
) -> dict[str, float]:
    """Median seconds of feeding ids [1, T] and compressing them, by policy or "hf"; each `rounds` times."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        tell(f"prompts, round {number + 1} of {rounds}")
        for name, seconds in found.items():
            if name == "hf":
                start = time.perf_counter()
                read_prompt(model, ids)
                seconds.append(time.perf_counter() - start)
                continue
            with compress(model, name) as cache:  # opened before the clock starts, as peers are
                start = time.perf_counter()
                forward(model, ids, cache)
                seconds.append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}
