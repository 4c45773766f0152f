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
class Turn:
    """Pairs of the first R channels turned by angles whose cosines and sines are [..., R/2].

    pairs: "halves" (i, i + R/2), or "neighbours" (2i, 2i + 1).
    """

    cos: Tensor
    sin: Tensor
    pairs: Pairs = "halves"

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] turned, as new fp32 numbers."""
        out = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        cos, sin = self.cos.to(x.device), self.sin.to(x.device)
        size = 2 * cos.shape[-1]
        if self.pairs == "halves":
            a, b = out[..., :size].chunk(2, dim=-1)
        else:
            a, b = out[..., 0:size:2], out[..., 1:size:2]
        before = a.clone()
        a.mul_(cos).addcmul_(b, sin, value=-1.0)
        b.mul_(cos).addcmul_(before, sin)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """A model's rotary positions: angles position * frequencies [R/2] turn pairs of channels, as `Turn` names them.

    `scaling` multiplies both parts, as YaRN does.
    """

    frequencies: Tensor
    scaling: float = 1.0
    pairs: Pairs = "halves"

    def on(self, x: Tensor, position: Tensor) -> Tensor:
        """x [..., D] fp32 at `position` [...], as attention reads it."""
        return self._at(position, 1.0, self.scaling)(x)

    def off(self, x: Tensor, position: Tensor) -> Tensor:
        """Undo `on`."""
        return self._at(position, -1.0, 1.0 / self.scaling)(x)

    def by(self, steps: int) -> Turn:
        """What takes keys or queries `steps` positions later, or earlier where that is negative."""
        return self._at(torch.tensor(steps, device=self.frequencies.device), 1.0, 1.0)

    def _at(self, position: Tensor, sign: float, scaling: float) -> Turn:
        angle = position[..., None].float() * self.frequencies.to(position.device)
        return Turn(angle.cos() * scaling, angle.sin() * (sign * scaling), self.pairs)
