"""Entries of exact pages, written and moved.

One contract, two implementations:

    append(pages, k, v, tokens)    writes the last tokens[b] rows of k [B, H, Q, D] and v [B, H, Q, Dv] behind what
                                   each segment holds; the table must have room. `pages.lengths` counts them then.
    move(source, target, segment, at, to)    makes slot to[i] of segment[i] of `target` what slot at[i] of `source`
                                   was; all [n] int64. Lengths are not touched. Both may be the same pages if no slot
                                   is read and written.
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


gather, put = ref.gather, ref.put  # of whatever pages: their memory is torch's

__all__ = ["append", "gather", "move", "put"]
