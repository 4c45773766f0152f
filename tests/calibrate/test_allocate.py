"""Budgets over layers: sums, bounds and order, for any signal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.calibrate.allocate import allocate, inverse, round_to_sum
from kvstrata.core import SpecError

signals = st.lists(st.floats(-1, 10), min_size=1, max_size=40)


@given(signal=signals, least=st.integers(1, 50), more=st.integers(0, 3000), room=st.none() | st.integers(0, 500))
def test_sums_are_exact_and_bounds_hold(signal, least, more, room):
    total = len(signal) * least + more
    most = None if room is None else least + -(-more // len(signal)) + room
    found = allocate(signal, total, least, most)
    assert sum(found) == total
    assert min(found) >= least
    assert most is None or max(found) <= most


@given(signal=signals, more=st.integers(0, 3000))
def test_more_signal_is_never_less_budget(signal, more):
    found = allocate(signal, len(signal) * 16 + more, 16)
    for s, b in zip(signal, found, strict=True):
        for t, c in zip(signal, found, strict=True):
            assert b <= c + 1 if max(0, s) <= max(0, t) else True


@given(signal=st.lists(st.integers(0, 1000), min_size=2, max_size=12, unique=True), more=st.integers(0, 999))
def test_the_order_of_layers_does_not_matter_but_for_ties(signal, more):
    total = len(signal) * 4 + more
    found, turned = allocate(signal, total, 4), allocate(signal[::-1], total, 4)[::-1]
    assert all(abs(a - b) <= 1 for a, b in zip(found, turned, strict=True))


@given(layers=st.integers(1, 40), more=st.integers(0, 500), value=st.floats(0, 5))
def test_equal_signals_share_evenly(layers, more, value):
    found = allocate([value] * layers, layers * 8 + more, 8)
    assert max(found) - min(found) <= 1


def test_nothing_to_spare_gives_everybody_the_least():
    assert allocate([5, 1, 0], 48, 16) == [16, 16, 16]


def test_proportions_by_hand():
    assert allocate([3, 1, 0], 12 + 40, 4) == [34, 14, 4]
    assert allocate([3, 1, 0], 12 + 40, 4, most=24) == [24, 24, 4]


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="cannot give 3 layers 16 each"):
        allocate([1, 2, 3], 47, 16)
    with pytest.raises(SpecError, match="does not fit"):
        allocate([1, 2, 3], 100, 16, most=20)
    with pytest.raises(SpecError, match="no layers"):
        allocate([], 10, 1)


@given(ideal=st.lists(st.floats(0, 50), min_size=1, max_size=20))
def test_rounding_moves_nothing_by_one_or_more(ideal):
    total = round(sum(ideal))
    found = round_to_sum(ideal, total)
    if abs(sum(ideal) - total) < 1e-9:
        assert all(abs(a - b) < 1 for a, b in zip(found, ideal, strict=True))


@given(signal=st.lists(st.floats(0, 10), min_size=1, max_size=20))
def test_the_inverse_is_the_same_budgets_turned_round(signal):
    budgets = allocate(signal, len(signal) * 40, 16)
    turned = inverse(budgets, signal)
    assert sorted(turned) == sorted(budgets)
    assert turned[max(range(len(signal)), key=lambda i: (signal[i], i))] == min(budgets)
