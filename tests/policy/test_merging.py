"""What merging rules add to what, by hand and by plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core import Signals, SpecError, Tier
from kvstrata.policy import Rule, parse_policy
from kvstrata.policy.budget import Share, Tokens
from kvstrata.policy.chance import uniform
from kvstrata.policy.merging import MERGES, THRESHOLD, IntoNearest, IntoNext
from kvstrata.policy.presets.row import EACH
from kvstrata.policy.routing import Recoverable
from kvstrata.policy.scorers.attention import AccumulatedMass
from kvstrata.policy.tiering import Coding


def signals(position, *, valid=None, protected=(), keys=None, tau=None, tier=None, layer=0, step=0):
    """`position` [B][1|H][N]; `protected` lists slots."""
    position = torch.tensor(position, dtype=torch.int32)
    valid = torch.ones_like(position, dtype=torch.bool) if valid is None else torch.tensor(valid)
    mask = torch.zeros_like(valid)
    mask[..., list(protected)] = True
    columns = {} if tau is None else {THRESHOLD.name: torch.tensor(tau).expand(position.shape)}
    tier = None if tier is None else torch.tensor(tier, dtype=torch.uint8)
    keys = None if keys is None else torch.tensor(keys)
    return Signals(layer, step, position, valid, mask & valid, columns, (1,), keys=keys, tier=tier)


def listed(merges):
    """{(row, head, source, target): weight}"""
    parts = (merges.row, merges.head, merges.source, merges.target)
    keys = list(zip(*(part.tolist() for part in parts), strict=True))
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, merges.weight.tolist(), strict=True))


def test_a_value_goes_to_the_next_that_stay_in_order_of_position():
    seen = signals([[[7, 3, 0, 5, 9, 4]]], protected=[4])
    z = torch.tensor([[[0.1, 5.0, 5.0, 0.0, 1.0, 5.0]]])  # slots 1 and 5 (positions 3 and 4) are surely merged
    stays = torch.tensor([[[True, False, True, False, True, False]]])
    merges, columns = IntoNext(window=2).merges(z, stays, seen)
    assert listed(merges) == {(0, 0, 1, 0): 0.5, (0, 0, 1, 4): 0.5, (0, 0, 5, 0): 0.5, (0, 0, 5, 4): 0.5}
    assert (columns, merges.keys, merges.mean) == ({}, False, False)
    merges, _ = IntoNext(window=1).merges(z, stays, seen)
    assert listed(merges) == {(0, 0, 1, 0): 1.0, (0, 0, 5, 0): 1.0}


def test_where_fewer_follow_each_gets_more_and_where_none_does_nothing_is_merged():
    z, stays = torch.ones(1, 1, 3), torch.tensor([[[True, False, True]]])
    merges, _ = IntoNext(window=8).merges(z, stays, signals([[[0, 1, 2]]]))
    assert listed(merges) == {(0, 0, 1, 2): 1.0}
    merges, _ = IntoNext(window=8).merges(z, stays.roll(1, -1), signals([[[0, 1, 2]]]))
    assert listed(merges) == {}, "the newest went"


def test_values_are_merged_into_exact_entries_only():
    seen = signals([[[0, 1, 2, 3]]], tier=[[[4, 4, int(Tier.INT8), 4]]])
    merges, _ = IntoNext(window=1).merges(torch.ones(1, 1, 4), torch.tensor([[[True, False, True, True]]]), seen)
    assert listed(merges) == {(0, 0, 1, 3): 1.0}
    keys = [[[[1.0, 0.0], [1.0, 0.1], [1.0, 0.1], [0.0, 1.0]]]]
    seen = signals([[[0, 1, 2, 3]]], tier=[[[4, 4, int(Tier.INT8), 4]]], keys=keys, tau=0.0)
    merges, _ = IntoNearest().merges(torch.ones(1, 1, 4), torch.tensor([[[True, False, True, True]]]), seen)
    assert [key[3] for key in listed(merges)] == [0]


@pytest.mark.parametrize(("against", "share"), [("max", 0.25), ("mean", 0.5)])
def test_the_chance_is_the_score_over_that_of_what_is_protected(against, share):
    """2000 entries of score 1 go; of the protected ones one scores 4 and two score 1."""
    n = 2000
    seen = signals([[list(range(n + 3))]], protected=[0, n + 1, n + 2])
    z = torch.ones(1, 1, n + 3)
    z[..., 0] = 4.0
    merges, _ = IntoNext(1, against).merges(z, seen.protected, seen)
    assert len(merges.source) / n == pytest.approx(share, abs=0.03)
    again, _ = IntoNext(1, against).merges(z, seen.protected, seen)
    assert listed(again) == listed(merges), "the same draw"
    other, _ = IntoNext(1, against, seed=1).merges(z, seen.protected, seen)
    assert listed(other) != listed(merges)


def test_rows_draw_the_same_alone_and_together_and_heads_and_layers_do_not():
    position = [[list(range(40))] * 2] * 2
    z, stays = torch.full((2, 2, 40), 0.5), torch.zeros(2, 2, 40, dtype=torch.bool)
    z[..., -1], stays[..., -1] = 1.0, True
    found = listed(IntoNext(1).merges(z, stays, signals(position))[0])
    by_row = [{key[1:] for key in found if key[0] == row} for row in range(2)]
    assert by_row[0] == by_row[1]
    assert {key[1] for key in by_row[0] if key[0] == 0} != {key[1] for key in by_row[0] if key[0] == 1}
    other = listed(IntoNext(1).merges(z, stays, signals(position, layer=1))[0])
    assert other != found
    assert listed(IntoNext(1).merges(z, stays, signals(position, step=1))[0]) != found


def test_scores_that_are_no_numbers_are_never_merged():
    z = torch.tensor([[[math.nan, 0.0, math.nan, 0.0]]])
    merges, _ = IntoNext(4).merges(z, torch.tensor([[[False, False, False, True]]]), signals([[[0, 1, 2, 3]]]))
    assert listed(merges) == {}


def test_draws_are_even():
    draws = uniform(torch.arange(20_000), 3, 5, 7, torch.tensor(1))
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, 10, 0.0, 1.0)
    assert (counts - 2000).abs().max() < 200


def test_a_threshold_begins_as_a_mean_and_then_follows_the_largest_cosine():
    turned = [[math.cos(a), math.sin(a)] for a in (0.0, 0.1, 0.5, 2.0)]
    seen = signals([[[0, 1, 2, 3]]], keys=[[turned]], tau=0.0)
    stays = torch.tensor([[[True, False, False, True]]])
    merges, columns = IntoNearest().merges(torch.ones(1, 1, 4), stays, seen)
    near, far = math.cos(0.1), math.cos(0.5)
    assert columns[THRESHOLD.name].unique().tolist() == pytest.approx([2 + (near + far) / 2])
    total = math.e + math.exp(near)
    assert list(listed(merges)) == [(0, 0, 1, 0)], "the other is less alike than the mean"
    assert merges.weight.tolist() == pytest.approx([math.exp(near) / total])
    assert (merges.keys, merges.mean) == (True, True)
    later = signals([[[0, 1, 2, 3]]], keys=[[turned]], tau=2.3)
    merges, columns = IntoNearest(beta=0.25).merges(torch.ones(1, 1, 4), stays, later)
    assert columns[THRESHOLD.name].unique().tolist() == pytest.approx([2 + 0.25 * near + 0.75 * 0.3])
    total = math.e + math.exp(near) + math.exp(far)
    weights = {key[2]: weight for key, weight in listed(merges).items()}
    assert weights == pytest.approx({1: math.exp(near) / total, 2: math.exp(far) / total})


def test_a_row_of_which_nothing_goes_keeps_its_threshold():
    keys = torch.randn(2, 1, 3, 4).tolist()
    seen = signals([[[0, 1, 2]]] * 2, keys=keys, tau=2.5)
    stays = torch.tensor([[[True, True, True]], [[True, False, True]]])
    merges, columns = IntoNearest().merges(torch.ones(2, 1, 3), stays, seen)
    assert columns[THRESHOLD.name][0].tolist() == [[2.5] * 3]
    assert (columns[THRESHOLD.name][1] != 2.5).all()
    assert set(merges.row.tolist()) <= {1}


def test_heads_that_share_their_tokens_take_the_mean_of_their_cosines():
    keys = [[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0], [1.0, 0.2]]]]
    seen = signals([[[0, 1, 2]]], keys=keys, tau=0.0)
    merges, columns = IntoNearest().merges(torch.ones(1, 1, 3), torch.tensor([[[True, False, True]]]), seen)
    alike = [(1.0 + 0.0) / 2, (0.0 + 1 / math.hypot(1, 0.2)) / 2]
    assert columns[THRESHOLD.name][0, 0, 0].item() == pytest.approx(2 + max(alike))
    assert list(listed(merges)) == [(0, 0, 1, 0)]


@given(st.integers(0, 999), st.integers(1, 3), st.integers(2, 12))
def test_nearest_by_plain_loops(seed, heads, n):
    draw = torch.Generator().manual_seed(seed)
    position = torch.stack([torch.randperm(50, generator=draw)[:n] for _ in range(2 * heads)]).view(2, heads, n)
    valid = torch.rand(2, heads, n, generator=draw) < 0.9
    stays = valid & (torch.rand(2, heads, n, generator=draw) < 0.6)
    keys = torch.randn(2, heads, n, 3, generator=draw)
    seen = signals(position.tolist(), valid=valid.tolist(), keys=keys.tolist(), tau=2.0 + 0.2)
    merges, columns = IntoNearest(0.5).merges(torch.ones(2, heads, n), stays, seen)
    found = listed(merges)
    unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    for b in range(2):
        for h in range(heads):
            gone = [i for i in range(n) if valid[b, h, i] and not stays[b, h, i]]
            kept = [i for i in range(n) if stays[b, h, i]]
            mine = {key[2:]: weight for key, weight in found.items() if key[:2] == (b, h)}
            if not gone or not kept:
                assert not mine
                continue
            best = {i: max((float(unit[b, h, i] @ unit[b, h, j]), j) for j in kept) for i in gone}
            tau = 0.5 * max(c for c, _ in best.values()) + 0.5 * 0.2
            into = {i: j for i, (c, j) in best.items() if c >= tau}
            assert mine.keys() == set(into.items())
            assert columns[THRESHOLD.name][b, h].tolist() == pytest.approx([2 + tau] * n, abs=1e-5)
            for (i, j), weight in mine.items():
                total = math.e + sum(math.exp(best[e][0]) for e, to in into.items() if to == j)
                assert weight == pytest.approx(math.exp(best[i][0]) / total, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntoNext(0), "window=0"),
        (lambda: IntoNearest(1.5), r"beta=1\.5"),
        (
            lambda: Rule(
                AccumulatedMass(), Tokens(9), EACH, Recoverable(Coding("int2", 8, ledger=True)), merge=IntoNext()
            ),
            "as their codes gave them",
        ),
    ],
    ids=["window", "beta", "ledger"],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def test_merging_is_an_axis_of_any_rule_of_a_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "layers:\n  0: {prefill: {scorer: tova-like, budget: 8}}\n".replace("tova-like", "keynorm")
        + "  1-: {prefill: {scorer: {window-mass: {rows: 4}}, budget: 25%, heads: each, merge: {cam: {window: 4}}},\n"
        "       decode: {scorer: accumulated-mass, budget: 25%, merge: d2o}}\n"
    )
    policy = parse_policy(path)
    assert policy.rule(0, "prefill").merge is None
    assert policy.rule(3, "prefill").merge == IntoNext(4)
    assert policy.rule(3, "decode").merge == IntoNearest()
    assert {"mass", "threshold"} == {column.name for column in policy.columns(1)}
    assert policy.needs == {"keys", "mass"}
    assert policy.with_budget(Share(1 / 2)).rule(2, "decode").merge == IntoNearest()
    path.write_text("layers: {0-: {prefill: {scorer: keynorm, budget: 8, merge: cma}}}")
    with pytest.raises(SpecError, match=r"no merge named 'cma'\. Did you mean 'cam'"):
        parse_policy(path)
    assert set(MERGES) == {"cam", "d2o"}
