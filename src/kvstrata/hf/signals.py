"""What a cache learns of a forward beyond keys and values: its beginning, its end and its logits, from hooks."""

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
def forwards_of(cache: StrataCache, model: PreTrainedModel) -> Generator[None]:
    """Inside the block, tell `cache` and its forks when a forward that they were passed to begins and ends.

    With its end come the logits. Nothing is hooked where the policy acts in every layer at once.
    """
    if not cache.policy.needs & {"logits", "end"}:
        yield
        return

    @compat.not_compiled
    def begin(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for found in _caches(args, kwargs):
            found.engine.accept()

    @compat.not_compiled
    def end(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for found in _caches(args, kwargs):
            if "logits" in found.policy.needs:
                if (logits := _logits(output)) is not None:
                    found.engine.end_step(logits.detach())
            elif "processed-logits" not in found.policy.needs:
                found.engine.end_forward()

    def _caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StrataCache]:
        values = (*args, *kwargs.values())
        return [value for value in values if isinstance(value, StrataCache) and value.kin is cache.kin]

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _logits(output: Any) -> Tensor | None:
    """Logits [B, K, V] of a model's output; of a plain tuple the first tensor of that shape, after a loss if any."""
    if not isinstance(output, tuple):
        return getattr(output, "logits", None)
    found: list[Tensor] = [item for item in output[:2] if isinstance(item, Tensor) and item.dim() == 3]
    return found[0] if found else None
