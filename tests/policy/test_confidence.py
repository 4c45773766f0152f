from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.policy.confidence import confidence


def by_hand(logits):
    p = [math.exp(x) for x in logits]
    p = sorted((x / sum(p) for x in p), reverse=True)
    entropy = -sum(x * math.log(x) for x in p if x > 0) / math.log(len(p))
    margin = math.log(p[0]) - math.log(p[1])
    return 0.4 * (1 - entropy) + 0.3 / (1 + math.exp(-margin)) + 0.3 * p[0]


@given(logits=st.lists(st.floats(-20, 20), min_size=2, max_size=30))
def test_is_the_formula_of_the_paper(logits):
    assert float(confidence(torch.tensor(logits))) == pytest.approx(by_hand(logits), abs=1e-4)


@given(logits=st.lists(st.floats(-50, 50), min_size=2, max_size=30), shift=st.floats(-30, 30))
def test_lies_between_doubt_and_certainty_and_does_not_move_with_a_shift(logits, shift):
    c = float(confidence(torch.tensor(logits)))
    assert 0.15 <= c <= 1
    assert float(confidence(torch.tensor(logits) + shift)) == pytest.approx(c, abs=1e-3)


def test_the_two_ends():
    assert float(confidence(torch.zeros(1 << 16))) == pytest.approx(0.15, abs=1e-4)
    assert float(confidence(torch.tensor([100.0, 0.0, 0.0]))) == pytest.approx(1.0)


def test_masked_tokens_do_not_count():
    masked = torch.tensor([1.0, 2.0, -math.inf, 0.5, -math.inf])
    assert float(confidence(masked)) == pytest.approx(float(confidence(torch.tensor([1.0, 2.0, 0.5]))))
    assert float(confidence(torch.tensor([3.0, -math.inf]))) == 1.0
    assert float(confidence(torch.tensor([3.0]))) == 1.0


def test_rows_do_not_mix_and_nan_stays_in_its_row():
    rows = torch.randn(3, 2, 11)
    rows[1, 0, 4] = math.nan
    c = confidence(rows)
    assert c.shape == (3, 2)
    assert c.isnan().nonzero().tolist() == [[1, 0]]
    assert float(c[2, 1]) == pytest.approx(by_hand(rows[2, 1].tolist()), abs=1e-4)


def test_half_precision_is_read_in_fp32():
    logits = (torch.randn(1000) * 5).to(torch.bfloat16)
    assert float(confidence(logits)) == float(confidence(logits.float()))
