from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction

import pytest
import torch

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.mass import ALL_ROWS, Future, Moments, Reduction
from kvstrata.policy.scorers import SCORERS
from kvstrata.policy.scorers.attention import AccumulatedMass, DecayedMass, Persistence, WindowMass
from kvstrata.policy.scorers.combine import Mix, Part
from kvstrata.policy.scorers.keys import KeyDiff, KeyNorm
from kvstrata.policy.scorers.outputs import Critical, Expected, Lag
from kvstrata.policy.scorers.recency import Random, Recency
from kvstrata.policy.scorers.spread import Defensive, MeanVariance


def signals(position, layer=0, step=0, protected=(), **given):
    """`position` [B][1|H][N], -1 past a length; `protected` lists slots."""
    position = torch.tensor(position, dtype=torch.int32)
    valid, position = position >= 0, position.clamp_min(0)
    mask = torch.zeros(position.shape, dtype=torch.bool)
    mask[..., list(protected)] = True
    columns = {name: torch.tensor(value) for name, value in given.pop("columns", {}).items()}
    queries = tuple(given.pop("queries", [1] * len(position)))
    given = {name: torch.tensor(value) for name, value in given.items()}
    return Signals(layer, step, position, valid, mask & valid, columns, queries, **given)


def close(value, expected):
    return torch.allclose(value, torch.tensor(expected), atol=1e-6)


def make(name):
    """A scorer by name; those made of others have no default, so they get CONF-KV's and CriticalKV's."""
    if name == "critical":
        return Critical(WindowMass(32, 5))
    return Mix((Part(0.65, DecayedMass()), Part(0.35, Recency()))) if name == "mix" else SCORERS[name]()


READS = {
    "window-mass": Reduction(32),
    "mean-variance": Moments(32),
    "defensive": Moments(32),
    "accumulated-mass": Reduction(ALL_ROWS),
    "decayed-mass": Reduction(88, decay=0.9),
    "persistence": Reduction(400, counts=True),
    "mix": Reduction(88, decay=0.9),
    "critical": Reduction(32),
    "expected": Future(512, 4),
}
COLUMNS = {"accumulated-mass": "mass", "decayed-mass": "ema", "persistence": "count", "mix": "ema", "echo": "asked"}
COLUMNS |= {"surrogate": "worth", "repetition": "repeated"}


def test_the_scorers_and_what_each_of_them_reads():
    needs = {
        "critical": {"added", "caps"},
        "defensive": {"added", "caps"},
        "expected": {"rotary", "values"},
        "keynorm": {"keys"},
        "lag": {"keys", "values"},
        "keydiff": {"keys"},
        "echo": {"turn", "outputs"},
        "surrogate": {"hidden"},
        "repetition": {"repetition"},
    }
    assert set(SCORERS) == {"recency", "random", *needs, *READS}
    for name in SCORERS:
        scorer = make(name)
        assert scorer.needs == frozenset(needs.get(name, ()))
        assert scorer.mass == READS.get(name)
        assert scorer.columns == ((Column(COLUMNS[name], torch.float32),) if name in COLUMNS else ())


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_are_values(name):
    assert make(name) == make(name)
    assert hash(make(name)) == hash(make(name))
    assert not hasattr(make(name), "__dict__"), "no room for the state of a run"
    for field in fields(make(name)):
        with pytest.raises(FrozenInstanceError):
            setattr(make(name), field.name, 3)


@pytest.mark.parametrize("name", sorted(set(SCORERS) - set(COLUMNS)))
def test_scorers_without_state_observe_nothing(name):
    assert make(name).observe(signals([[[0, 1]]])) == {}


def test_recency_is_the_position_and_not_the_slot():
    score = Recency().score(signals([[[3, 8, 40]], [[0, 1, 2]]]))
    assert score.tolist() == [[[3.0, 8.0, 40.0]], [[0.0, 1.0, 2.0]]]


def test_keynorm_is_minus_the_length():
    keys = [[[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [5.0, 12.0]]]]
    assert close(KeyNorm().score(signals([[[0, 1], [0, 1]]], keys=keys)), [[[-5.0, 0.0], [-1.0, -13.0]]])


def test_keynorm_of_half_precision_keys_is_summed_in_fp32():
    keys = torch.full((1, 1, 1, 4), 300.0, dtype=torch.float16)  # the sum of squares is beyond fp16
    score = KeyNorm().score(replace(signals([[[0]]]), keys=keys))
    assert score.dtype == torch.float32
    assert score.item() == -600.0


def test_keydiff_is_minus_the_cosine_with_the_mean_direction():
    keys = [[[[1.0, 0.0], [10.0, 0.0], [0.0, 2.0]], [[0.0, 1.0], [0.0, 1.0], [0.0, -1.0]]]]
    # directions of head 0 add up to (2, 1): length does not count; those of head 1 to (0, 1)
    near, far = -2 / math.sqrt(5), -1 / math.sqrt(5)
    assert close(KeyDiff().score(signals([[[0, 1, 2]] * 2], keys=keys)), [[[near, near, far], [-1.0, -1.0, 1.0]]])


def test_keydiff_does_not_count_slots_past_a_length():
    keys = [[[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]]]
    padded = [[[*keys[0][0], [0.0, 0.0], [0.0, 0.0]]]]
    alone = KeyDiff().score(signals([[[0, 1, 2]]], keys=keys))
    assert close(KeyDiff().score(signals([[[0, 1, 2, -1, -1]]], keys=padded))[..., :3], alone.tolist())


@pytest.mark.parametrize(
    ("heads", "added"), [(1, [[[2.0, 0.0, 2.0]]]), (2, [[[1.0, 0.0, 3.0], [3.0, 0.0, 1.0]]])], ids=["shared", "own"]
)
def test_accumulated_mass_adds_what_a_forward_gives(heads, added):
    mass, column = [[[1.0, 0.0, 3.0], [3.0, 0.0, 1.0]]], [[[0.5, 0.25, 0.0]] * heads]
    seen = signals([[[0, 1, 2]] * heads], mass=mass, columns={"mass": column})
    observed = AccumulatedMass().observe(seen)
    assert set(observed) == {"mass"}
    assert close(observed["mass"] - torch.tensor(column), added)
    assert close(seen.columns["mass"], column), "what was given stays as it was"
    after = replace(seen, columns=observed)
    assert torch.equal(AccumulatedMass().score(after), observed["mass"])
    assert close(AccumulatedMass().observe(after)["mass"] - observed["mass"], added)


def test_critical_forces_the_first_part_and_weighs_the_rest():
    mass, added = [[[5.0, 4.0, 3.0, 2.0, 0.0, 9.0]]], [[[1.0, 1.0, 1.0, 10.0, 1e6, 1.0]]]
    seen = replace(signals([[[0, 1, 2, 3, 4, 5]]], mass=mass, added=added, protected=[5]), caps=torch.tensor([[4]]))
    found = Critical(WindowMass(4), epsilon=0.01).score(seen)
    assert close(found, [[[math.inf, 4.01, 3.01, 20.1, 1e4, math.inf]]]), "the protected one is of the first two"
    assert close(Critical(WindowMass(4), Fraction(0), 0.01).score(seen)[..., :2], [[[5.01, 4.01]]])


def test_defensive_takes_the_largest_and_what_is_surely_needed_first():
    mean = torch.tensor([[[0.3, 0.06, 0.03, 0.01, 0.6]] * 2])
    largest = torch.tensor([[[0.9, 0.2, 0.4, 0.02, 1.0]] * 2])
    mass = torch.stack([mean, mean, mean, largest], dim=-1)
    added = torch.tensor([[[1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 1.0, 1.0]]])
    seen = replace(signals([[[0, 1, 2, 3, 4]] * 2], protected=[4]), mass=mass, added=added, caps=torch.tensor([[4]]))
    z = Defensive(pool=1).score(seen)[..., :4]  # the window has 0.6 of it, and the first token 0.75 of the rest
    floor = (0.9 + 0.2 + 0.4 + 0.02) / 4
    assert close(z, [[[0.45, floor / 4, 0.2, floor / 2], [0.45, floor * 3 / 4, 0.2, floor / 2]]])
    forced = Defensive(pool=1, sure=1.0).score(seen)[..., :2]  # 0.4 of the rest is still wanting
    assert close(forced, [[[0.45, floor / 4], [0.45, floor * 3 / 4]]]), "the first alone exceeds it"
    many = Defensive(pool=1, sure=1.0).score(replace(seen, mass=mass * torch.tensor([1.0, 1, 1, 1, 0.1]).view(5, 1)))
    assert many.isinf()[..., :4].tolist() == [[[True, True, False, False]] * 2], "to 0.94: 0.75 and 0.15 of the rest"
    tight = Defensive(pool=1, sure=1.0).score(replace(seen, caps=torch.tensor([[1]])))
    assert tight.isfinite().all(), "no room beside the window"


def test_expected_weighs_by_the_value_or_what_comes_of_it():
    seen = signals([[[4, 5]]], mass=[[[0.25, 0.75]]], values=[[[[3.0, 4.0], [1.0, 0.0]]]], added=[[[2.0, 8.0]]])
    assert close(Expected().score(seen), [[[1.25, 0.75]]])
    assert close(Expected(weight="none").score(seen), [[[0.25, 0.75]]])
    assert close(Expected(sinks=5, weight="none").score(seen), [[[math.inf, 0.75]]])
    assert close(Expected(weight="wov", epsilon=0.5).score(replace(seen, values=None)), [[[1.5, 10.0]]])


def lag_by_hand(keys, values, lag, sinks):
    """LagKV's ranks [N] of keys and values [N, D], number by number; None where no part follows."""
    n = len(keys)
    parts = [list(range(start, start + lag)) for start in range(sinks, n - lag + 1, lag)]
    found = [None] * n
    for part, after in itertools.pairwise(parts):
        totals = [0.0] * lag
        for x in (keys, values):
            low, high = x[after].min(dim=0).values, x[after].max(dim=0).values
            spread = torch.stack([((x[i] - low) / (high - low)).std() for i in part]).softmax(dim=0)
            totals = [a + float(b) for a, b in zip(totals, spread, strict=True)]
        for i, total in zip(part, totals, strict=True):
            found[i] = sum(other < total for other in totals) / lag
    return found


def test_lag_ranks_within_its_part_and_keeps_what_has_no_next():
    keys, values = torch.randn(1, 2, 23, 5), torch.randn(1, 2, 23, 5)
    position = torch.arange(23, dtype=torch.int32).expand(1, 2, 23)
    none = torch.zeros_like(position, dtype=torch.bool)
    z = Lag(5, 4).score(Signals(0, 0, position, ~none, none, {}, (23,), keys=keys, values=values))
    for head in range(2):
        found = lag_by_hand(keys[0, head], values[0, head], 5, 4)
        assert found[:4] == [None] * 4
        assert found[14:] == [None] * 9
        for i, rank in enumerate(found):
            assert float(z[0, head, i]) == pytest.approx(rank, abs=1e-6) if rank is not None else z[0, head, i] > 1


def test_a_moving_average_without_bias_does_not_punish_the_young():
    column = [[[0.5, 0.19, 0.1]]]  # of entries that 40, 2 and 1 queries could see, the latter two at full attention
    seen = signals([[[0, 38, 39]]], columns={"ema": column})
    assert close(DecayedMass(0.9).score(seen), column)
    assert close(DecayedMass(0.9, debias=True).score(seen), [[[0.5 / (1 - 0.9**40), 1.0, 1.0]]])


def test_window_mass_without_pooling_is_the_mass():
    mass = [[[1.0, 0.0, 3.0], [3.0, 0.0, 1.0]]]
    seen = signals([[[0, 1, 2]] * 2], mass=mass, protected=[2])
    assert close(WindowMass(rows=4).score(seen), mass)
    shared = signals([[[0, 1, 2]]], mass=mass, protected=[2])
    assert close(WindowMass(rows=4).score(shared), [[[2.0, 0.0, 2.0]]])


def test_window_mass_pools_over_neighbours_and_zeros_at_both_ends():
    mass = [[[3.0, 0.0, 6.0, 9.0, 0.0]]]
    pooled = WindowMass(pool=3).score(signals([[[0, 1, 2, 3, 4]]], mass=mass))
    assert close(pooled, [[[1.0, 3.0, 5.0, 5.0, 3.0]]])
    pooled = WindowMass(pool=5).score(signals([[[0, 1, 2, 3, 4]]], mass=mass))
    assert close(pooled, [[[1.8, 3.6, 3.6, 3.0, 3.0]]])


def test_protected_entries_add_nothing_to_their_neighbours():
    mass = [[[3.0, 0.0, 6.0, 90.0, 60.0]]]
    pooled = WindowMass(pool=3).score(signals([[[0, 1, 2, 3, 4]]], mass=mass, protected=[3, 4]))
    assert close(pooled[..., :3], [[[1.0, 3.0, 2.0]]])


def test_neighbours_are_those_in_position_and_not_in_slot():
    mass = [[[0.0, 9.0, 3.0, 6.0, 0.0]]]
    pooled = WindowMass(pool=3).score(signals([[[40, 30, 0, 20, 10]]], mass=mass))
    assert close(pooled, [[[3.0, 5.0, 1.0, 5.0, 3.0]]])


def test_mean_variance_is_the_mean_and_gamma_variances_pooled():
    moments = [
        [[[0.5, 0.01, 9.0], [0.0, 0.02, 9.0], [0.2, 0.0, 9.0]], [[0.1, 0.0, 9.0], [0.1, 0.0, 9.0], [0.4, 0.0, 9.0]]]
    ]
    own = MeanVariance(pool=1, gamma=10.0).score(signals([[[0, 1, 2]] * 2], mass=moments))
    assert close(own, [[[0.6, 0.2, 0.2], [0.1, 0.1, 0.4]]])
    shared = MeanVariance(pool=1, gamma=10.0).score(signals([[[0, 1, 2]]], mass=moments))
    assert close(shared, [[[0.35, 0.15, 0.3]]])
    pooled = MeanVariance(pool=3, gamma=10.0).score(signals([[[0, 1, 2]] * 2], mass=moments, protected=[2]))
    assert close(pooled[..., :2], [[[0.8 / 3, 0.8 / 3], [0.2 / 3, 0.2 / 3]]])


def test_slots_past_a_length_are_no_neighbours():
    mass = [[[9.0, 3.0, 6.0, 0.0, 0.0]], [[3.0, 6.0, 9.0, 0.0, 3.0]]]
    pooled = WindowMass(pool=3).score(signals([[[7, 0, 5, -1, -1]], [[0, 1, 2, 3, 4]]], mass=mass))
    assert close(pooled[0, 0, :3], [5.0, 3.0, 6.0])
    assert close(pooled[1], [[3.0, 6.0, 5.0, 4.0, 1.0]])


@pytest.mark.parametrize("heads", [1, 3], ids=["shared", "own"])
@pytest.mark.parametrize("scorer", [*map(make, SCORERS), WindowMass(4, 5), WindowMass(4, 5, "max"), Lag(3)], ids=str)
def test_no_scorer_takes_a_slot_for_a_position(scorer, heads):
    n = 12
    position = torch.arange(0, 3 * n, 3, dtype=torch.int32).expand(2, heads, n)
    mask = torch.zeros_like(position, dtype=torch.bool)
    mass, keys = torch.rand(2, 3, n, *((4,) if isinstance(scorer.mass, Moments) else ())), torch.randn(2, 3, n, 4)
    recent, queries = position >= 3 * (n - 2), (1, 1)
    columns = {name: torch.rand(2, heads, n) for name in COLUMNS.values()}
    values, added, caps = torch.randn(2, 3, n, 4), torch.rand(2, 3, n), torch.tensor([[5], [6]])
    whole = Signals(1, 2, position, ~mask, recent, columns, queries, mass, keys, values, added, caps)
    order = torch.stack([torch.randperm(n) for _ in range(heads)])  # each head has its own

    def move(x):
        """x [2, 1|heads|3, n, ...] in that order."""
        each = order.expand(x.shape[1], n).reshape(1, x.shape[1], n, *[1] * (x.dim() - 3))
        return x.gather(2, each.expand(x.shape))

    moved = {name: move(column) for name, column in columns.items()}
    parts = move(position), ~mask, move(recent), moved, queries, move(mass), move(keys)
    shuffled = Signals(1, 2, *parts, move(values), move(added), caps)
    assert torch.allclose(scorer.score(shuffled), move(scorer.score(whole)), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0"),
        ({"rows": -1}, "rows=-1"),
        ({"pool": 0}, "pool=0"),
        ({"pool": 4}, "pool=4 has no middle"),
    ],
    ids=["no-rows", "negative-rows", "no-pool", "even-pool"],
)
def test_windows_that_cannot_work_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        WindowMass(**options)


def test_windows_can_take_the_largest_neighbour():
    mass = [[[3.0, 0.0, 6.0, 9.0, 0.0]]]
    pooled = WindowMass(pool=3, kind="max").score(signals([[[0, 1, 2, 3, 4]]], mass=mass))
    assert close(pooled, [[[3.0, 6.0, 9.0, 9.0, 9.0]]])


def test_decayed_mass_is_the_recurrence_of_its_paper():
    """ema = 0.9 ema + 0.1 A at every step, an entry seen for the first time starting from 0."""
    state, scorer, mine = [0.0, 0.0, 0.0], DecayedMass(), None
    for step in range(6):
        given = [0.5 / (step + 1), 0.3, 0.1 * step]
        state = [0.9 * old + 0.1 * new for old, new in zip(state, given, strict=True)]
        column = mine if mine is not None else [[[0.0] * 3]]
        mine = scorer.observe(signals([[[0, 1, 2]]], mass=[[given]], columns={"ema": column}))["ema"].tolist()
    assert close(torch.tensor(mine), [[state]])


def test_decayed_mass_of_many_queries_at_once_fades_what_came_before():
    seen = signals([[[0]], [[0]]], mass=[[[2.0]], [[0.0]]], columns={"ema": [[[1.0]], [[1.0]]]}, queries=[3, 0])
    assert close(DecayedMass(0.5).observe(seen)["ema"], [[[0.125 + 1.0]], [[1.0]]])  # no query, no fading


def test_persistence_counts_and_fades():
    seen = signals([[[0, 1]]], mass=[[[2.0, 0.0]]], columns={"count": [[[8.0, 8.0]]]}, queries=[2])
    assert close(Persistence(4).observe(seen)["count"], [[[8 * 0.5625 + 2, 8 * 0.5625]]])


def test_a_mix_brings_every_part_to_one_scale_over_what_may_go():
    columns = {"ema": [[[5.0, 1.0, 3.0, 100.0]]]}
    seen = signals([[[0, 1, 2, 3]]], columns=columns, mass=[[[0.0] * 4]], protected=[3])
    mixed = make("mix").score(seen)[0, 0, :3]
    assert close(mixed, [0.65, 0.35 * 0.5, 0.65 * 0.5 + 0.35])


def test_a_mix_of_equal_scores_leaves_the_rest_to_the_others():
    seen = signals([[[4, 9, 6]]], columns={"ema": [[[2.0, 2.0, 2.0]]]}, mass=[[[0.0] * 3]])
    assert close(make("mix").score(seen), [[[0.0, 0.35, 0.35 * 0.4]]])


def test_nan_in_a_mix_stays_with_its_entry():
    seen = signals([[[0, 1, 2]]], columns={"ema": [[[math.nan, 1.0, 2.0]]]}, mass=[[[0.0] * 3]])
    mixed = make("mix").score(seen)[0, 0]
    assert mixed[0].isnan()
    assert close(mixed[1:], [0.35 * 0.5, 1.0])


def test_parts_that_would_sum_attention_differently_are_refused():
    with pytest.raises(SpecError, match="at most one"):
        Mix((Part(0.5, DecayedMass(0.9)), Part(0.5, DecayedMass(0.8))))
    with pytest.raises(SpecError, match="at least one part"):
        Mix(())


def draws(count=1000, seed=0, layer=0, step=0):
    return Random(seed).score(signals([[list(range(count))]], layer, step))[0, 0]


def test_random_gives_a_row_the_same_draws_alone_and_in_a_batch():
    rows = [[[0, 1, 2, 3]], [[2, 5, 7, 9]], [[0, 2, 3, 100]]]
    together = Random(3).score(signals(rows, layer=2, step=7))
    for row, alone in enumerate(rows):
        assert torch.equal(Random(3).score(signals([alone], layer=2, step=7))[0], together[row])
    assert together[0, 0, 2] == together[1, 0, 0] == together[2, 0, 1], "the draw belongs to the position"


@pytest.mark.parametrize("other", [{"seed": 1}, {"layer": 1}, {"step": 1}], ids=["seed", "layer", "step"])
def test_random_differs_by_seed_layer_and_step(other):
    assert torch.equal(draws(), draws())
    same = (draws() == draws(**other)).float().mean()
    assert same < 0.01
    together = torch.stack([draws(), draws(**other)])
    assert torch.corrcoef(together)[0, 1].abs() < 0.15


def test_random_does_not_confuse_layer_with_step():
    assert not torch.equal(draws(layer=1, step=2), draws(layer=2, step=1))
    assert not torch.equal(draws(seed=1, layer=0), draws(seed=0, layer=1))


@pytest.mark.parametrize("where", [{}, {"seed": 5}, {"layer": 31, "step": 4000}], ids=["zeros", "seed", "deep"])
def test_random_is_roughly_uniform(where):
    drawn = draws(20_000, **where)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    shares = torch.histc(drawn, bins=10, min=0, max=1) / 20_000
    assert (shares - 0.1).abs().max() < 0.01
    neighbours = torch.stack([drawn[:-1], drawn[1:]])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.03


def test_random_treats_a_position_alike_over_the_steps():
    """No position may be favoured step after step, or a random policy would keep it for ever."""
    mean = torch.stack([draws(200, step=step) for step in range(400)]).mean(dim=0)
    assert (mean - 0.5).abs().max() < 0.1  # seven standard deviations of a fair draw
