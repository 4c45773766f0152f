from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.core import LayerShape, Signals, SpecError, Tier
from kvstrata.policy import Rule
from kvstrata.policy.budget import Tokens
from kvstrata.policy.granularity import Token
from kvstrata.policy.scorers import Stateless
from kvstrata.policy.scorers.attention import WindowMass
from kvstrata.policy.scorers.recency import Recency
from kvstrata.policy.select import select
from kvstrata.policy.trigger import OnOverflow

NAN, INF = math.nan, math.inf
SHAPE = LayerShape(0, 0, 1, 2, 16, 1)
# few values, so that ties are common; infinities have tests of their own
SCORES = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 1.5, 3e38, NAN])
laws = settings(max_examples=80)
pooling = pytest.mark.parametrize("pooled", [False, True], ids=["own", "pooled"])


def grid(draw, shape, values):
    rows, heads, units = shape
    flat = draw(st.lists(values, min_size=rows * heads * units, max_size=rows * heads * units))
    return torch.tensor(flat).view(rows, heads, units)


class Case(NamedTuple):
    u: torch.Tensor  # [B, H, U]
    position: torch.Tensor
    cap: torch.Tensor  # [B, 1|H]
    protected: torch.Tensor
    valid: torch.Tensor

    def units(self, change):
        """The same case with every tensor over units changed."""
        u, position, protected, valid = (change(t) for t in (self.u, self.position, self.protected, self.valid))
        return Case(u, position, self.cap, protected, valid)


@st.composite
def cases(draw):
    """Units in any order of position; protected within valid, as every rule makes it."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 7)))
    u, valid = grid(draw, shape, SCORES), grid(draw, shape, st.sampled_from([True, True, True, False]))
    protected = grid(draw, shape, st.sampled_from([False, False, False, True])) & valid
    orders = st.lists(st.permutations(range(shape[2])), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    position = torch.tensor(draw(orders), dtype=torch.int32).view(shape)
    position = (3 * position).masked_fill(~valid, 0)  # what the store gives past a length
    per_head = shape[1] if draw(st.booleans()) else 1
    cap = draw(st.lists(st.integers(0, 8), min_size=shape[0] * per_head, max_size=shape[0] * per_head))
    return Case(u, position, torch.tensor(cap).view(shape[0], per_head), protected, valid)


def choose(scores, cap, pooled=False):
    """Select among scores [B][H][U], all valid, none protected, in order of position."""
    u = torch.tensor(scores)
    everywhere = torch.ones(u.shape, dtype=torch.bool)
    position = torch.arange(u.shape[-1]).expand(u.shape)
    return select(u, position, torch.tensor(cap), ~everywhere, everywhere, pooled)


def ranked(u, position, units):
    """The units best first: numbers before NaN, then the larger, then the later position."""
    return sorted(units, key=lambda i: (*((0, 0.0) if math.isnan(u[i]) else (1, u[i])), position[i]), reverse=True)


def kept_of(row):
    return {i for i, keep in enumerate(row) if keep}


def segments(*tensors):
    """Lists of one row and head each, side by side."""
    return zip(*(t.flatten(0, 1).tolist() for t in tensors), strict=True)


@laws
@given(case=cases())
def test_keeps_exactly_the_best_beside_the_protected(case):
    keep = select(*case)
    caps = case.cap.expand(case.u.shape[:2]).flatten().tolist()
    each = segments(case.u, case.position, case.protected, case.valid, keep)
    for (scores, position, safe, exists, kept), limit in zip(each, caps, strict=True):
        first = kept_of(safe)
        rest = [i for i in ranked(scores, position, kept_of(exists)) if i not in first]
        assert kept_of(kept) == first | set(rest[: max(0, max(limit, 1) - len(first))])


@laws
@given(case=cases())
def test_counts_are_exact(case):
    kept = select(*case).sum(dim=-1)
    wanted = torch.maximum(case.cap, case.protected.sum(dim=-1)).clamp_min(1)
    assert torch.equal(kept, torch.minimum(case.valid.sum(dim=-1), wanted))


@laws
@given(case=cases())
def test_pooled_counts_are_exact_over_the_heads_and_no_head_ends_empty(case):
    kept = select(*case, pooled=True).sum(dim=-1)
    present = case.valid.sum(dim=-1)
    assert (kept >= present.clamp_max(1)).all()
    floor = torch.maximum(case.protected.sum(dim=-1), present.clamp_max(1)).sum(dim=-1)  # what must stay in each head
    total = case.cap.expand(kept.shape).sum(dim=-1)
    assert torch.equal(kept.sum(dim=-1), torch.minimum(present.sum(dim=-1), torch.maximum(total, floor)))


@pooling
@laws
@given(case=cases())
def test_protected_always_stays_and_invalid_never(pooled, case):
    keep = select(*case, pooled)
    assert keep[case.protected].all()
    assert not keep[~case.valid].any()


@pooling
@laws
@given(case=cases())
def test_nan_never_wins_against_a_number(pooled, case):
    keep = select(*case, pooled)
    for scores, safe, exists, kept in segments(case.u, case.protected, case.valid, keep):
        free = kept_of(exists) - kept_of(safe)
        if any(math.isnan(scores[i]) for i in free & kept_of(kept)):
            assert all(math.isnan(scores[i]) for i in free - kept_of(kept))


@pooling
@laws
@given(case=cases(), more=st.integers(1, 4))
def test_a_larger_cap_drops_nothing_that_was_kept(pooled, case, more):
    small, large = select(*case, pooled), select(*case._replace(cap=case.cap + more), pooled)
    assert not (small & ~large).any()


@pooling
@laws
@given(case=cases(), data=st.data())
def test_rows_do_not_see_each_other(pooled, case, data):
    rows = data.draw(st.lists(st.integers(0, len(case.u) - 1), min_size=1, max_size=4))
    picked = Case(*(t[rows] for t in case))
    assert torch.equal(select(*case, pooled)[rows], select(*picked, pooled))


@laws
@given(case=cases())
def test_heads_do_not_see_each_other_unless_pooled(case):
    whole = select(*case)
    heads = case.u.shape[1]
    for head in range(heads):
        alone = case.units(lambda t, head=head: t[:, [head]])._replace(cap=case.cap.expand(-1, heads)[:, [head]])
        assert torch.equal(whole[:, [head]], select(*alone))


@pooling
@laws
@given(case=cases(), seed=st.integers(0, 9))
def test_no_slot_is_taken_for_a_position(pooled, case, seed):
    """The store may hold entries in any order: what is kept moves with them."""
    order = torch.randperm(case.u.shape[-1], generator=torch.Generator().manual_seed(seed))
    moved = case.units(lambda t: t[..., order])
    assert torch.equal(select(*case, pooled)[..., order], select(*moved, pooled))


@pooling
@laws
@given(case=cases())
def test_the_same_input_gives_the_same_answer_and_stays_as_it_was(pooled, case):
    before = [t.clone() for t in case]
    first, second = (select(*case, pooled) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(case, before, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 5), (0, 2, 0), (1, 0, 0), (1, 2, 0)], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_nothing_stays_of_nothing(shape, pooled):
    none = torch.zeros(shape, dtype=torch.bool)
    cap = torch.ones(shape[:2], dtype=torch.long)
    assert select(torch.zeros(shape), torch.zeros(shape, dtype=torch.long), cap, none, none, pooled).shape == shape


@pytest.mark.parametrize("units", [10, 5000], ids=["few", "many"])
@pytest.mark.parametrize("score", [0.0, NAN, INF, -INF], ids=str)
def test_ties_go_to_the_later_position(units, score):
    keep = choose([[[score] * units] * 2], [[3]])
    assert keep.nonzero()[:, 2].tolist() == [units - 3, units - 2, units - 1] * 2


def test_ties_go_to_the_later_position_wherever_it_stands():
    everywhere = torch.ones(1, 1, 4, dtype=torch.bool)
    position = torch.tensor([[[8, 2, 9, 5]]])
    keep = select(torch.zeros(1, 1, 4), position, torch.tensor([[2]]), ~everywhere, everywhere)
    assert keep[0, 0].tolist() == [True, False, True, False]


def test_pooled_ties_are_shared_by_the_heads():
    assert choose([[[0.0] * 6] * 2], [[2]], pooled=True).sum(dim=-1).tolist() == [[2, 2]]


def test_pooled_places_go_to_the_head_with_the_better_scores():
    keep = choose([[[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 0.0, 0.0]]], [[2]], pooled=True)
    assert [kept_of(row) for row in keep[0].tolist()] == [{0, 1, 2}, {1}]


@pytest.mark.parametrize(
    ("better", "worse"),
    [(INF, 3.4e38), (INF, torch.finfo(torch.float32).max), (0.0, -INF), (-INF, NAN), (-3.4e38, -INF), (-3.4e38, NAN)],
    ids=str,
)
def test_infinities_rank_as_numbers(better, worse):
    assert choose([[[better, worse]]], [[1]]).tolist() == [[[True, False]]]
    assert choose([[[worse, better]]], [[1]]).tolist() == [[[False, True]]]


class Given(Stateless):
    """A scorer that returns what it was made with."""

    def __init__(self, z):
        self.z = torch.as_tensor(z)

    def score(self, signals):
        return self.z


def signals(lengths):
    """`lengths` [B][1|H]; positions are 0 past a length, as the store gives them."""
    lengths = torch.tensor(lengths)[..., None]
    position = torch.arange(int(lengths.max()), dtype=torch.int32).expand(*lengths.shape[:2], -1)
    valid = position < lengths
    return Signals(0, 0, position.masked_fill(~valid, 0), valid, torch.zeros_like(valid), {}, (1,) * len(lengths))


def test_a_plan_averages_heads_that_share_their_tokens():
    rule = Rule(Given([[[4.0, 0.0, 1.0], [0.0, 5.0, 1.0]]]), Tokens(1))
    plan = rule.plan(signals([[3]]), [(1,)], SHAPE)
    assert plan.tier.tolist() == [[[int(Tier.DROP), int(Tier.EXACT), int(Tier.DROP)]]]


def test_a_plan_spreads_one_score_over_heads_that_differ():
    rule = Rule(Given([[[2.0, 0.0, 1.0]]]), Tokens(2), Token("each"))
    plan = rule.plan(signals([[3, 3]]), [(2,)], SHAPE)
    assert (plan.tier == int(Tier.EXACT)).tolist() == [[[True, False, True]] * 2]


def test_a_plan_counts_nan_scores_of_stored_entries_only():
    rule = Rule(Given([[[NAN, 1.0, 2.0, 3.0]], [[NAN, 1.0, NAN, NAN]]]), Tokens(4))
    assert int(rule.plan(signals([[4], [2]]), [(4,), (4,)], SHAPE).nan_scores) == 2


def test_every_row_has_its_own_limit_in_a_plan():
    rule = Rule(Given([[[1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0]]]), Tokens(3))
    plan = rule.plan(signals([[3], [3]]), [(1,), (2,)], SHAPE)
    assert (plan.tier == int(Tier.EXACT)).tolist() == [[[False, False, True]], [[True, True, False]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"])
@pytest.mark.parametrize("low", [NAN, -INF], ids=str)
@pytest.mark.parametrize("heads", ["each", "pooled"])
def test_a_plan_fills_the_budget_whatever_the_dtype_of_the_scores(dtype, low, heads):
    z = torch.full((1, 2, 3), low, dtype=dtype)
    plan = Rule(Given(z), Tokens(2), Token(heads)).plan(signals([[1, 3]]), [(2,)], SHAPE)
    kept = (plan.tier == int(Tier.EXACT)).tolist()
    assert kept == [[[True, False, False], [heads == "pooled", True, True]]]


def kept_with_room(lengths, heads, limits, room=3):
    """Entries kept [B][1|H] when a rule that makes room acts on these lengths."""
    rule = Rule(Recency(), Tokens(9), Token(heads), trigger=OnOverflow(room))
    return (rule.plan(signals(lengths), limits, SHAPE).tier == int(Tier.EXACT)).sum(dim=-1).tolist()


def test_room_is_made_only_where_more_is_stored_than_allowed():
    limits = [(4,)] * 4
    assert kept_with_room([[5], [4], [2], [9]], "shared", limits) == [[3], [4], [2], [3]]
    assert kept_with_room([[5, 4], [2, 9]], "each", limits[:2]) == [[3, 4], [2, 3]]
    assert kept_with_room([[5, 9]], "each", [(4, 8)]) == [[3, 6]]
    assert kept_with_room([[5], [9]], "shared", limits[:2], room=99) == [[3], [3]], "a quarter at most"


def test_pooled_heads_make_room_only_when_they_are_over_together():
    assert kept_with_room([[6, 2]], "pooled", [(4,)]) == [[6, 2]]
    assert [sum(row) for row in kept_with_room([[6, 3], [4, 4]], "pooled", [(4,), (4,)])] == [6, 8]
    assert [sum(row) for row in kept_with_room([[7, 6]], "pooled", [(4, 8)])] == [9]


def test_a_safe_part_of_each_head_stays_whatever_the_others_score():
    position = torch.arange(10, dtype=torch.int32).expand(1, 2, 10)
    z = torch.stack([torch.arange(10.0), 100 + torch.arange(10.0)])[None]
    valid, none = torch.ones(1, 2, 10, dtype=torch.bool), torch.zeros(1, 2, 10, dtype=torch.bool)
    signals = Signals(0, 0, position, valid, none, {}, (1,), z)

    def kept(safe):
        rule = Rule(WindowMass(1), Tokens(5), Token("pooled", safe))
        return (rule.plan(signals, [(5,)], LayerShape(0, 0, 1, 2, 8, 1)).tier[0] > 0).sum(dim=-1).tolist()

    assert kept(Fraction(0)) == [1, 9]  # no head ends empty
    assert kept(Fraction(2, 5)) == [2, 8]
    assert kept(Fraction(1)) == [5, 5]
    with pytest.raises(SpecError, match=r"safe=1\.5"):
        Token("pooled", Fraction(3, 2))
