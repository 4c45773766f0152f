"""What kernels see of stored entries: pages of 64 keys of one kv head, in blocks of memory, found through a table.

A page of an exact tier holds k [64, D] and v [64, Dv] in the cache's dtype. A page of a coded tier holds bytes:

    k      codes of keys, unsigned (signed ones biased by +128), as [D/4][64][4]: four channels of a slot together
    v      codes of values, as [16][Dv/16][16][4]: four slots of a channel together; int8, or unsigned where asymmetric
    grid   symmetric: k scale [D], v scale [Dv], fp32
           else, in the cache's dtype: k scale [64/window, D], k zero [64/window, D], v scale [64], v zero [64],
           keys' grids being [64] where they are per token

Codes of 4 and 2 bits lie 2 and 4 to a byte, lowest bits first: along the first axis of the layouts above, which so
becomes [D/8] and [D/16], [8] and [4]. Slots past a length hold no meaning, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstrata.kernels.codec import Codec

PAGE = 64


@dataclass(frozen=True, slots=True)
class Format:
    """What a page of one tier is made of; `codec` None is the exact tier."""

    codec: Codec | None
    dtype: torch.dtype  # of the cache
    k_dim: int
    v_dim: int

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of one page's keys, in `payload_dtype`."""
        return (PAGE, self.k_dim) if self.codec is None else (PAGE * self.k_dim * self.codec.k_bits // 8,)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of one page's values, in `payload_dtype`."""
        return (PAGE, self.v_dim) if self.codec is None else (PAGE * self.v_dim * self.codec.v_bits // 8,)

    @property
    def grid_numbers(self) -> int:
        """Numbers of one page's grid, in `grid_dtype`."""
        if self.codec is None:
            return 0
        if self.codec.symmetric:
            return self.k_dim + self.v_dim
        keys = PAGE if self.codec.k_axis == "token" else PAGE // self.codec.window * self.k_dim
        return 2 * keys + 2 * PAGE

    @property
    def entry_bytes(self) -> int:
        """Bytes of one slot's key and value, without grids."""
        return (prod(self.k_shape) + prod(self.v_shape)) * self.payload_dtype.itemsize // PAGE

    @property
    def frame_numbers(self) -> int:
        """Numbers, fp32, that the pages of a row and head share: a running grid, or a mean key."""
        assert self.codec is not None
        return self.grid_numbers if self.codec.running else self.k_dim * self.codec.rotated

    @property
    def unit_bytes(self) -> int:
        """Bytes of the entries that are coded together, with the grid that is theirs alone."""
        assert self.codec is not None
        units = PAGE // self.codec.unit
        return self.codec.unit * self.entry_bytes + (0 if self.codec.running else self.grid_bytes // units)

    @property
    def payload_dtype(self) -> torch.dtype:
        """Of keys and values as stored."""
        return self.dtype if self.codec is None else torch.uint8

    @property
    def grid_dtype(self) -> torch.dtype:
        """Of grids as stored."""
        return torch.float32 if self.codec and self.codec.symmetric else self.dtype

    @property
    def grid_bytes(self) -> int:
        """Bytes of one page's grid."""
        return self.grid_numbers * self.grid_dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of keys and values, grid included."""
        return (prod(self.k_shape) + prod(self.v_shape)) * self.payload_dtype.itemsize + self.grid_bytes


class Block(NamedTuple):
    """Memory of pages first .. first+n-1: k [n, *k_shape], v [n, *v_shape], grid [n, grid_numbers]; 64-byte aligned."""

    first: int
    k: Tensor
    v: Tensor
    grid: Tensor


def block_of(blocks: Sequence[Block], page: int) -> Block:
    """The block that a page lies in."""
    return next(block for block in blocks if block.first <= page < block.first + block.k.shape[0])


def read_pages(blocks: Sequence[Block], pages: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """What one page or more hold: k [n, ...], v and grid, as a `Block` has them; views where numbers are in a row."""
    block, first, count = block_of(blocks, pages[0]), pages[0], len(pages)
    start = first - block.first
    if start + count <= block.k.shape[0] and list(pages) == list(range(first, first + count)):
        return block.k[start : start + count], block.v[start : start + count], block.grid[start : start + count]
    found = [(block := block_of(blocks, page), page - block.first) for page in pages]
    return (
        torch.stack([block.k[i] for block, i in found]),
        torch.stack([block.v[i] for block, i in found]),
        torch.stack([block.grid[i] for block, i in found]),
    )


def write_pages(blocks: Sequence[Block], pages: Sequence[int], k: Tensor, v: Tensor, grid: Tensor) -> None:
    """Fill these pages with what `read_pages` gives."""
    for i, page in enumerate(pages):
        block = block_of(blocks, page)
        at = page - block.first
        block.k[at], block.v[at], block.grid[at] = k[i], v[i], grid[i]


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One tier of one layer, for S = B*H segments in order (row, kv head).

    Slot t of segment s lies in page table[s, t // 64], at t % 64. Entries 64 * (columns of table) fit in a segment.
    """

    format: Format
    blocks: Sequence[Block]
    table: Tensor  # [S, P] int32 page numbers; what lies past a segment's pages holds no meaning
    lengths: Tensor  # [S] int32
    twin: Any = None  # what compiled kernels know them by, where such serve
    fills: Tensor | None = None  # [S, P] int32: entries of each page, its first slots, where pages may be short
