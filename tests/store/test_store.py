from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstrata.core import Column, Plan, Tier
from kvstrata.kernels.pages import PAGE
from kvstrata.store import Account, LayerStore

DIM = 8
MASS = Column("mass", torch.float32)
layouts = pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])


@dataclass(frozen=True)
class Entry:
    position: int
    step: int
    mass: float
    k: list[list[float]]  # [heads of the segment][D]
    v: list[list[float]]


def new_store(per_head, kernels="reference"):
    return LayerStore(0, [MASS], per_head, Account(), kernels=kernels)


def random_kv(rows, heads, queries, dim=DIM, dtype=torch.float32):
    return torch.randn(rows, heads, queries, dim).to(dtype), torch.randn(rows, heads, queries, dim).to(dtype)


def fill(store, tokens, heads=2, first=None, step=0):
    k, v = random_kv(len(tokens), heads, max(tokens))
    store.append(k, v, tokens, first or [0] * len(tokens), step)
    return k, v


def keep_only(store, keep):
    """Apply a plan that keeps where keep(row, head, slot)."""
    rows, heads, n = store.valid().shape
    flat = [[[keep(b, h, i) for i in range(n)] for h in range(heads)] for b in range(rows)]
    tier = torch.where(torch.tensor(flat, dtype=torch.bool), int(Tier.EXACT), int(Tier.DROP))
    return store.apply(Plan(tier.view(rows, heads, n)))


def in_order(store, dense, row, head):
    """Entries of one row and head of a dense [B, 1|H, N, ...] form, by position: slots stand in any order."""
    segment = head if store.per_head else 0
    order = store.column("position")[row, segment, : store.lengths()[row][segment]].argsort()
    return dense[row, head, order]


class Model(RuleBasedStateMachine):
    """A store next to plain lists of entries, one list per row (or per row and head)."""

    per_head = False

    def __init__(self):
        super().__init__()
        self.store = new_store(self.per_head)
        self.clear()

    def clear(self):
        self.heads, self.step = 0, 0
        self.seen: list[int] = []
        self.lists: list[list[list[Entry]]] = []  # [B][1|H] entries

    @property
    def width(self):
        return 1 if self.per_head else self.heads

    @initialize(
        rows=st.integers(1, 3), heads=st.integers(1, 3), kernels=st.sampled_from(["reference", "exact", "native"])
    )
    def open(self, rows, heads, kernels=None):
        if kernels:
            self.store = new_store(self.per_head, kernels)
        self.heads = heads
        self.seen = [0] * rows
        self.lists = [[[] for _ in range(heads // self.width)] for _ in range(rows)]

    @rule(data=st.data(), pads=st.integers(0, 2))
    def append(self, data, pads):
        if not self.lists:
            self.open(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
        count = st.integers(0, 4) | st.sampled_from([PAGE - 1, PAGE, 2 * PAGE + 1])
        same = data.draw(st.booleans())
        tokens = [data.draw(count)] * len(self.seen) if same else [data.draw(count) for _ in self.seen]
        k, v = random_kv(len(tokens), self.heads, max(tokens) + pads)
        self.store.append(k, v, tokens, list(self.seen), self.step)
        for row, new in enumerate(tokens):
            for head, entries in enumerate(self.lists[row]):
                served = slice(head, head + 1) if self.per_head else slice(None)
                for i in range(k.shape[2] - new, k.shape[2]):
                    position = self.seen[row] + i - (k.shape[2] - new)
                    payload = k[row, served, i].tolist(), v[row, served, i].tolist()
                    entries.append(Entry(position, self.step, 0.0, *payload))
            self.seen[row] += new
        self.step += 1

    def positions(self):
        """Position in every slot [B][1|H][entries]; the slots of a segment stand in any order."""
        dense = self.store.column("position").tolist()
        return [
            [slots[: len(entries)] for slots, entries in zip(*heads, strict=True)]
            for heads in zip(dense, self.lists, strict=True)
        ]

    def by_position(self, dense):
        """{position: value} for every segment [B][1|H] of dense [B, 1|H, N]."""
        return [
            [dict(zip(slots, values, strict=False)) for slots, values in zip(*heads, strict=True)]
            for heads in zip(self.positions(), dense.tolist(), strict=True)
        ]

    @precondition(lambda self: not self.store.is_empty)
    @rule(share=st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]), seed=st.integers(0, 99), garbage=st.booleans())
    def apply(self, share, seed, garbage):
        generator = torch.Generator().manual_seed(seed)
        keep = torch.rand(self.store.valid().shape, generator=generator) < share
        tier = torch.where(keep, int(Tier.EXACT), int(Tier.DROP))
        tier[~self.store.valid()] = int(Tier.EXACT if garbage else Tier.DROP)  # no meaning past a length
        before = sum(len(entries) for row in self.lists for entries in row)
        for lists, stays in zip(self.lists, self.by_position(keep), strict=True):
            for head, entries in enumerate(lists):
                lists[head] = [e for e in entries if stays[head][e.position]]
        after = sum(len(entries) for row in self.lists for entries in row)
        assert self.store.apply(Plan(tier.to(torch.uint8))) == before - after

    @precondition(lambda self: not self.store.is_empty)
    @rule(seed=st.integers(0, 99))
    def set_column(self, seed):
        generator = torch.Generator().manual_seed(seed)
        valid = self.store.valid()
        mass = torch.rand(valid.shape, generator=generator)
        self.store.set_column("mass", mass.masked_fill(~valid, math.nan))
        for lists, values in zip(self.lists, self.by_position(mass), strict=True):
            for head, entries in enumerate(lists):
                lists[head] = [replace(e, mass=values[head][e.position]) for e in entries]

    @precondition(lambda self: not self.store.is_empty)
    @rule()
    def sort(self):
        self.store.sort()
        assert self.positions() == [[[e.position for e in entries] for entries in lists] for lists in self.lists]

    @precondition(lambda self: not self.store.is_empty)
    @rule(data=st.data())
    def select_rows(self, data):
        rows = data.draw(st.lists(st.integers(0, len(self.seen) - 1), min_size=1, max_size=4))
        self.store.select_rows(rows)
        self.lists = [[list(entries) for entries in self.lists[row]] for row in rows]
        self.seen = [self.seen[row] for row in rows]

    @rule()
    def reset(self):
        self.store.reset()
        self.clear()

    @invariant()
    def same_lengths(self):
        stored = not self.store.is_empty
        lengths = [[len(entries) for entries in row] for row in self.lists]
        assert self.store.lengths() == (lengths if stored else [])
        assert self.store.longest == (max(n for row in lengths for n in row) if stored else 0)
        if stored:
            expected = torch.zeros(len(lengths), len(lengths[0]), self.store.longest, dtype=torch.bool)
            for row, counts in enumerate(lengths):
                for head, n in enumerate(counts):
                    expected[row, head, :n] = True
            assert torch.equal(self.store.valid(), expected)

    @invariant()
    def same_columns(self):
        if self.store.is_empty:
            return
        invalid = ~self.store.valid()
        for name, dtype in (("position", torch.int32), ("mass", torch.float32)):
            dense = self.store.column(name)
            assert dense.dtype == dtype
            assert not dense[invalid].any(), "zeros past a length"
            for found, lists in zip(self.by_position(dense), self.lists, strict=True):
                for head, entries in enumerate(lists):
                    assert found[head] == {e.position: getattr(e, name) for e in entries}

    @invariant()
    def same_keys(self):
        if self.store.is_empty:
            return
        keys = self.store.dense("k")
        assert keys.shape == (len(self.lists), self.heads, self.store.longest, DIM)
        for row, (heads, positions) in enumerate(zip(keys.tolist(), self.positions(), strict=True)):
            for head, found in enumerate(heads):
                payload = self.payload(row, head, "k")
                zeros = [[0.0] * DIM] * (self.store.longest - len(payload))
                assert found == [payload[position] for position in positions[head // self.width]] + zeros

    def payload(self, row, head, name):
        """{position: key or value} of one row and head."""
        return {e.position: getattr(e, name)[head % self.width] for e in self.lists[row][head // self.width]}

    @invariant()
    def same_blocks(self):
        if self.store.is_empty:
            return
        for split_rows in (False, True):
            covered = torch.zeros(len(self.lists), self.heads, dtype=torch.int)
            for block in self.store.blocks(split_rows=split_rows):
                covered[block.rows, block.heads] += 1
                self.check_block(block, split_rows)
            assert torch.equal(covered, torch.ones_like(covered)), "each row and head once"

    def check_block(self, block, split_rows):
        rows = range(len(self.lists))[block.rows]
        heads = range(self.heads)[block.heads]
        positions = self.positions()
        assert block.k.shape == block.v.shape == (len(rows), len(heads), block.k.shape[2], DIM)
        assert not split_rows or len(rows) == 1
        for i, row in enumerate(rows):
            for j, head in enumerate(heads):
                slots = positions[row][head // self.width]
                for name, view in (("k", block.k), ("v", block.v)):
                    payload = self.payload(row, head, name)
                    assert view[i, j].tolist() == [payload[position] for position in slots]


class PerHeadModel(Model):
    per_head = True


for machine in (Model, PerHeadModel):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=15)
TestSharedAgainstLists = Model.TestCase
TestPerHeadAgainstLists = PerHeadModel.TestCase


def test_memory_is_poisoned_here():
    assert torch.empty(3).isnan().all()
    assert torch.randn(2).new_empty(3).isnan().all()
    store = new_store(per_head=False)
    fill(store, [3])
    assert store.exact.table.arena.blocks[0].k.isnan().any()
    assert not store.dense("k").isnan().any()


@layouts
def test_step_column_holds_the_forward_that_wrote_the_entry(per_head):
    store = LayerStore(0, [Column("step", torch.int32)], per_head, Account())
    for step, (tokens, first) in enumerate([([3, 1], [0, 0]), ([0, 2], [3, 1]), ([1, 1], [3, 3])]):
        k, v = random_kv(2, 2, 3)
        store.append(k, v, tokens, first, step)
    for head in range(store.segment_heads):
        assert in_order(store, store.column("step"), 0, head).tolist() == [0, 0, 0, 2]
        assert in_order(store, store.column("step"), 1, head).tolist() == [0, 1, 1, 2]


@layouts
def test_new_entries_start_with_zero_columns_where_others_were_freed(per_head):
    store = new_store(per_head)
    fill(store, [6, 6])
    store.set_column("mass", torch.full(store.valid().shape, 5.0))
    keep_only(store, lambda b, h, i: i < 2)
    fill(store, [3, 3], first=[6, 6], step=1)
    assert in_order(store, store.column("mass"), 1, 0).tolist() == [5.0, 5.0, 0.0, 0.0, 0.0]


@layouts
def test_position_is_given_even_when_listed_and_never_twice(per_head):
    store = LayerStore(0, [Column("position", torch.int32), MASS], per_head, Account())
    assert [column.name for column in store.columns] == ["position", "mass"]


@layouts
def test_rows_of_one_length_may_be_at_different_positions(per_head):
    store = new_store(per_head)
    fill(store, [3, 5])
    keep_only(store, lambda b, h, i: i < 2)
    fill(store, [2, 2], first=[3, 5], step=1)
    for head in range(store.segment_heads):
        assert store.column("position")[:, head].tolist() == [[0, 1, 3, 4], [0, 1, 5, 6]]


@layouts
def test_keys_are_a_view_where_all_lengths_agree(per_head):
    store = new_store(per_head)
    fill(store, [5, 5])
    assert store.dense("k").untyped_storage().data_ptr() == next(store.blocks()).k.untyped_storage().data_ptr()
    keep_only(store, lambda b, h, i: b == 0 or i < 2)
    assert store.dense("k").untyped_storage().data_ptr() != next(store.blocks()).k.untyped_storage().data_ptr()


@layouts
def test_a_row_may_be_empty(per_head):
    store = new_store(per_head)
    k, _ = fill(store, [3, 0])
    assert store.lengths() == [[3] * store.segment_heads, [0] * store.segment_heads]
    assert torch.equal(store.dense("k")[0], k[0])
    assert not store.dense("k")[1].any()
    keep_only(store, lambda b, h, i: False)
    assert store.longest == 0
    assert store.dense("k").shape == (2, 2, 0, DIM)
    assert store.column("position").shape == (2, store.segment_heads, 0)
    k, _ = fill(store, [0, 2], first=[3, 0], step=1)
    assert torch.equal(store.dense("k")[1], k[1])


@layouts
def test_everything_dropped_from_rows_of_unequal_room(per_head):
    store = new_store(per_head)
    fill(store, [200, 150])
    keep_only(store, lambda b, h, i: i < 3 + 2 * b)  # laid out anew, so capacities differ
    keep_only(store, lambda b, h, i: False)
    assert store.lengths() == [[0] * store.segment_heads] * 2
    assert store.valid().shape == store.column("mass").shape == (2, store.segment_heads, 0)
    assert store.dense("k").shape == (2, 2, 0, DIM)


@layouts
def test_no_rows_selected_leaves_an_empty_store_that_can_be_filled(per_head):
    store = new_store(per_head)
    fill(store, [5, 3])
    store.select_rows([])
    assert store.is_empty
    assert store.longest == 0
    k, _ = fill(store, [2, 2, 2])
    assert torch.equal(store.dense("k"), k)


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"])
def test_payload_keeps_its_dtype_and_bits(per_head, dtype):
    store = new_store(per_head)
    k, v = random_kv(2, 2, 100, dtype=dtype)
    store.append(k, v, [100, 90], [0, 0], 0)
    keep_only(store, lambda b, h, i: i % 3 == 0)
    assert store.dense("k").dtype == dtype
    values = torch.full_like(store.dense("k"), math.nan)
    for block in store.blocks():
        values[block.rows, block.heads, : block.v.shape[2]] = block.v
    for head in range(2):
        assert torch.equal(in_order(store, store.dense("k"), 0, head), k[0, head, ::3])
        assert torch.equal(in_order(store, store.dense("k"), 1, head), k[1, head, 10::3])
        assert torch.equal(in_order(store, values, 1, head), v[1, head, 10::3])


@layouts
def test_appending_does_not_keep_the_callers_tensors(per_head):
    store = new_store(per_head)
    k, _ = fill(store, [4, 4])
    before = k.clone()
    k.fill_(9.0)
    assert torch.equal(store.dense("k"), before)


@layouts
def test_sorting_puts_positions_in_order_after_holes_were_filled(per_head):
    store = new_store(per_head)
    k, _ = fill(store, [8, 6])
    keep_only(store, lambda b, h, i: i not in (1, 2))
    before = store._account.now
    store.sort()
    assert store.column("position")[0, 0].tolist() == [0, 3, 4, 5, 6, 7]
    assert store.column("position")[1, 0].tolist() == [0, 3, 4, 5, 0, 0]
    assert torch.equal(store.dense("k")[0], k[0, :, [0, 3, 4, 5, 6, 7]])
    assert torch.equal(store.dense("k")[1, :, :4], k[1, :, [2 + 0, 2 + 3, 2 + 4, 2 + 5]])  # its two pads came first
    assert store._account.now == before


@layouts
def test_holes_are_filled_in_rows_of_unequal_room(per_head):
    store = new_store(per_head)
    k, _ = fill(store, [90, 150])
    keep_only(store, lambda b, h, i: i < 20 + 10 * b)  # laid out anew, so capacities differ
    pages = [list(pages) for pages in store.exact.table.pages]
    keep_only(store, lambda b, h, i: i not in (1, 4))
    assert store.exact.table.pages == pages, "in place"
    kept = [i for i in range(30) if i not in (1, 4)]
    for head in range(2):
        assert torch.equal(in_order(store, store.dense("k"), 0, head), k[0, head, 60:80][kept[:18]])
        assert torch.equal(in_order(store, store.dense("k"), 1, head), k[1, head, :30][kept])
