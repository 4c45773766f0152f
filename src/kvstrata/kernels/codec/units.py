"""Coded entries that come and go in units: moved from slot to slot with their grids, or coded under a running grid.

One contract, two implementations (the compiled module, and torch beside it):

    move_units(format, blocks, table, moves, fresh, native)
        moves [M, 3] int32 of (segment, slot, new slot), the first ones of units of `codec.unit`. Slots count over the
        pages table [S, P] int32 of a segment, and from 64 P on over those of `fresh`. All are read before any is
        written. Every page written to must be the segment's own.

    code_units(format, blocks, exact, table, moves, frames, native) -> grids that grew, numbers not finite
        codes the exact entries (segment, slot there, slot here) of a codec with a running grid. frames [S, D + Dv]
        fp32 are the grids, NaN where a segment has none yet: they grow by a tenth more than an entry needs, all codes
        of that segment are then rounded to the new grid, and every page of it has a copy. A table ends with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvstrata.kernels import dispatch, entries
from kvstrata.kernels.codec import ref
from kvstrata.kernels.codec.ref import Packed
from kvstrata.kernels.pages import PAGE, Block, Format, Pages, read_pages, write_pages

GROWTH = 1.1  # of a running grid, over what an entry that exceeds it needs


def move_units(
    format: Format, blocks: Sequence[Block], table: Tensor, moves: Tensor, fresh: Packed, native: Any = None
) -> None:
    """Move units; see the module docstring."""
    if len(moves) == 0:
        return
    assert format.codec is not None
    if native is not None:
        dispatch.native_module().move_units(native, table, moves, format.codec.unit, *fresh[:3])
        return
    unit, width = format.codec.unit, table.shape[1]
    inside = torch.arange(unit, device=moves.device)
    segment = moves[:, 0].long().repeat_interleave(unit)
    source, target = ((moves[:, i, None].long() + inside).flatten() for i in (1, 2))
    slots = torch.arange(width * PAGE, device=moves.device).repeat(len(table), 1)
    slots[segment, target] = source
    written: list[list[int]] = torch.stack([segment, target // PAGE], dim=1).unique(dim=0).tolist()
    read: dict[int, int] = {}  # page number, or -1 - n of fresh page n -> place in what is read
    rows: list[Tensor] = []
    for s, page in written:
        row = slots[s, page * PAGE : (page + 1) * PAGE]
        which: list[int] = (row // PAGE).unique().tolist()
        numbers = [int(table[s, p]) if p < width else width - p - 1 for p in which]
        place = torch.zeros(which[-1] + 1, dtype=torch.long, device=row.device)
        place[which] = torch.tensor([read.setdefault(n, len(read)) for n in numbers], device=row.device)
        rows.append(place[row // PAGE] * PAGE + row % PAGE)
    old, new = [n for n in read if n >= 0], [-1 - n for n in read if n < 0]
    parts = [part[new] for part in fresh[:3]]
    if old:
        parts = [torch.cat(pair) for pair in zip(read_pages(blocks, old), parts, strict=True)]
    order = torch.tensor([*(read[n] for n in old), *(read[-1 - n] for n in new)], device=moves.device).argsort()
    k, v, grid = (part[order] for part in parts)
    content = ref.pick(format, k, v, grid, torch.stack(rows))
    write_pages(blocks, [int(table[s, page]) for s, page in written], *content)


def code_units(
    format: Format,
    blocks: Sequence[Block],
    exact: Pages,
    table: Tensor,
    moves: Tensor,
    frames: Tensor,
    native: Any = None,
) -> tuple[int, int]:
    """Code entries under running grids; see the module docstring."""
    if native is not None:
        return dispatch.native_module().code_units(native, exact.twin, table, moves, frames)
    grown = others = 0
    for s in moves[:, 0].unique().tolist():
        mine = moves[moves[:, 0] == s].long()
        k, v = (x.float() for x in entries.gather(exact, mine[:, 0], mine[:, 1]))
        numbers = torch.cat([k, v], dim=1)
        others += int((~numbers.isfinite()).sum())
        need = numbers.abs().masked_fill(~numbers.isfinite(), 0.0).amax(dim=0) / frames.new_full((), 127.0)
        pages: list[int] = [page for page in table[s].tolist() if page >= 0]
        grown += _grow(format, blocks, pages, frames[s], need)
        _, _, grid = read_pages(blocks, pages)
        write_pages(blocks, pages, *read_pages(blocks, pages)[:2], frames[s].expand_as(grid))
        pages_k, pages_v = (ref.in_pages(x, 1) for x in (k, v))
        fresh = ref.pack(format, pages_k, pages_v, grid=frames[s].expand(len(pages_k), -1))
        first = table.shape[1] * PAGE
        at = torch.arange(first, first + len(k), device=mine.device)
        move_units(format, blocks, table, torch.stack([mine[:, 0], at, mine[:, 2]], dim=1).int(), fresh)
    return grown, others


def _grow(format: Format, blocks: Sequence[Block], pages: list[int], frame: Tensor, need: Tensor) -> bool:
    """Make a segment's grid what it needs to be, in place; True if codes had to be rounded anew."""
    if bool(frame.isnan().any()):
        frame.copy_(torch.where(need > 0, need, 1.0))
        return False
    if not bool((need > frame).any()):
        return False
    k, v, _ = read_pages(blocks, pages)
    numbers = ref.unpack(format, k, v, frame.expand(len(pages), -1))
    frame.copy_(torch.where(need > frame, need * GROWTH, frame))
    packed = ref.pack(format, *numbers, grid=frame.expand(len(pages), -1))
    write_pages(blocks, pages, *packed[:3])
    return True
