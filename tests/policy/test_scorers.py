from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.attention import ALL_ROWS
from kvstrata.policy.scorers import SCORERS
from kvstrata.policy.scorers.attention import AccumulatedMass, WindowMass
from kvstrata.policy.scorers.keys import KeyDiff, KeyNorm
from kvstrata.policy.scorers.recency import Random, Recency


def signals(position, layer=0, step=0, protected=(), **given):
    """`position` [B][1|H][N], -1 past a length; `protected` lists slots."""
    position = torch.tensor(position, dtype=torch.int32)
    valid, position = position >= 0, position.clamp_min(0)
    mask = torch.zeros(position.shape, dtype=torch.bool)
    mask[..., list(protected)] = True
    columns = {name: torch.tensor(value) for name, value in given.pop("columns", {}).items()}
    given = {name: torch.tensor(value) for name, value in given.items()}
    return Signals(layer, step, position, valid, mask & valid, columns, **given)


def close(value, expected):
    return torch.allclose(value, torch.tensor(expected), atol=1e-6)


def test_the_scorers_and_what_each_of_them_reads():
    rows = {"window-mass": 32, "accumulated-mass": ALL_ROWS}
    needs = {"keynorm": {"keys"}, "keydiff": {"keys"}, "window-mass": {"mass"}, "accumulated-mass": {"mass"}}
    assert set(SCORERS) == {"recency", "random", *needs}
    for name, scorer in SCORERS.items():
        assert scorer().needs == frozenset(needs.get(name, ()))
        assert scorer().mass_rows == rows.get(name, 0)
        assert scorer().columns == ((Column("mass", torch.float32),) if name == "accumulated-mass" else ())


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_are_values(name):
    make = SCORERS[name]
    assert make() == make()
    assert hash(make()) == hash(make())
    assert not hasattr(make(), "__dict__"), "no room for the state of a run"
    for field in fields(make):
        with pytest.raises(FrozenInstanceError):
            setattr(make(), field.name, 3)


@pytest.mark.parametrize("name", sorted(set(SCORERS) - {"accumulated-mass"}))
def test_scorers_without_state_observe_nothing(name):
    assert SCORERS[name]().observe(signals([[[0, 1]]])) == {}


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


def test_slots_past_a_length_are_no_neighbours():
    mass = [[[9.0, 3.0, 6.0, 0.0, 0.0]], [[3.0, 6.0, 9.0, 0.0, 3.0]]]
    pooled = WindowMass(pool=3).score(signals([[[7, 0, 5, -1, -1]], [[0, 1, 2, 3, 4]]], mass=mass))
    assert close(pooled[0, 0, :3], [5.0, 3.0, 6.0])
    assert close(pooled[1], [[3.0, 6.0, 5.0, 4.0, 1.0]])


@pytest.mark.parametrize("heads", [1, 3], ids=["shared", "own"])
@pytest.mark.parametrize("scorer", [*(make() for make in SCORERS.values()), WindowMass(4, 5)], ids=str)
def test_no_scorer_takes_a_slot_for_a_position(scorer, heads):
    n = 12
    position = torch.arange(0, 3 * n, 3, dtype=torch.int32).expand(2, heads, n)
    mask = torch.zeros_like(position, dtype=torch.bool)
    mass, keys = torch.rand(2, 3, n), torch.randn(2, 3, n, 4)
    recent, columns = position >= 3 * (n - 2), {"mass": torch.rand(2, heads, n)}
    whole = Signals(1, 2, position, ~mask, recent, columns, mass, keys)
    order = torch.randperm(n)
    moved = {name: column[..., order] for name, column in columns.items()}
    parts = position[..., order], ~mask, recent[..., order], moved, mass[..., order], keys[:, :, order]
    shuffled = Signals(1, 2, *parts)
    assert torch.allclose(scorer.score(shuffled), scorer.score(whole)[..., order], atol=1e-6)


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
