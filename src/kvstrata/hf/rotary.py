"""A model's rotary positions, read from its own module and checked against its own function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.core import UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.kernels.codec.rotation import PAIRS, Rotary, Turn

FIXED = ("default", "linear", "llama3", "yarn")  # kinds whose angles do not depend on how long the text is


def rotary_of(model: PreTrainedModel) -> Rotary:
    """What turns keys in every compressed layer of a model.

    Raises `UnsupportedModelError` with the reason where keys cannot be turned back by it.
    """
    module, name = _found(model, "keys cannot be taken before rotary positions")
    kind = _kind(module, name)
    if kind not in FIXED:
        raise UnsupportedModelError(
            f"{type(model).__name__}: keys cannot be taken before rotary positions, since its angles change with the "
            f"length of the text ({kind})"
        )
    return _checked(model, module, name, "keys cannot be taken before rotary positions")


def turn_of(model: PreTrainedModel) -> Callable[[int], Turn]:
    """What moves queries or keys [..., D] of full-attention layers by some positions, with the angles of the moment.

    Raises `UnsupportedModelError` with the reason where the model has no rotary positions, or others.
    """
    what = "the scorer echo moves queries by their rotary positions"
    module, name = _found(model, what)
    pairs = _checked(model, module, name, what).pairs

    def turn(steps: int) -> Turn:
        return Rotary(cast(Tensor, getattr(module, name)).float(), 1.0, pairs).by(steps)

    return turn


def _found(model: PreTrainedModel, what: str) -> tuple[Any, str]:
    """The module with the angles of full-attention layers, and the name of its frequencies."""
    if compat.some_unturned(compat.text_config(model)):
        raise UnsupportedModelError(f"{type(model).__name__}: {what}, but some of its layers have none")
    names = ("full_attention_inv_freq", "inv_freq")
    found = [(cast(Any, m), name) for m in model.modules() for name in names if hasattr(m, name)]
    if not found:
        raise UnsupportedModelError(f"{type(model).__name__}: {what}, but it has none that transformers knows")
    first = cast(Tensor, getattr(*found[0]))
    if any(not torch.equal(cast(Tensor, getattr(module, name)), first) for module, name in found):
        raise UnsupportedModelError(f"{type(model).__name__}: {what}, but its layers turn keys in different ways")
    return found[0]


def _kind(module: Any, name: str) -> str:
    kind = getattr(module, "rope_type", "default")
    return kind.get(name.removesuffix("_inv_freq"), "default") if isinstance(kind, dict) else kind  # pyright: ignore


def _checked(model: PreTrainedModel, module: Any, name: str, what: str) -> Rotary:
    """Its rotary positions, in the form in which its own function turns keys."""
    prefix = name.removesuffix("inv_freq")
    scaling = getattr(module, f"{prefix}attention_scaling", getattr(module, "attention_scaling", 1.0))
    frequencies = cast(Tensor, getattr(module, name)).detach().float()
    shape = compat.kv_shape(compat.text_config(model))
    dim = shape[1] if shape else 2 * len(frequencies)
    for pairs in PAIRS:
        rotary = Rotary(frequencies, float(scaling), pairs)
        if _agrees(rotary, module, model, dim, prefix.removesuffix("_")):
            return rotary
    raise UnsupportedModelError(f"{type(model).__name__}: {what}, but its own rotation is of another form")


def _agrees(rotary: Rotary, module: Any, model: PreTrainedModel, dim: int, kind: str) -> bool:
    """Whether the model's own function turns keys as `rotary` does."""
    turn = next(
        (
            found
            for layer in model.modules()
            if (found := getattr(sys.modules.get(type(layer).__module__), "apply_rotary_pos_emb", None))
        ),
        None,
    )
    position = torch.tensor([[0, 1, 5, 300]], device=rotary.frequencies.device)
    draw = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 4, dim, generator=draw).to(position.device)
    try:
        cos, sin = module(k, position, kind) if kind else module(k, position)
        part = k[..., : cos.shape[-1]]
        theirs = cast(Any, turn)(part, part, cos, sin)[1]
    except Exception:  # of another form, whatever it is
        return False
    ours = rotary.on(k[:, 0], position)[:, None, :, : cos.shape[-1]]
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours, atol=1e-4)
