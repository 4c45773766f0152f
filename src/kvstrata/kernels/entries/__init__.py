"""Entries of exact pages, written and moved.

One contract, two implementations; `put` has the reference alone:

    append(pages, k, v, tokens)    writes the last tokens[b] rows of k [B, H, Q, D] and v [B, H, Q, Dv] behind what
                                   each segment holds; the table must have room. `pages.lengths` counts them then.
    move(source, target, segment, at, to)    makes slot to[i] of segment[i] of `target` what slot at[i] of `source`
                                   was; all [n] int64. Lengths are not touched. Both may be the same pages if no slot
                                   is read and written.
    gather(pages, segment, slot)   copies: keys [n, D] and values [n, Dv] of entries named by segment and slot [n].
    put(pages, segment, slot, k, v)          overwrites such entries; k may be None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.entries import ref
from kvstrata.kernels.pages import Pages

MANY = 8192  # entries from which waking other threads pays


def append(pages: Pages, k: Tensor, v: Tensor, tokens: Sequence[int]) -> None:
    """Write new entries behind those stored; see the module docstring."""
    if not any(tokens):
        return
    if k.device.type != "cpu" or pages.twin is None:
        ref.append(pages, k, v, tokens)
        return
    dispatch.native_module().append(pages.twin, k, v, torch.tensor(tokens, dtype=torch.int32))


def move(source: Pages, target: Pages, segment: Tensor, at: Tensor, to: Tensor) -> None:
    """Copy entries from slot to slot; see the module docstring."""
    if to.device.type != "cpu" or source.twin is None:
        ref.move(source, target, segment, at, to)
        return
    order = torch.full((len(source.lengths), int(to.max()) + 1), -1, dtype=torch.int32)
    order[segment, to] = at.int()
    threads = 1 if len(to) < MANY else dispatch.native_threads()
    dispatch.native_module().move(source.twin, target.twin, order, threads=threads)


def gather(pages: Pages, segment: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the entries at some slots; see the module docstring."""
    if slot.device.type != "cpu" or pages.twin is None:
        return ref.gather(pages, segment, slot)
    dims = pages.format.k_dim, pages.format.v_dim
    k, v = (torch.empty(len(slot), dim, dtype=pages.format.dtype) for dim in dims)
    if len(slot):
        dispatch.native_module().gather(pages.twin, segment.int(), slot.int(), k, v)
    return k, v


put = ref.put

__all__ = ["append", "gather", "move", "put"]
