"""Entries of pages as dense tensors: for references, for tests, and where no kernel reads pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels.codec.ref import unpack
from kvstrata.kernels.pages import PAGE, Block, Format, Pages


def read(pages: Pages) -> tuple[Tensor, Tensor]:
    """Give k [S, N, D] and v [S, N, Dv], zeros past each length, where N is the longest.

    In the cache's dtype of an exact tier, in fp32 of a coded one. Raises `ValueError` where a length needs a page
    that the table has no room for, or that is in no block.
    """
    format, (segments, room) = pages.format, pages.table.shape
    longest = int(pages.lengths.max()) if segments else 0
    columns = -(-longest // PAGE)
    if columns > room:
        raise ValueError(f"a length of {longest} in tables of {room} pages")
    device, dtype = pages.table.device, format.dtype if format.codec is None else torch.float32
    k = torch.zeros(segments, columns, PAGE, format.k_dim, dtype=dtype, device=device)
    v = torch.zeros(segments, columns, PAGE, format.v_dim, dtype=dtype, device=device)
    slots = torch.arange(columns * PAGE, device=device) < pages.lengths[:, None]  # [S, N]
    missing = slots[:, ::PAGE].clone()  # [S, pages]: what lies past a segment's pages means nothing
    for block in tuple(pages.blocks):
        place = pages.table[:, :columns] - block.first
        here = missing & (place >= 0) & (place < block.k.shape[0])
        k[here], v[here] = _entries(format, block, place[here])
        missing &= ~here
    if missing.any():
        raise ValueError(f"pages {pages.table[:, :columns][missing].unique().tolist()} are in no block")
    k, v = (x.flatten(1, 2).masked_fill_(~slots[..., None], 0.0)[:, :longest] for x in (k, v))
    return k, v


def _entries(format: Format, block: Block, places: Tensor) -> tuple[Tensor, Tensor]:
    """All slots k [n, 64, D] and v [n, 64, Dv] of n pages of a block."""
    if format.codec is None:
        return block.k[places], block.v[places]
    return unpack(format, block.k[places], block.v[places], block.grid[places])
