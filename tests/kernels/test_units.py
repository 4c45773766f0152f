"""Units of codes moved and coded: compiled kernels against torch, bit for bit, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from kvstrata.kernels import dispatch, entries
from kvstrata.kernels.codec import INT2, INT4, INT8_RUNNING, packing, units
from kvstrata.kernels.pages import PAGE, Format
from kvstrata.store import Account, Arenas
from kvstrata.store.table import PageTable

DIM = 32
WINDOWS = {f"int{c.k_bits}-{w}": replace(c, window=w) for c in (INT4, INT2) for w in (8, 16, 32, 64)}


def opened(codec, kernels, dtype=torch.float32, pages=6):
    """An arena with pages taken: (format, arena, table of two segments with half of them each)."""
    form = Format(codec, dtype, DIM, DIM)
    arena = Arenas(Account()).get(form, torch.device("cpu"), kernels)
    taken = arena.take(pages, together=False)
    for page in taken:  # so that pages of both implementations begin alike
        block = arena.block_of(page)
        for memory in (block.k, block.v, block.grid):
            memory[page - block.first].zero_()
    return form, arena, torch.tensor(taken, dtype=torch.int32).view(2, -1)


def content(arena, table):
    k, v, grid = arena.read(table.flatten().tolist())
    return k.clone(), v.clone(), grid.clone()


def packed(form, pages, seed=0):
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(pages, PAGE, DIM, generator=draw).to(form.dtype) for _ in range(2))
    return packing.pack(form, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("codec", WINDOWS.values(), ids=WINDOWS)
def test_windows_move_alike(codec, dtype):
    found = []
    for kernels in ("native", "reference"):
        form, arena, table = opened(codec, kernels, dtype)
        fresh = packed(form, 6)
        draw = torch.Generator().manual_seed(1)
        places, unit = 3 * PAGE // codec.window, codec.window
        first = torch.randperm(6 * PAGE // unit, generator=draw)[: 2 * places - 2]
        target = [(s, p) for s in range(2) for p in torch.randperm(places, generator=draw)[: places - 1].tolist()]
        each = zip(first.tolist(), target, strict=True)
        moves = torch.tensor([(s, 3 * PAGE + f * unit, p * unit) for f, (s, p) in each])
        units.move_units(form, arena.blocks, table, moves.int(), fresh, arena.native)
        order = torch.randperm(places, generator=draw)  # then within, some of them
        inner = torch.tensor([(s, int(order[i]) * unit, i * unit) for s in range(2) for i in range(0, places, 2)])
        units.move_units(form, arena.blocks, table, inner.int(), packed(form, 0), arena.native)
        found.append(content(arena, table))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_running_grids_grow_alike(dtype):
    found = []
    for kernels in ("native", "reference"):
        form, arena, table = opened(INT8_RUNNING, kernels, dtype)
        exact = Format(None, dtype, DIM, DIM)
        own = Arenas(Account()).get(exact, torch.device("cpu"), kernels)
        source = PageTable(own, [100, 100], together=False)
        draw = torch.Generator().manual_seed(0)
        k, v = (torch.randn(2, 1, 100, DIM, generator=draw).to(dtype) for _ in range(2))
        k[0, 0, 7, 3], v[1, 0, 60, 5], k[1, 0, 61, 1] = float("nan"), float("inf"), 9.0
        source.resize([0, 0], keep_pages=True)
        view = source.view()
        entries.append(view, k, v, [100, 100])
        frames = torch.full((2, 2 * DIM), torch.nan)
        totals = []
        for start, stop in ((0, 5), (5, 6), (6, 70), (70, 100)):
            moves = [(s, i, i) for s in range(2) for i in range(start, stop)]
            args = (form, arena.blocks, view, table, torch.tensor(moves, dtype=torch.int32), frames, arena.native)
            totals.append(units.code_units(*args))
        k_codes, v_codes, grid = content(arena, table)
        found.append((*packing.unpack(form, k_codes, v_codes, grid), frames, torch.tensor(totals)))
    for mine, theirs in zip(*found, strict=True):
        used = mine.dim() == 3
        mine, theirs = (x.unflatten(0, (2, -1)).flatten(1, 2)[:, :100] if used else x for x in (mine, theirs))
        assert torch.equal(mine, theirs)
    assert found[0][3].sum(dim=0).tolist()[1] == 2, "numbers that are not finite"
    assert found[0][3].sum(dim=0).tolist()[0] > 0, "grids that grew"


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ([[2, 0, 0]], "segment 2"),
        ([[-1, 0, 0]], "segment -1"),
        ([[0, 0, 3 * PAGE]], "no slot"),
        ([[0, -8, 0]], "first slot of a unit"),
        ([[0, 4, 0]], "first slot of a unit"),
        ([[0, 5 * PAGE, 0]], "fresh page 2"),
    ],
)
def test_moves_that_cannot_be_are_refused(moves, message):
    form, arena, table = opened(WINDOWS["int2-8"], "native")
    before = content(arena, table)
    with pytest.raises(ValueError, match=message):
        units.move_units(
            form, arena.blocks, table, torch.tensor(moves, dtype=torch.int32), packed(form, 2), arena.native
        )
    assert all(torch.equal(*pair) for pair in zip(before, content(arena, table), strict=True))


def test_arguments_of_the_wrong_kind_are_refused():
    native = dispatch.native_module()
    form, arena, table = opened(WINDOWS["int2-8"], "native")
    moves, fresh = torch.zeros(1, 3, dtype=torch.int32), packed(form, 2)
    call = [arena.native, table, moves, 8, *fresh[:3]]
    for place, wrong in ((1, table.long()), (2, moves[:, :2]), (3, 16), (4, fresh.k.float()), (6, fresh.grid[:, :-1])):
        with pytest.raises(ValueError):
            native.move_units(*call[:place], wrong, *call[place + 1 :])
    gone = table.clone()
    gone[0, 0] = 99
    with pytest.raises(ValueError, match="no block has page 99"):
        native.move_units(arena.native, gone, moves, 8, *fresh[:3])
    with pytest.raises(TypeError):
        native.code_units(arena.native, None, table, moves, torch.zeros(2, 64))
