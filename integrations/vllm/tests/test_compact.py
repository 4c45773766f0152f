"""Tables without the blocks that are gone, on CPU tensors: the code is the device's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvstrata_vllm.compact import compact, find_slots

BLOCK = 4


@st.composite
def batches(draw):
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, width * BLOCK), min_size=rows, max_size=rows))
    slots = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    gone = draw(st.sets(st.tuples(st.integers(1, 3), st.integers(0, width - 1))))
    return width, lengths, slots, gone


@given(batches())
def test_kept_blocks_come_first_and_in_order(batch):
    width, lengths, slots, gone = batch
    table = torch.randperm(1000)[: len(lengths) * width].view(len(lengths), width).int()
    keep = torch.ones(4, width, dtype=torch.bool)
    for slot, block in gone:
        keep[slot, block] = False
    rows = compact(table, torch.tensor(lengths, dtype=torch.int32), torch.tensor(slots), keep, BLOCK)
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        there = [b for b in range(-(-length // BLOCK)) if (slot, b) not in gone]
        lost = -(-length // BLOCK) - len(there)
        assert rows.order[row, : len(there)].tolist() == there
        assert rows.table[row, : len(there)].tolist() == table[row, there].tolist()
        assert rows.lengths[row] == length - lost * BLOCK
    assert rows.table.dtype == torch.int32
    assert rows.lengths.dtype == torch.int32


def test_a_padding_row_stays_empty():
    keep = torch.tensor([[True, True], [False, True]])
    rows = compact(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([0]), torch.tensor([1]), keep, BLOCK)
    assert rows.lengths.tolist() == [0]


def test_a_row_is_told_by_the_block_that_its_last_token_goes_to():
    slot_of_block = torch.zeros(20, dtype=torch.long)
    slot_of_block[7], slot_of_block[3] = 5, 2
    mapping = torch.tensor([9 * BLOCK + 3, 7 * BLOCK, 3 * BLOCK + 1, 11 * BLOCK, -1])
    starts = torch.tensor(
        [0, 2, 3, 4, 4], dtype=torch.int32
    )  # two tokens, one, one that nobody announced, a padding row
    assert find_slots(mapping, starts, slot_of_block, BLOCK).tolist() == [5, 2, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_integers_of_the_table_will_do(dtype):
    table = torch.tensor([[4, 5, 6]], dtype=dtype)
    keep = torch.tensor([[True] * 3, [True, False, True]])
    rows = compact(table, torch.tensor([9], dtype=torch.int32), torch.tensor([1]), keep, BLOCK)
    assert rows.table[0, :2].tolist() == [4, 6]
