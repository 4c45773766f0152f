from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvstrata.core import SpecError
from kvstrata.policy import Rule
from kvstrata.policy.budget import HeadTokens, Share, Tokens
from kvstrata.policy.granularity import Token
from kvstrata.policy.protect import FOUR_SINKS, Protect, Scaled, half
from kvstrata.policy.scorers.recency import Recency


@pytest.mark.parametrize("cap", [1, 8, 1000])
def test_plain_numbers_hold_whatever_the_budget_is(cap):
    assert Protect(sinks=4, recent=9).resolve(cap) == (4, 9)


def test_nothing_is_protected_unless_asked():
    assert Protect().resolve(100) == (0, 0)


@pytest.mark.parametrize(("cap", "sinks"), [(1, 0), (3, 0), (4, 1), (11, 2), (15, 3), (16, 4), (17, 4), (4096, 4)])
def test_four_sinks_are_fewer_under_a_tiny_budget(cap, sinks):
    assert Protect(sinks=FOUR_SINKS).resolve(cap) == (sinks, 0)


@pytest.mark.parametrize(("cap", "recent"), [(1, 0), (2, 1), (7, 3), (63, 31), (64, 32), (65, 32), (999, 32)])
def test_a_window_is_at_most_half_of_the_budget(cap, recent):
    assert Protect(recent=half(32)).resolve(cap) == (0, recent)


@pytest.mark.parametrize(("cap", "recent"), [(1, 0), (7, 3), (1000, 500)])
def test_half_without_a_bound(cap, recent):
    assert Protect(recent=half()).resolve(cap) == (0, recent)


def test_a_share_is_exact_where_floats_are_not():
    assert Protect(recent=Scaled(Fraction(29, 100))).resolve(100) == (0, 29)  # int(100 * 0.29) is 28


@pytest.mark.parametrize("part", ["sinks", "recent"])
def test_negative_numbers_are_refused_by_name(part):
    with pytest.raises(SpecError, match=f"{part}=-1"):
        Protect(**{part: -1})


@pytest.mark.parametrize(
    ("budget", "heads", "fine"),
    [
        (Tokens(10), "shared", True),
        (Tokens(9), "shared", False),
        (HeadTokens((50, 10)), "each", True),
        (HeadTokens((50, 9)), "each", False),
        (Share(Fraction(1, 100)), "shared", True),
    ],
    ids=["just-fits", "one-short", "heads-fit", "one-head-short", "share-known-only-later"],
)
def test_protecting_more_than_a_fixed_budget_is_refused_at_construction(budget, heads, fine):
    parts = {"granularity": Token(heads), "protect": Protect(sinks=4, recent=6)}
    if fine:
        assert Rule(Recency(), budget, **parts).budget == budget
    else:
        with pytest.raises(SpecError, match=r"sinks=4 and recent=6 protect 10 tokens, more than budget=9"):
            Rule(Recency(), budget, **parts)


def rule(sinks, recent):
    return Rule(Recency(), Share(Fraction(1, 2)), protect=Protect(sinks, recent))


def protected(rule, positions, seen, limits):
    """Positions protected in each row and head; -1 marks a slot past the length."""
    position = torch.tensor(positions, dtype=torch.int32)
    mask = rule.protected(position, position >= 0, seen, limits)
    return [
        [p[m].tolist() for p, m in zip(*heads, strict=True)]
        for heads in zip(position, mask.expand(position.shape), strict=True)
    ]


def test_sinks_are_first_positions_and_recent_counts_from_what_was_seen():
    stored = [[[0, 1, 5, 7, 8, 9]]]
    assert protected(rule(1, 2), stored, [10], [(4,)]) == [[[0, 8, 9]]]
    assert protected(rule(0, 0), stored, [10], [(4,)]) == [[[]]]
    assert protected(rule(3, 0), stored, [10], [(4,)]) == [[[0, 1]]]  # position 2 is gone; 5 takes no one's place
    assert protected(rule(0, 4), stored, [10], [(4,)]) == [[[7, 8, 9]]]


def test_each_row_counts_its_own_tokens():
    stored = [[[0, 1, 2, 3, 4]], [[0, 1, 2, -1, -1]]]
    assert protected(rule(1, 1), stored, [5, 3], [(4,), (4,)]) == [[[0, 4]], [[0, 2]]]


def test_slots_past_a_length_are_never_protected():
    position = torch.zeros(1, 1, 3, dtype=torch.int32)
    valid = torch.tensor([[[True, False, False]]])
    assert rule(2, 2).protected(position, valid, [1], [(4,)]).tolist() == [[[True, False, False]]]


def test_a_part_of_the_budget_follows_each_heads_own_limit():
    parts = Rule(Recency(), HeadTokens((4, 8)), Token("each"), protect=Protect(FOUR_SINKS, half()))
    stored = [[list(range(10)), list(range(10))]]
    assert protected(parts, stored, [10], [(4, 8)]) == [[[0, 8, 9], [0, 1, 6, 7, 8, 9]]]


def test_one_limit_serves_all_heads():
    stored = [[[0, 1, 2, 3], [0, 2, 3, -1]]]
    assert protected(rule(1, 1), stored, [4], [(4,)]) == [[[0, 3], [0, 3]]]


@pytest.mark.parametrize(
    ("limits", "overruns"), [([(5,)], 0), ([(4,)], 1), ([(4,), (5,), (1,)], 2), ([(4, 9, 2)], 2)], ids=str
)
def test_overruns_count_rows_and_heads_with_too_little_room(limits, overruns):
    assert rule(2, 3).overruns(limits) == overruns
