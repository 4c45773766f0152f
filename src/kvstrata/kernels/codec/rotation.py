"""Turning vectors so that few bits do them less harm: Hadamard matrices, and rotary positions taken off and put on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Turn the last axis of x by an orthogonal, symmetric Hadamard matrix: twice is what it was.

    Where the axis is no power of two, each part of the largest power of two that divides it is turned for itself.
    """
    dim = x.shape[-1]
    size = dim & -dim
    return (x.unflatten(-1, (-1, size)) @ _matrix(size).to(x.device)).flatten(-2)


@cache
def _matrix(size: int) -> Tensor:
    if size == 1:
        return torch.ones(1, 1)
    half = _matrix(size // 2)
    return torch.cat([torch.cat([half, half], dim=1), torch.cat([half, -half], dim=1)]) * 0.5**0.5


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """A model's rotary positions: angles position * frequencies [R/2] turn channel pairs (i, i + R/2) of the first R.

    `scaling` multiplies both parts, as YaRN does.
    """

    frequencies: Tensor
    scaling: float = 1.0

    def on(self, x: Tensor, position: Tensor) -> Tensor:
        """x [..., D] fp32 at `position` [...], as attention reads it."""
        return self._turn(x, position, 1.0, self.scaling)

    def off(self, x: Tensor, position: Tensor) -> Tensor:
        """Undo `on`."""
        return self._turn(x, position, -1.0, 1.0 / self.scaling)

    def _turn(self, x: Tensor, position: Tensor, sign: float, scaling: float) -> Tensor:
        angle = position[..., None].float() * self.frequencies.to(x.device)
        cos, sin = angle.cos() * scaling, angle.sin() * (sign * scaling)
        a, b = x[..., : 2 * angle.shape[-1]].chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * angle.shape[-1] :]], dim=-1)
