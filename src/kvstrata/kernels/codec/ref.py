"""Reference codec in torch: whole pages of keys and values to codes with a grid, and back. All arithmetic is fp32.

A grid is over the finite numbers of its group. Codes of an infinity are the outermost ones, and of NaN 0. A symmetric
code c of b bits, |c| <= 2^(b-1) - 1, is stored plus 2^(b-1) for keys and in two's complement for values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstrata.kernels.pages import PAGE, Format


class Packed(NamedTuple):
    """Pages as a `Block` keeps them, and how many of the numbers they came from were infinite or NaN."""

    k: Tensor
    v: Tensor
    grid: Tensor
    nonfinite: int


def pack(format: Format, k: Tensor, v: Tensor, grid: Tensor | None = None) -> Packed:
    """Code n whole pages k [n, 64, D] and v [n, 64, Dv], in the cache's dtype; `grid` [n, numbers] is made if None."""
    keys, values = _halves(format)
    n = k.shape[0]
    if k.shape != (n, PAGE, keys.dim) or v.shape != (n, PAGE, values.dim):
        raise ValueError(f"no pages [n, {PAGE}, {keys.dim}] and [n, {PAGE}, {values.dim}]: {k.shape} and {v.shape}")
    if not k.dtype == v.dtype or k.dtype not in (format.dtype, torch.float32):
        raise ValueError(f"numbers of {k.dtype} and {v.dtype} for a cache of {format.dtype}")
    k, v = k.float(), v.float()
    if grid is None:
        k_grid, v_grid = keys.grid(k, format.dtype), values.grid(v, format.dtype)
    else:
        k_grid, v_grid = _grids(format, grid)
    k_tiles = keys.code(k, *k_grid).unflatten(2, (-1, 4)).transpose(1, 2)  # [n, D/4, 64, 4]
    v_tiles = values.code(v, *v_grid).unflatten(1, (-1, 4)).transpose(2, 3)  # [n, 16, Dv, 4]
    nonfinite = k.numel() + v.numel() - int(k.isfinite().sum() + v.isfinite().sum())
    kept = torch.cat([*k_grid, *v_grid], dim=1).to(format.grid_dtype)
    return Packed(_stack(k_tiles, keys.bits), _stack(v_tiles, values.bits), kept, nonfinite)


def in_pages(x: Tensor, unit: int) -> Tensor:
    """x [n, D], whole units, as pages [m, 64, D]; the last one is filled with its last unit, which means nothing."""
    return torch.cat([x, x[-unit:].repeat(-len(x) % PAGE // unit, 1)]).unflatten(0, (-1, PAGE))


def unpack(format: Format, k_codes: Tensor, v_codes: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Give k [n, 64, D] and v [n, 64, Dv] in fp32, zero + scale * code, of n pages as a `Block` keeps them."""
    keys, values = _halves(format)
    k_grid, v_grid = _grids(format, grid)
    k_tiles, v_tiles = _unstack(k_codes, keys.bits, PAGE), _unstack(v_codes, values.bits, values.dim)
    k, v = k_tiles.transpose(1, 2).flatten(2), v_tiles.transpose(2, 3).flatten(1, 2)
    return keys.decode(k, *k_grid), values.decode(v, *v_grid)


@dataclass(frozen=True, slots=True)
class _Half:
    """How the keys of a page, or its values, are coded."""

    dim: int
    bits: int
    symmetric: bool
    window: int | None  # consecutive slots that share a channel's grid; None: every slot has one over its channels
    bias: int  # of signed codes as stored

    @property
    def top(self) -> int:
        """The outermost code."""
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1

    @property
    def grid_sizes(self) -> list[int]:
        """Numbers of a page's scales and, unless symmetric, of its zeros."""
        groups = PAGE if self.window is None else PAGE // self.window * self.dim
        return [groups] if self.symmetric else [groups, groups]

    def grid(self, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """x [n, 64, dim] -> scale and, unless symmetric, zero, as kept: fp32 [n, groups]."""
        finite = x.isfinite()
        top = x.new_full((), self.top)  # by a plain number torch may divide through its reciprocal, which rounds twice
        if self.symmetric:
            scale = self._reduce(torch.amax, x.abs().where(finite, 0.0)) / top
            return [scale.where(scale > 0, 1.0)]
        low = self._reduce(torch.amin, x.where(finite, math.inf))
        high = self._reduce(torch.amax, x.where(finite, -math.inf))
        scale = ((high - low) / top).to(dtype).float()
        zero = low.where(low.isfinite(), 0.0).to(dtype).float() + 0.0  # of -0 and 0 either may be the least: keep 0
        return [scale.where(scale.isfinite() & (scale > 0), 1.0), zero]

    def code(self, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """x [n, 64, dim] -> codes as stored, uint8."""
        bottom = -self.top if self.symmetric else 0
        steps = (x if zero is None else x - self._spread(zero)) / self._spread(scale)
        codes = steps.round().clamp(bottom, self.top).where(~x.isnan(), 0.0).int()
        return ((codes + self.bias) & (2**self.bits - 1)).to(torch.uint8)

    def decode(self, stored: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Codes as stored [n, 64, dim] -> fp32."""
        if zero is not None:
            return stored.float() * self._spread(scale) + self._spread(zero)
        half = 2 ** (self.bits - 1)
        return ((stored.int() - self.bias + half) % (2 * half) - half).float() * self._spread(scale)

    def _reduce(self, extreme: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
        """Over every group: [n, 64, dim] -> [n, groups]."""
        return extreme(x, 2) if self.window is None else extreme(x.unflatten(1, (-1, self.window)), 2).flatten(1)

    def _spread(self, grid: Tensor) -> Tensor:
        """To every number of a group: [n, groups] -> what broadcasts to [n, 64, dim]."""
        if self.window is None:
            return grid[:, :, None]
        return grid.unflatten(1, (-1, self.dim)).repeat_interleave(self.window, dim=1)


def _halves(format: Format) -> tuple[_Half, _Half]:
    """Of keys and of values."""
    codec = format.codec
    if codec is None:
        raise ValueError("pages of an exact tier have no codes")
    k_window = codec.window if codec.k_axis == "channel" else None
    v_window = PAGE if codec.v_axis == "channel" else None
    keys = _Half(format.k_dim, codec.k_bits, codec.symmetric, k_window, 2 ** (codec.k_bits - 1) * codec.symmetric)
    return keys, _Half(format.v_dim, codec.v_bits, codec.symmetric, v_window, 0)


def _grids(format: Format, grid: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """A grid [n, numbers] as kept -> scale and, unless symmetric, zero, of keys and of values, fp32."""
    keys, values = _grids_as_kept(format, grid)
    return [part.float() for part in keys], [part.float() for part in values]


def key_noise(format: Format, grid: Tensor) -> Tensor:
    """Variance [n, 64] of what rounding does to a channel of each key of n pages, step^2 / 12: grids per token."""
    return _grids(format, grid)[0][0].square() / 12


def _stack(tiles: Tensor, bits: int) -> Tensor:
    """Codes [n, tiles, width, 4] -> bytes [n, ...]: in each the codes of 8 / bits tiles, the first lowest."""
    planes = tiles.unflatten(1, (-1, 8 // bits)).unbind(2)
    stacked = torch.zeros_like(planes[0])
    for i, plane in enumerate(planes):
        stacked |= plane << (i * bits)
    return stacked.flatten(1)


def _unstack(stacked: Tensor, bits: int, width: int) -> Tensor:
    """Undo `_stack`."""
    byte = stacked.unflatten(1, (-1, width, 4))
    planes = [(byte >> i * bits) & (2**bits - 1) for i in range(8 // bits)]
    return torch.stack(planes, dim=2).flatten(1, 2)


def reorder(format: Format, k: Tensor, v: Tensor, grid: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Let slot j of page i be what its slot order[i, j] was: order [n, 64] int64, the others as a `Block` keeps them.

    Raises `ValueError` where entries of one page have different grids of keys, which cannot change places.
    """
    keys, _ = _halves(format)
    if keys.window not in (PAGE, None):
        raise ValueError(f"windows of {keys.window} entries have grids of their own: drop them whole")
    first = torch.arange(len(k), device=order.device)[:, None] * PAGE
    return pick(format, k, v, grid, first + order)


def pick(format: Format, k: Tensor, v: Tensor, grid: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make pages of the slots source [m, 64] int64, counted over all n pages given: slot t of page p is 64 p + t.

    Entries with a grid of their own must come together and at a multiple of their number. Grids that a whole page has
    are those of the page that its first slot comes from.
    """
    keys, values = _halves(format)
    k_tiles = k.unflatten(1, (-1, PAGE, 4)).transpose(1, 2).flatten(0, 1)[source.flatten()]  # [m * 64, tiles, 4]
    k_tiles = k_tiles.unflatten(0, source.shape).transpose(1, 2)
    codes = _unstack(v, values.bits, values.dim).transpose(2, 3).flatten(1, 2).flatten(0, 1)  # [n * 64, Dv]
    codes = codes[source.flatten()].unflatten(0, source.shape).unflatten(1, (-1, 4)).transpose(2, 3)
    parts: list[Tensor] = []
    for half, kept in zip((keys, values), _grids_as_kept(format, grid), strict=True):
        for part in kept:
            if half.window is None:
                parts.append(part.flatten()[source])
            else:
                per_page = PAGE // half.window
                rows = part.unflatten(1, (per_page, half.dim)).flatten(0, 1)
                parts.append(rows[source[:, :: half.window] // half.window].flatten(1))
    return k_tiles.flatten(1), _stack(codes, values.bits), torch.cat(parts, dim=1)


def _grids_as_kept(format: Format, grid: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    keys, values = _halves(format)
    parts = list(grid.split([*keys.grid_sizes, *values.grid_sizes], dim=1))
    return parts[: len(keys.grid_sizes)], parts[len(keys.grid_sizes) :]
