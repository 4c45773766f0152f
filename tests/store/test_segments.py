from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core import Column, Plan, Tier
from kvstrata.store import Account, LayerStore
from kvstrata.store.segments import PAGE, STEADY, Segments

lengths = st.lists(st.integers(0, 300), min_size=1, max_size=6)
laws = settings(max_examples=50)
layouts = pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])


@laws
@given(lengths=lengths, slack=st.sampled_from([STEADY, PAGE]))
def test_segments_lie_side_by_side_with_the_slack_asked_for(lengths, slack):
    segments = Segments.fit(lengths, slack)
    ends = [start + cap for start, cap in zip(segments.starts, segments.capacities, strict=True)]
    assert segments.starts == [0, *ends[:-1]]
    assert segments.slots == ends[-1]
    assert [cap - n for cap, n in zip(segments.capacities, lengths, strict=True)] == [slack] * len(lengths)
    assert segments.entries == sum(lengths)
    assert segments.longest == max(lengths)
    assert segments.starts_on(torch.device("cpu")).tolist() == segments.starts


@laws
@given(lengths=lengths)
def test_uniform_means_one_length_and_one_capacity(lengths):
    assert Segments.fit(lengths).uniform == (len(set(lengths)) == 1)


def test_equal_lengths_in_unequal_room_are_not_uniform():
    segments = Segments.fit([5, 3])
    assert not Segments([3, 3], segments.capacities, segments.starts).uniform


def test_no_segments_take_no_slots():
    assert Segments([]).slots == 0
    assert Segments.fit([]).slots == 0


@pytest.mark.parametrize(
    ("new", "fits"),
    [([74, 84], True), ([10, 20], True), ([9, 20], False), ([10, 19], False), ([75, 20], False)],
    ids=["full", "a-page-free", "more-free-in-first", "more-free-in-second", "too-long"],
)
def test_fits_allows_at_most_a_page_free(new, fits):
    assert Segments.fit([10, 20]).fits(new) == fits


@pytest.mark.parametrize(
    ("new", "room"), [([74, 84], True), ([10, 20], True), ([75, 20], False), ([10, 85], False)], ids=str
)
def test_has_room_up_to_the_capacity_of_each(new, room):
    assert Segments.fit([10, 20]).has_room(new) == room


def store_with(tokens, per_head, heads=2, dim=4):
    store = LayerStore(0, [Column("mass", torch.float32)], per_head, Account())
    k = torch.randn(len(tokens), heads, max(tokens), dim)
    store.append(k, k, tokens, [0] * len(tokens), 0)
    return store


def append_one(store, position):
    k = torch.randn(store.batch_size, store.num_kv_heads, 1, 4)
    store.append(k, k, [1] * store.batch_size, [position] * store.batch_size, position)


def drop(store, *slots):
    tier = torch.full(store.valid().shape, int(Tier.EXACT))
    tier[:, :, list(slots)] = int(Tier.DROP)
    return store.apply(Plan(tier))


def pointers(store):
    """Addresses of every buffer of the store."""
    return [t.untyped_storage().data_ptr() for t in (store._k, store._v, *store._columns.values())]


@layouts
@pytest.mark.parametrize("tokens", [[1, 1], [1, 40]], ids=["even", "ragged"])
def test_a_thousand_tokens_copy_whole_buffers_once_a_page(per_head, tokens):
    store = store_with(tokens, per_head)
    moves, at = 0, pointers(store)
    for position in range(1000):
        append_one(store, position)
        moves, at = moves + (pointers(store)[0] != at[0]), pointers(store)
    assert 1 <= moves <= -(-1000 // PAGE)


@layouts
@pytest.mark.parametrize("tokens", [[100, 100], [100, 70]], ids=["even", "ragged"])
def test_a_plan_that_drops_nothing_moves_nothing(per_head, tokens):
    store = store_with(tokens, per_head)
    at, peak = pointers(store), store._account.peak
    assert drop(store) == 0
    assert pointers(store) == at
    assert store._account.peak == peak


@layouts
def test_a_plan_that_leaves_at_most_a_page_free_works_in_place(per_head):
    store = store_with([100, 100], per_head)
    fill = store.segments.capacities[0] - 100
    for position in range(100, 100 + fill):
        append_one(store, position)
    at = pointers(store)
    drop(store, *range(PAGE))
    assert pointers(store) == at
    drop(store, 0)
    assert pointers(store) != at


@layouts
def test_evicting_one_for_every_new_token_never_moves_the_buffers(per_head):
    store = store_with([200, 200], per_head)
    drop(store, *range(100))
    at = pointers(store)
    for position in range(200, 400):
        append_one(store, position)
        drop(store, position % 100)
    assert pointers(store) == at
    assert store.lengths() == [[100] * store.segment_heads] * 2


@layouts
def test_a_plan_lays_out_anew_with_little_slack(per_head):
    store = store_with([500, 500], per_head)
    drop(store, *range(400))
    assert [cap - n for cap, n in zip(store.segments.capacities, store.segments.lengths, strict=True)] == [
        STEADY
    ] * len(store.segments.lengths)
