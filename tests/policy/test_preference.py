"""How layers divide a budget."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core import LayerShape, Signals, SpecError
from kvstrata.policy import Policy, Rule, parse_policy
from kvstrata.policy.budget import Share, Tokens
from kvstrata.policy.preference import SHARE, ByDensity, ByPreference, BySpread, carried, divided
from kvstrata.policy.scorers.spread import MeanVariance

SHAPE = LayerShape(0, 0, 3, 2, 512, 1)


def test_budgets_as_the_published_code_repairs_them():
    assert divided([1.0, 1.0, 2.0], 100, 1000) == [25, 25, 50]
    assert divided([1.0, 1.0, 1.0], 100, 1000) == [34, 33, 33], "what rounding leaves goes to the first"
    assert divided([1.0, 1.0, 8.0], 100, 60) == [20, 20, 60], "what is over goes evenly to the others"
    assert divided([1.0, 3.0, 8.0], 120, 45) == [30, 45, 45], "again where that is over too"
    assert divided([0.0, 0.0, 0.0], 30, 100) == [10, 10, 10]
    assert divided([math.nan, 1.0, 1.0], 30, 100) == [10, 10, 10]
    assert divided([1.0, 2.0], 100, 20) == [20, 20], "no more than there is"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(0, 500), st.integers(1, 200))
def test_budgets_sum_up_and_stay_within_bounds(weights, total, most):
    counts = divided(weights, total, most)
    assert sum(counts) == min(total, most * len(weights))
    assert all(0 <= n <= most for n in counts)


@given(
    st.lists(st.floats(0.001, 1e3), min_size=2, max_size=8),
    st.integers(2, 300),
    st.integers(1, 400),
    st.integers(0, 40),
)
def test_shares_give_back_the_counts_and_never_exceed_the_mean(measures, mean, more, own):
    budget, seen = ByPreference(Tokens(mean), BySpread(), own), mean + more
    shares = [float(torch.tensor(x, dtype=torch.float32) + 1) - 1 for x in budget.shares(measures, mean, seen)]
    caps = [budget.shared(mean, share) for share in shares]
    least = min(own, mean // 2)
    expected = divided(measures, (mean - least) * len(measures), seen - least)
    assert caps == [max(1, least + n) for n in expected]
    assert sum(expected) == (mean - least) * len(measures)


def test_a_prompt_that_fits_gives_every_layer_the_mean():
    budget = ByPreference(Tokens(50), BySpread())
    assert budget.shares([1.0, 9.0], 50, 50) == [1.0, 1.0]
    assert budget.shares([1.0, 9.0], 50, 51) != [1.0, 1.0]
    assert budget.limits(99, 0.0, SHAPE) == (50,)
    assert ByPreference(Share(Fraction(1, 4))).limits(100, 0.0, SHAPE) == (25,)
    assert budget.around(Tokens(7)) == ByPreference(Tokens(7), BySpread())
    assert budget.scaled(Fraction(1, 2)).base == Tokens(25)


def seen(position, valid, **given):
    valid = torch.tensor(valid)
    columns = {name: torch.tensor(value) for name, value in given.pop("columns", {}).items()}
    mass = given.get("mass")
    return Signals(
        0, 0, torch.tensor(position), valid, ~valid, columns, (1,), None if mass is None else torch.tensor(mass)
    )


def test_spread_is_entropy_and_variance_before_the_window():
    moments = [[[[0.0, 0.5, 2.0], [0.0, 0.25, 1.0], [0.0, 9.0, 9.0], [0.0, 7.0, 7.0]]]]
    view = seen([[[0, 3, 5, 0]]], [[[True, True, True, False]]], mass=moments)
    found = BySpread(rows=2, tau1=2.0, tau2=0.5).measure(view)  # positions up to 5 - 2
    assert found.tolist() == pytest.approx([math.sqrt(3.0) * 0.75**2])
    assert BySpread(tau1=math.inf, tau2=math.inf).measure(view).tolist() == [1.0]
    assert BySpread().weights([2.0, 3.0]) == [2.0, 3.0]
    nothing = Signals(0, 0, *torch.zeros(3, 2, 1, 0).unbind(), {}, (0, 0), torch.zeros(2, 1, 0, 4))
    nothing = replace(nothing, valid=nothing.valid.bool(), position=nothing.position.int())
    assert BySpread().measure(nothing).tolist() == [0.0, 0.0]


def test_density_is_the_variance_of_what_keys_received():
    view = seen([[[0, 1, 2, 0]]], [[[True, True, True, False]]], columns={"mass": [[[2.0, 4.0, 2.0, 99.0]]]})
    shares = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    assert ByDensity().measure(view).tolist() == pytest.approx([float(shares.var(unbiased=False))])
    assert ByDensity(2.0).weights([1.0, 3.0]) == pytest.approx([math.exp(-1), math.exp(-3)])
    assert ByDensity(0.0).weights([1.0, 3.0]) == [1.0, 1.0]
    assert ByDensity().weights([0.0, 0.0]) == [1.0, 1.0]


def test_new_entries_get_their_row_s_share():
    column = {SHARE.name: [[[1.5, 0.0, 9.0]], [[0.0, 1.25, 0.0]]]}
    view = seen([[[0, 1, 2]]] * 2, [[[True, True, False]], [[True, True, True]]], columns=column)
    assert carried(view)[SHARE.name].tolist() == [[[1.5] * 3], [[1.25] * 3]]


def test_rules_wait_for_one_another_only_while_they_divide():
    prompt, decode = (parse_policy("cake:budget=40").rule(0, phase) for phase in ("prefill", "decode"))
    assert (prompt.together, prompt.at_step_end, decode.together, decode.at_step_end) == (True, True, False, False)
    assert prompt.columns == decode.columns == (SHARE,)
    assert "end" in parse_policy("cake").needs
    flat = Rule(MeanVariance(), Tokens(9))
    assert Policy.everywhere("flat", flat, flat).needs == {"mass"}


@pytest.mark.parametrize(
    "make", [lambda: BySpread(tau1=0.0), lambda: ByDensity(-1.0), lambda: ByPreference(Tokens(4), own=-1)]
)
def test_numbers_that_cannot_work_are_refused(make):
    with pytest.raises(SpecError, match="give"):
        make()
