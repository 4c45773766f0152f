"""Tables: paired differences, their intervals, and budgets that hold the same bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.bench.counting import KvShape
from kvstrata.evaluate.compare import comparisons, interval
from kvstrata.evaluate.equal import held, resolve
from kvstrata.evaluate.result import Run, summarise
from kvstrata.evaluate.runs import Outcome
from kvstrata.policy import parse_policy

from ..contract.runs import PRESETS

SHAPE = KvShape(tuple(range(4)), 3, 64, torch.float32)


def cell(policy, budget, nll, task="needle", share=0.25, **run):
    about = {"source": "needle", "version": 1, "scope": "context", "seed": 0, "contexts": len(nll), "length": 100}
    about |= {"model": "m@1", "dtype": "float32", "kernels": "auto", "device": "cpu"}
    found = [Outcome(str(i), {"nll": x, "exact": 0.5}, int(1000 * share), 200, 300, 1000) for i, x in enumerate(nll)]
    return summarise(task, "nll", Run(policy=policy, budget=budget, **{**about, **run}), found, {})


def test_relative_figures_are_paired_with_the_full_cache_on_the_same_example():
    cells = [
        cell("full", None, [1.0, 5.0], share=1.0),
        cell("h2o", "25%", [1.5, 5.5]),
        cell("random", "25%", [3.0, 7.0]),
    ]
    (found,) = comparisons(cells)
    assert [row.label for row in found.rows] == ["full", "h2o @ 25%", "random @ 25%"]
    assert found.rows[0].figures["nll"].mean == 3.0
    h2o = found.rows[1].figures["nll"]
    assert (h2o.mean, h2o.low, h2o.high, h2o.n) == (0.5, 0.5, 0.5, 2)  # 4 nats between examples do not matter
    assert found.rows[1].figures["exact"].mean == 0.5
    assert "not visible" in found.title
    assert found.rows[1].cell.share == 0.25


def test_without_a_full_cache_nothing_is_called_a_difference():
    (found,) = comparisons([cell("h2o", "25%", [1.5, 5.5])])
    assert found.rows[0].figures["nll"].n == 0
    assert found.rows[0].figures["exact"].n == 2


def test_a_figure_that_is_no_number_survives_the_disk():
    found = cell("h2o", "25%", [math.nan, 1.0])
    assert math.isnan(type(found).model_validate_json(found.model_dump_json()).examples[0].values["nll"])


def test_a_peer_is_compared_with_its_own_full_cache():
    cells = [
        cell("full", None, [1.0]),
        cell("kvpress:full", None, [2.0]),
        cell("kvpress:press=KnormPress", "25%", [2.25]),
    ]
    (found,) = comparisons(cells)
    assert [row.is_full for row in found.rows] == [True, True, False]
    assert found.rows[2].figures["nll"].mean == 0.25


OTHER = [
    {"seed": 1},
    {"scope": "prompt"},
    {"model": "n@1"},
    {"length": 200},
    {"dtype": "bfloat16"},
    {"kernels": "exact"},
]


@pytest.mark.parametrize("other", OTHER)
def test_what_is_not_alike_is_not_in_one_table(other):
    assert len(comparisons([cell("full", None, [1.0]), cell("h2o", "25%", [2.0], **other)])) == 2


@settings(max_examples=25)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_an_interval_holds_its_mean_and_stays_within_the_values(values):
    found = interval(values)
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.mean + slack
    assert found.mean - slack <= found.high <= max(values) + slack
    assert found.n == len(values)


def test_an_interval_is_as_wide_as_theory_says():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, generator=generator).tolist()
    found = interval(values)
    assert found.high - found.low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15)


def test_nothing_has_no_interval():
    assert interval([]).n == 0
    assert math.isnan(interval([]).mean)


@pytest.mark.parametrize("share", ["75%", "50%", "25%"])
@pytest.mark.parametrize("name", [*PRESETS, "h2o:codec=int8", "snapkv:codec=int4", "streaming:room=16"])
@pytest.mark.thin(3)
def test_a_share_is_of_the_bytes_held_whatever_holds_them(name, share):
    context, new = 1920, 64
    policy = resolve(name, share, SHAPE, context, new)
    full = held(parse_policy("full"), SHAPE, context, new)
    got = held(policy, SHAPE, context, new) / full
    asked = float(share.removesuffix("%")) / 100
    assert got <= asked + 1e-9
    everything = held(resolve(name, "100%", SHAPE, context, new), SHAPE, context, new) / full
    assert got > min(asked - 0.05, everything - 1e-9)  # codes of all tokens may take less than was asked for


def test_other_budgets_are_taken_as_they_are():
    assert resolve("h2o", "96", SHAPE, 512, 0) == parse_policy("h2o:budget=96")
    assert resolve("full", "25%", SHAPE, 512, 0) == parse_policy("full")
    assert resolve("h2o:budget=64", None, SHAPE, 512, 0) == parse_policy("h2o:budget=64")
