"""Reference in torch: entries are rows of the blocks, found through the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvstrata.kernels.pages import PAGE, Block, Pages

Part = Literal["k", "v"]
PARTS: tuple[Part, ...] = ("k", "v")


def append(pages: Pages, k: Tensor, v: Tensor, tokens: Sequence[int]) -> None:
    """See `kernels.entries`."""
    heads = k.shape[1]
    new = torch.tensor(tokens, dtype=torch.int32, device=k.device).repeat_interleave(heads)
    back = torch.arange(-max(tokens, default=0), 0, device=k.device)
    segment, at = (back >= -new[:, None]).nonzero(as_tuple=True)
    rows = _rows(pages, segment, pages.lengths[segment] + at - (back.shape[0] - new[segment]))
    for part, fresh in zip(PARTS, (k, v), strict=True):
        _write(pages, part, rows, fresh[:, :, fresh.shape[2] - back.shape[0] :].flatten(0, 1)[segment, at])
    pages.lengths.add_(new)


def move(source: Pages, target: Pages, segment: Tensor, at: Tensor, to: Tensor) -> None:
    """See `kernels.entries`."""
    come, go = _rows(source, segment, at), _rows(target, segment, to)
    for part in PARTS:  # one after the other, so that the copies in the making are half as large
        _write(target, part, go, _take(source, part, come))


def gather(pages: Pages, segment: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.entries`."""
    rows = _rows(pages, segment, slot)
    return _take(pages, "k", rows), _take(pages, "v", rows)


def put(pages: Pages, segment: Tensor, slot: Tensor, k: Tensor | None, v: Tensor) -> None:
    """See `kernels.entries`."""
    rows = _rows(pages, segment, slot)
    if k is not None:
        _write(pages, "k", rows, k)
    _write(pages, "v", rows, v)


def _take(pages: Pages, part: Part, rows: Tensor) -> Tensor:
    """Copies [n, D] of rows."""
    blocks = tuple(pages.blocks)  # another thread's fork may change the list
    memory = [_flat(block, part) for block in blocks]
    if len(memory) == 1:
        return memory[0][rows - blocks[0].first * PAGE]
    out = memory[0].new_empty(len(rows), memory[0].shape[1])
    for flat, which, at in _by_block(blocks, memory, rows):
        out[which] = flat[at]
    return out


def _write(pages: Pages, part: Part, rows: Tensor, values: Tensor) -> None:
    blocks = tuple(pages.blocks)  # another thread's fork may change the list
    memory = [_flat(block, part) for block in blocks]
    if len(memory) == 1:
        memory[0][rows - blocks[0].first * PAGE] = values
        return
    for flat, which, at in _by_block(blocks, memory, rows):
        flat[at] = values[which]


def _flat(block: Block, part: Part) -> Tensor:
    """Rows [pages * PAGE, D] of one block's keys or values."""
    memory = block.k if part == "k" else block.v
    return memory.view(-1, memory.shape[-1])


def _rows(pages: Pages, segment: Tensor, slot: Tensor) -> Tensor:
    """Number of an entry's row, counted over all pages by their numbers."""
    slot = slot.long()
    return pages.table[segment, slot // PAGE].long() * PAGE + slot % PAGE


def _by_block(blocks: Sequence[Block], memory: list[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (memory of one block, which of `rows` lie in it, where in it)."""
    for block, flat in zip(blocks, memory, strict=True):
        at = rows - block.first * PAGE
        which = ((at >= 0) & (at < len(flat))).nonzero().flatten()
        if which.numel():
            yield flat, which, at[which]
