"""Pages of exact entries to codes and back, by the implementation that serves: both give the same codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.codec import ref
from kvstrata.kernels.codec.ref import Packed, in_pages, key_noise, pick, reorder
from kvstrata.kernels.codec.rotation import hadamard
from kvstrata.kernels.pages import PAGE, Format


def pack(format: Format, k: Tensor, v: Tensor, native: Any = None, grid: Tensor | None = None) -> Packed:
    """Code n whole pages k [n, 64, D] and v [n, 64, Dv]; `native` is the arena they go to, where that has a twin.

    `grid` [n, numbers] is used as it is where given.
    """
    if native is None or grid is not None:
        return ref.pack(format, k, v, grid)
    n = k.shape[0]
    k_codes = torch.empty(n, *format.k_shape, dtype=torch.uint8)
    v_codes = torch.empty(n, *format.v_shape, dtype=torch.uint8)
    grid = torch.empty(n, format.grid_numbers, dtype=format.grid_dtype)
    nonfinite = dispatch.native_module().pack(native, k.contiguous(), v.contiguous(), k_codes, v_codes, grid)
    return Packed(k_codes, v_codes, grid, nonfinite)


def unpack(format: Format, k: Tensor, v: Tensor, grid: Tensor, native: Any = None) -> tuple[Tensor, Tensor]:
    """Give keys [n, 64, D] and values [n, 64, Dv] in fp32, as the codes of n pages and their grids have them."""
    if native is None:
        return ref.unpack(format, k, v, grid)
    out = torch.empty(len(k), PAGE, format.k_dim), torch.empty(len(v), PAGE, format.v_dim)
    dispatch.native_module().unpack(native, k, v, grid, *out)
    return out


def key_loss(format: Format, k: Tensor, before: Tensor) -> float:
    """Squared error of the codes of keys [n, D], over the variance of what tells one key from another.

    `before` [n, D] fp32 are the same keys without rotary positions, where biases that all of them share do not vary.
    0 where nothing varies, NaN where there are too few keys to tell.
    """
    codec = format.codec
    assert codec is not None
    n = len(k) // codec.unit * codec.unit
    x = (before if codec.key_space == "pre" else k.float())[:n]
    if not n:
        return float("nan")
    signal = float((before - before.mean(dim=0)).square().mean())
    if not 0 < signal < float("inf"):
        return 0.0
    x = hadamard(x - x.mean(dim=0)) if codec.rotated else x
    pages = in_pages(x, codec.unit)
    v = pages.new_zeros(*pages.shape[:2], format.v_dim)
    kept = ref.unpack(format, *ref.pack(format, pages, v)[:3])[0].flatten(0, 1)[:n]
    return float((kept - x).square().mean()) / signal


__all__ = ["Packed", "in_pages", "key_loss", "key_noise", "pack", "pick", "reorder", "unpack"]
