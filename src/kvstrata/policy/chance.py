"""Draws that depend on nothing but what they are for, so that a row draws the same alone and in a batch."""

from __future__ import annotations

from torch import Tensor


def uniform(position: Tensor, *words: int | Tensor) -> Tensor:
    """Numbers in [0, 1), a hash of each position and of `words` (seed, layer, step), which may be tensors like it."""
    x = position.long()
    for word in words:
        x = _mix(x * 31 + word)
    return (x & 0xFFFFFF).float() / float(1 << 24)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values by multiplying and folding; the multipliers are splitmix64's, as signed words."""
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)
