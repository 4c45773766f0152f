from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core import Signals, SpecError, Tier
from kvstrata.kernels.pages import PAGE
from kvstrata.policy import parse_policy
from kvstrata.policy.tiering import ByAge, Coding


def signals(position, tier=None):
    position = torch.tensor(position, dtype=torch.int32).view(1, 1, -1)
    valid = torch.ones_like(position, dtype=torch.bool)
    return Signals(0, 0, position, valid, ~valid, {}, (1,), tier=tier)


@given(st.integers(1, 400), st.integers(0, 150), st.floats(0, 1), st.integers(0, 99))
def test_the_oldest_whole_pages_beyond_the_exact_ones_are_coded(count, exact, share, seed):
    draw = torch.Generator().manual_seed(seed)
    position = torch.randperm(count, generator=draw).tolist()
    keep = (torch.rand(1, 1, count, generator=draw) < share) | (torch.tensor(position) == count - 1)
    tier = ByAge(Coding("int4"), exact).assign(keep, signals(position))
    assert torch.equal(tier != Tier.DROP, keep)
    old = sorted(p for p, kept in zip(position, keep[0, 0].tolist(), strict=True) if kept and p < count - exact)
    coded = sorted(p for p, to in zip(position, tier[0, 0].tolist(), strict=True) if to == Tier.INT4)
    assert coded == old[: len(old) // PAGE * PAGE]


def test_what_is_coded_stays_so():
    now = torch.full((1, 1, 200), int(Tier.EXACT), dtype=torch.uint8)
    now[..., :64] = int(Tier.INT8)
    keep = torch.ones(1, 1, 200, dtype=torch.bool)
    keep[..., 3] = False
    tier = ByAge(Coding("int8"), 130).assign(keep, signals(range(200), now))
    assert tier[0, 0, 3] == Tier.DROP
    assert (tier[0, 0, 4:64] == Tier.INT8).all()
    assert (tier[0, 0, 64:] == Tier.EXACT).all()


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 99))
def test_by_rank_the_newest_that_are_stored_stay_exact(count, exact, seed):
    draw = torch.Generator().manual_seed(seed)
    position = (torch.randperm(3 * count, generator=draw)[:count]).tolist()  # with gaps
    keep = torch.rand(1, 1, count, generator=draw) < 0.7
    tiers = ByAge(Coding("int8-running"), exact, by="rank")
    tier = tiers.assign(keep, signals(position))
    kept = sorted(p for p, stays in zip(position, keep[0, 0].tolist(), strict=True) if stays)
    coded = sorted(p for p, to in zip(position, tier[0, 0].tolist(), strict=True) if to == Tier.INT8)
    assert coded == kept[: max(0, len(kept) - exact)]
    assert tiers.due([[len(kept)]], torch.tensor(kept).view(1, 1, -1)) == (len(coded) > 0)


def test_due_counts_older_exact_entries_alone():
    position = torch.arange(74, dtype=torch.int32).view(1, 1, -1)
    assert ByAge(exact=10).due([[74]], position)
    assert not ByAge(exact=11).due([[74]], position)
    holes = position.masked_fill(position == 3, -1)  # nothing stored there
    assert not ByAge(exact=10).due([[73]], holes)
    assert ByAge(Coding("int8-running"), 73).due([[74]], position)
    assert not ByAge(Coding("int8-running"), 74).due([[74]], position)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full:exact=8", "needs a codec"),
        ("full:codec=int3", "int8"),
        ("h2o:codec=int8,exact=-1", "0 or more"),
    ],
)
def test_options_that_cannot_work(text, message):
    with pytest.raises(SpecError, match=message):
        parse_policy(text)
