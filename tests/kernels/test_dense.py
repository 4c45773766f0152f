from __future__ import annotations

import math

import pytest
import torch

from kvstrata.kernels import dense
from kvstrata.kernels.codec import CODECS
from kvstrata.kernels.codec.ref import pack, unpack
from kvstrata.kernels.pages import PAGE, Block, Format, Pages

NOWHERE = 10**8
LENGTHS = [130, 0, 1, 64, 65]
formats = pytest.mark.parametrize(
    "format",
    [Format(codec, torch.bfloat16, 32, 48) for codec in (None, *CODECS.values())],
    ids=["exact", *CODECS],
)


def numbered(format, pages, first):
    """A block of random pages, and what they hold."""
    k, v = (torch.randn(pages, PAGE, dim).to(format.dtype) for dim in (format.k_dim, format.v_dim))
    if format.codec is None:
        return Block(first, k, v, torch.empty(pages, 0)), k, v
    packed = pack(format, k, v)
    return Block(first, *packed[:3]), *unpack(format, *packed[:3])


def case(format):
    """Segments of LENGTHS whose pages lie in three blocks, out of order; and their entries, page by page."""
    made = [numbered(format, 3, first) for first in (2, 5, 20)]
    k, v = {}, {}
    for block, block_k, block_v in made:
        for i in range(3):
            k[block.first + i], v[block.first + i] = block_k[i], block_v[i]
    numbers = iter([21, 2, 6, 5, 22, 4, 20, 3, 7])
    table = torch.full((len(LENGTHS), 4), NOWHERE, dtype=torch.int32)
    for row, n in zip(table, LENGTHS, strict=True):
        for place in range(-(-n // PAGE)):
            row[place] = next(numbers)
    pages = Pages(format, [block for block, _, _ in made], table, torch.tensor(LENGTHS, dtype=torch.int32))
    return pages, k, v


@formats
def test_every_entry_comes_from_its_page(format):
    pages, *held = case(format)
    for found, parts in zip(dense.read(pages), held, strict=True):
        assert found.shape == (len(LENGTHS), max(LENGTHS), parts[2].shape[-1])
        assert found.dtype == (format.dtype if format.codec is None else torch.float32)
        for segment, n in enumerate(LENGTHS):
            assert not found[segment, n:].any()
            for t in range(n):
                assert torch.equal(found[segment, t], parts[int(pages.table[segment, t // PAGE])][t % PAGE])


@formats
def test_free_slots_show_nothing_of_what_they_hold(format):
    pages, *_ = case(format)
    expected = dense.read(pages)
    for block in pages.blocks:
        for i in range(3):
            place = (pages.table == block.first + i).nonzero()
            n = max(0, LENGTHS[place[0, 0]] - PAGE * int(place[0, 1])) if len(place) else 0
            if format.codec is None:
                block.k[i, n:], block.v[i, n:] = math.nan, math.nan
            elif n == 0:
                block.grid[i] = math.nan
            elif not format.codec.symmetric:
                block.grid[i, -2 * PAGE :].view(2, PAGE)[:, n:] = math.nan
    assert all(map(torch.equal, dense.read(pages), expected))


@formats
def test_nothing_at_all_is_read_as_nothing(format):
    pages, *_ = case(format)
    pages.lengths.zero_()
    assert [x.shape[:2] for x in dense.read(pages)] == [(len(LENGTHS), 0)] * 2


def test_pages_that_are_not_there_are_named():
    pages, *_ = case(Format(None, torch.float32, 16, 16))
    pages.lengths[0] = 200
    with pytest.raises(ValueError, match=str(NOWHERE)):
        dense.read(pages)
    pages.lengths[0] = 300
    with pytest.raises(ValueError, match="300"):
        dense.read(pages)
