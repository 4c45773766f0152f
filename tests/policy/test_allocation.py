from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy import parse_policy
from kvstrata.policy.allocation import ByConfidence, Falling, Pyramid
from kvstrata.policy.budget import ByteBudget, HeadTokens, Share, Tokens


def shape(depth, layers=30):
    return LayerShape(depth, depth, layers, 2, 10, 1)


def over_depth(budget, seen, layers, sure=0.0):
    return [budget.limits(seen, sure, shape(depth, layers))[0] for depth in range(layers)]


def test_confidence_chooses_the_level():
    budget = ByConfidence(Tokens(128), Share(Fraction(1, 2)), tau=0.6)
    assert budget.limits(1000, 0.6, shape(0)) == (128,)
    assert budget.limits(1000, 0.59, shape(0)) == (500,)
    assert budget.counts == (128,)
    assert budget.needs == {"logits"}
    assert ByConfidence(Tokens(1), Tokens(2), signal="processed").needs == {"processed-logits"}


@pytest.mark.parametrize("tau", [0.15, 1.0, 0.0, -1.0, 2.0])
def test_a_threshold_that_is_never_or_always_met_is_refused(tau):
    with pytest.raises(SpecError, match="tau="):
        ByConfidence(Tokens(1), Tokens(2), tau)


@pytest.mark.parametrize(
    "mean", [Tokens(1000), Share(Fraction(1, 4)), ByteBudget(1 << 20), HeadTokens((700, 900))], ids=str
)
def test_two_levels_around_a_mean(mean):
    budget = ByConfidence(Tokens(1), Tokens(2)).around(mean)
    high, low, asked = (b.limits(100_000, 0.0, shape(0)) for b in (budget.high, budget.low, mean))
    for tight, loose, m in zip(high, low, asked, strict=True):
        assert abs(loose - 2 * tight) <= 1
        assert abs(0.42 * tight + 0.58 * loose - m) <= 1.5


def test_levels_that_fall_over_depth_are_those_of_the_paper():
    budget = Falling(ByConfidence(Tokens(128), Tokens(256)))
    assert over_depth(budget, 5000, 30) == [max(96, int(256 * 0.5 ** (layer / 30))) for layer in range(30)]
    assert over_depth(budget, 5000, 30, sure=1.0) == [max(96, int(128 * 0.5 ** (layer / 30))) for layer in range(30)]


@given(mean=st.integers(1, 5000), layers=st.integers(1, 80), beta=st.floats(0.05, 1.0))
def test_layers_share_a_mean(mean, layers, beta):
    caps = over_depth(Falling(Tokens(1), beta).around(Tokens(mean)), 10**6, layers)
    assert caps == sorted(caps, reverse=True)
    assert mean * layers - layers <= sum(caps) <= mean * layers + sum(cap == 1 for cap in caps)


@given(
    mean=st.integers(1, 5000),
    seen=st.integers(1, 20_000),
    layers=st.integers(1, 80),
    beta=st.integers(1, 40),
    own=st.integers(0, 64),
)
def test_a_pyramid_keeps_its_mean_and_never_asks_for_more_than_there_is(mean, seen, layers, beta, own):
    caps = over_depth(Pyramid(Tokens(mean), beta, own), seen, layers)
    assert caps == sorted(caps, reverse=True)
    assert mean * layers - layers <= sum(caps) <= mean * layers + sum(cap == 1 for cap in caps)
    assert max(caps) <= max(seen, mean)


def test_a_pyramid_is_that_of_the_published_code():
    """window 8, beta 20, capacity 512 of 4096 tokens over 32 layers: 42 + 8 at the top, 965 + 8 at the bottom."""
    caps = over_depth(Pyramid(Tokens(512), 20, 8), 4096, 32)
    assert caps[0] == 8 + int(2 * 504 - 504 / 20)
    assert caps[-1] == 8 + int(504 / 20)
    steps = {before - after for before, after in pairwise(caps)}
    assert len(steps) <= 2, "a straight line"


def test_a_short_prompt_flattens_the_pyramid():
    assert over_depth(Pyramid(Tokens(512), 20, 8), 600, 4) == [600, 541, 482, 424]
    assert over_depth(Pyramid(Tokens(512), 20, 8), 512, 4) == [512] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Falling(Tokens(1), beta=0.0), "beta=0"),
        (lambda: Falling(Tokens(1), beta=1.5), "beta=1.5"),
        (lambda: Falling(Tokens(1), at_least=0), "at_least=0"),
        (lambda: Pyramid(Tokens(1), beta=0), "beta=0"),
        (lambda: Pyramid(Tokens(1), own=-1), "own=-1"),
        (lambda: parse_policy("confkv:alpha=1.5"), "alpha=1.5"),
        (lambda: parse_policy("confkv:decay=1"), "decay=1"),
        (lambda: parse_policy("confkv:high=64,low=128,recent=100"), "protect fewer"),
        (lambda: parse_policy("confkv:high=50%,low=25%"), "high=50% is more than low=25%"),
        (lambda: parse_policy("confkv:high=64MiB,low=32MiB"), "is more than low"),
    ],
)
def test_what_can_never_work_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_a_mean_asked_for_in_the_text_is_the_one_asked_for_later():
    assert parse_policy("confkv:budget=25%") == parse_policy("confkv").with_budget(Share(Fraction(1, 4)))
    assert parse_policy("confkv-l:budget=300") == parse_policy("confkv-l").with_budget(Tokens(300))
