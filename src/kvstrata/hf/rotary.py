"""A model's rotary positions, read from its own module and checked against its own function."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.core import UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.policy.policy import Policy

FIXED = ("default", "linear", "llama3", "yarn")  # kinds whose angles do not depend on how long the text is


def rotary_of(model: PreTrainedModel) -> Rotary:
    """What turns keys in every compressed layer of a model.

    Raises `UnsupportedModelError` with the reason where keys cannot be turned back by it.
    """
    name = type(model).__name__

    def refuse(reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{name}: keys cannot be taken before rotary positions, since {reason}")

    modules = [cast(Any, module) for module in model.modules() if hasattr(module, "inv_freq")]
    if not modules:
        raise refuse("it has no rotary positions that transformers knows")
    module = modules[0]
    frequencies = cast(Tensor, module.inv_freq).detach().float()
    if any(not torch.equal(cast(Tensor, other.inv_freq).float(), frequencies) for other in modules):
        raise refuse("its layers turn keys in different ways")
    kind = getattr(module, "rope_type", "default")
    if kind not in FIXED:
        raise refuse(f"its angles change with the length of the text ({kind})")
    rotary = Rotary(frequencies, float(getattr(module, "attention_scaling", 1.0)))
    shape = compat.kv_shape(compat.text_config(model))
    dim = shape[1] if shape else 2 * len(frequencies)
    if not _agrees(rotary, module, model, dim):
        raise refuse("its own rotation is of another form")
    return rotary


def rotary_for(policy: Policy, model: PreTrainedModel) -> Rotary | None:
    """What a policy must know of a model's rotary positions: to code keys before them, and to judge what codes lose.

    Raises `UnsupportedModelError` where it cannot do without.
    """
    if not policy.codes:
        return None
    try:
        return rotary_of(model)
    except UnsupportedModelError:
        if "rotary" in policy.needs:
            raise
        return None


def _agrees(rotary: Rotary, module: Any, model: PreTrainedModel, dim: int) -> bool:
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
        cos, sin = module(k, position)
        part = k[..., : cos.shape[-1]]
        theirs = cast(Any, turn)(part, part, cos, sin)[1]
    except Exception:  # of another form, whatever it is
        return False
    ours = rotary.on(k[:, 0], position)[:, None, :, : cos.shape[-1]]
    return theirs.shape == ours.shape and torch.allclose(theirs.float(), ours, atol=1e-4)
