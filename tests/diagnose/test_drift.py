"""Formulas of drift on traces made by hand."""

import math
from dataclasses import replace

import pytest
import torch

from kvstrata.core import Tier
from kvstrata.diagnose.drift import Band, Episodes, chosen_exact, chosen_oracle, churn, future_missed_mass, reactivation
from kvstrata.diagnose.measure import resampled
from kvstrata.diagnose.traces import Trace

EXACT, CODED, DROP = int(Tier.EXACT), int(Tier.INT2), int(Tier.DROP)


def made(mass, tier, prompt, every=1):
    tier = torch.tensor(tier, dtype=torch.uint8)
    mass, kept = torch.tensor(mass)[:, None], (tier > 0)[:, None]  # one head
    return Trace(torch.zeros(mass.shape[2]), mass, tier, kept, torch.arange(len(tier)) * every, prompt)


def test_nothing_is_missed_where_nothing_is_dropped():
    trace = made(torch.rand(4, 6).tolist(), [[EXACT, CODED] * 3] * 3, prompt=2)
    assert future_missed_mass(trace, horizon=2, sinks=0) == 0


def test_missed_mass_of_a_matrix_worked_by_hand():
    """Prompt of 3 tokens, 2 steps. At event 0 tokens 0, 1, 2 are there and 1 is dropped; steps 0 and 1 come."""
    mass = [[0.5, 0.2, 0.2, 0.1, 0.0], [0.4, 0.3, 0.1, 0.1, 0.1]]
    tier = [[EXACT, DROP, CODED, DROP, DROP]]
    assert future_missed_mass(made(mass, tier, prompt=3), horizon=2, sinks=0) == pytest.approx(0.5 / 1.7)
    assert future_missed_mass(made(mass, tier, prompt=3), horizon=2, sinks=1) == pytest.approx(0.5 / 0.8)
    assert math.isnan(future_missed_mass(made(mass, tier, prompt=3), horizon=3, sinks=0)), "too few steps follow"


def test_a_token_that_is_not_there_yet_is_not_missed():
    """The first token of the steps has position 3 and is there from step 1 on."""
    mass = [[0.0, 0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.5, 0.5, 0.0]]
    trace = made(mass, [[EXACT, EXACT, EXACT, DROP, DROP]], prompt=3)
    assert future_missed_mass(trace, horizon=2, sinks=0) == 0


def test_a_head_misses_what_its_own_queries_ask_for():
    """Head 0 asks for token 0 and keeps only that, head 1 for token 1; then each keeps the other's."""
    mass = torch.eye(2)[None]
    each = Trace(torch.zeros(2), mass, torch.full((1, 2), EXACT), torch.eye(2).bool()[None], torch.zeros(1).long(), 2)
    assert future_missed_mass(each, horizon=1, sinks=0) == 0
    other = replace(each, kept=~each.kept)
    assert future_missed_mass(other, horizon=1, sinks=0) == 1


def test_the_interval_of_a_ratio_of_sums_holds_the_ratio():
    """One long document where nothing comes back, and seven short ones where half does."""
    documents = [Episodes(1000, 0), *[Episodes(2, 1)] * 7]
    low, high = resampled(documents, lambda drawn: sum(e.rescued for e in drawn) / sum(e.eligible for e in drawn))
    assert low <= 7 / 1014 <= high
    assert high > 0.4, "where the long one is not drawn"


BAND = Band(sinks=0, local=0, window=2)


def test_churn_of_sets_that_stay_and_of_sets_that_change_wholly():
    stay = [[EXACT] * 2 + [DROP] * 2] * 3
    assert churn(made([[0.0] * 4] * 3, stay, prompt=4, every=0), BAND) == 0
    swap = [[EXACT] * 2 + [DROP] * 2, [DROP] * 2 + [EXACT] * 2]
    assert churn(made([[0.0] * 4] * 2, swap, prompt=4, every=0), BAND) == 1
    assert churn(made([[0.0] * 4] * 2, [[DROP] * 4] * 2, prompt=4, every=0), BAND) == 0, "both empty"


def test_churn_of_the_exact_tier_sees_what_was_only_coded():
    moves = [[EXACT] * 2 + [CODED] * 2, [CODED] * 2 + [EXACT] * 2]
    trace = made([[0.0] * 4] * 2, moves, prompt=4, every=0)
    assert churn(trace, BAND) == 0
    assert churn(trace, BAND, exact=True) == 1


def test_the_newest_windows_compete_only_where_asked():
    trace = made([[0.0] * 6] * 2, [[EXACT] * 6, [EXACT] * 4 + [DROP] * 2], prompt=6, every=0)
    assert churn(trace, Band(0, 2, 2)) == 0
    assert churn(trace, Band(0, 2, 2), tail=True) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("line", "least", "horizon", "expected"),
    [
        ("100001", 4, None, (1, 1)),
        ("100001", 4, 8, (0, 0)),  # too few events follow to tell
        ("1000000000000", 4, 8, (1, 0)),
        ("1000010000000", 4, 8, (1, 1)),  # too few events follow the second run
        ("1000010000000", 4, 3, (2, 1)),  # which is not rescued
        ("1000000000001", 4, 8, (1, 1)),
        ("10000000000001", 4, 8, (1, 0)),  # a step too late
        ("1001001", 4, None, (0, 0)),
        ("-000-", 1, None, (1, 0)),
        ("1111", 1, 1, (0, 0)),
    ],
)
def test_reactivation_of_lines_worked_by_hand(line, least, horizon, expected):
    states = torch.tensor([{"1": 1, "0": 0, "-": -1}[c] for c in line], dtype=torch.int8)
    assert tuple(reactivation(states[:, None], least, horizon)) == expected


def test_the_oracle_takes_as_many_windows_as_the_policy_keeps_exact():
    mass = [[0.0, 0.0, 0.3, 0.3, 0.1, 0.1, 0.0, 0.0, 0.0], [0.9, 0.9, *[0.0] * 7]]
    tier = [[EXACT] * 2 + [CODED] * 2 + [DROP] * 5] * 3
    trace = made(mass, tier, prompt=6)
    assert chosen_exact(trace, BAND).tolist() == [[1, 0, 0, -1], [1, 0, 0, -1], [1, 0, 0, 0]]
    assert chosen_oracle(trace, BAND)[1:].tolist() == [[0, 1, 0, -1], [1, 0, 0, 0]]
    trace.before[4] = 9.0  # what the prompt itself attended to counts
    assert chosen_oracle(trace, BAND).tolist() == [[0, 0, 1, -1], [0, 0, 1, -1], [0, 0, 1, 0]]
