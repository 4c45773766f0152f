"""What a cache learns of a forward beyond keys and values: the logits, from a hook on the model."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.hf import compat
from kvstrata.hf.cache import StrataCache


@contextmanager
def logits_to(cache: StrataCache, model: PreTrainedModel) -> Generator[None]:
    """Inside the block, end the step of `cache`, or of its forks, with the logits of the forward it was passed to.

    Nothing is hooked where the policy reads no logits.
    """
    if "logits" not in cache.policy.needs:
        yield
        return

    @compat.not_compiled
    def end_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, StrataCache) and value.kin is cache.kin and (logits := _logits(output)) is not None:
                value.engine.end_step(logits.detach())

    handle = model.register_forward_hook(end_step, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _logits(output: Any) -> Tensor | None:
    """Logits [B, K, V] of a model's output; of a plain tuple the first tensor of that shape, after a loss if any."""
    if not isinstance(output, tuple):
        return getattr(output, "logits", None)
    found: list[Tensor] = [item for item in output[:2] if isinstance(item, Tensor) and item.dim() == 3]
    return found[0] if found else None
