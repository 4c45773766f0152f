"""What a cache learns of a forward beyond keys and values: its beginning, its end and its logits, from hooks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvstrata.core import InputError
from kvstrata.hf import compat
from kvstrata.hf.cache import StrataCache, StrataLayer
from kvstrata.hf.parts import attention_modules
from kvstrata.hf.repeat import note_repetition


@contextmanager
def forwards_of(cache: StrataCache, model: PreTrainedModel) -> Generator[None]:
    """Inside the block, tell `cache` and its forks when a forward that they were passed to begins and ends.

    With its end come the logits, and where the policy wants it the prompt is repeated. Nothing is hooked where the
    policy acts in every layer at once.
    """
    if not cache.policy.needs & {"logits", "end"}:
        yield
        return
    request = cache.kin.request if "repetition" in cache.policy.needs else None

    @compat.not_compiled
    def begin(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for found in _of_kin(cache, args, kwargs):
            found.engine.accept()
            if request is None:
                continue
            if found.engine.mode.prefilling:
                raise InputError("this policy has the model repeat the prompt: feed it at once, not in parts")
            if not found.get_seq_length() and _ids(args, kwargs) is None:
                raise InputError("this policy has the model repeat the prompt: feed token ids, not embeddings")

    @compat.not_compiled
    def end(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for found in _of_kin(cache, args, kwargs):
            ids = _ids(args, kwargs)
            if request is not None and ids is not None and found.get_seq_length() == ids.shape[1]:
                note_repetition(model, [found], ids, kwargs.get("attention_mask"), request)
            if "logits" in found.policy.needs:
                if (logits := _logits(output)) is not None:
                    found.engine.end_step(logits.detach())
            elif "processed-logits" not in found.policy.needs:
                found.engine.end_forward()

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def hidden_to(cache: StrataCache, model: PreTrainedModel) -> Generator[None]:
    """Inside the block, give the layers of `cache` and its forks the hidden states that their attention gets."""
    if "hidden" not in cache.policy.needs:
        yield
        return

    @compat.not_compiled
    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = cast(int, module.layer_idx)
        for value in (*args, *kwargs.values()):
            if not isinstance(value, Cache) or index >= len(value.layers):
                continue
            layer = value.layers[index]
            if isinstance(layer, StrataLayer) and layer.kin is cache.kin:
                layer.layer.hidden = kwargs.get("hidden_states", args[0] if args else None)

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return kwargs.get("input_ids", args[0] if args else None)


def _of_kin(cache: StrataCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[StrataCache]:
    values = (*args, *kwargs.values())
    return [value for value in values if isinstance(value, StrataCache) and value.kin is cache.kin]


def _logits(output: Any) -> Tensor | None:
    """Logits [B, K, V] of a model's output; of a plain tuple the first tensor of that shape, after a loss if any."""
    if not isinstance(output, tuple):
        return getattr(output, "logits", None)
    found: list[Tensor] = [item for item in output[:2] if isinstance(item, Tensor) and item.dim() == 3]
    return found[0] if found else None
