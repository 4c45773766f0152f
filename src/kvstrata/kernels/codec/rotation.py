"""Turning vectors so that few bits do them less harm: Hadamard matrices, and rotary positions taken off and put on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Pairs = Literal["halves", "neighbours"]
PAIRS: tuple[Pairs, ...] = ("halves", "neighbours")


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
    """A model's rotary positions: angles position * frequencies [R/2] turn pairs of the first R channels.

    pairs: "halves" (i, i + R/2), or "neighbours" (2i, 2i + 1). `scaling` multiplies both parts, as YaRN does.
    """

    frequencies: Tensor
    scaling: float = 1.0
    pairs: Pairs = "halves"

    def on(self, x: Tensor, position: Tensor) -> Tensor:
        """x [..., D] fp32 at `position` [...], as attention reads it."""
        return self._turn(x, position, 1.0, self.scaling)

    def off(self, x: Tensor, position: Tensor) -> Tensor:
        """Undo `on`."""
        return self._turn(x, position, -1.0, 1.0 / self.scaling)

    def by(self, x: Tensor, steps: int) -> Tensor:
        """x [..., D] `steps` positions later, or earlier where that is negative."""
        return self._turn(x.float(), torch.tensor(steps, device=x.device), 1.0, 1.0)

    def _turn(self, x: Tensor, position: Tensor, sign: float, scaling: float) -> Tensor:
        angle = position[..., None].float() * self.frequencies.to(x.device)
        cos, sin = angle.cos() * scaling, angle.sin() * (sign * scaling)
        size = 2 * angle.shape[-1]
        if self.pairs == "halves":
            a, b = x[..., :size].chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., size:]], dim=-1)
        a, b = x[..., 0:size:2], x[..., 1:size:2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        return torch.cat([turned, x[..., size:]], dim=-1)
