from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.kernels.mass import column_lse, column_mass, column_moments, moments, query_blocks
from kvstrata.kernels.mass import ref as mass_ref

from .. import oracle

SCALE = 0.3  # not a power of two, so that scaling rounds

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
groups = pytest.mark.parametrize("group", [1, 3], ids=["mha", "gqa3"])
SIZES = [(1, 1), (1, 64), (3, 7), (17, 63), (64, 129), (129, 129), (32, 513)]
sizes = pytest.mark.parametrize(("rows", "keys"), SIZES, ids=[f"r{r}-n{n}" for r, n in SIZES])


def case(rows, keys, group, dtype):
    q = 2 * torch.randn(2, 2 * group, rows, 16)
    return q.to(dtype), torch.randn(2, 2, keys, 16).to(dtype)


def truth(q, k):
    return oracle.attend(q, k, torch.zeros_like(k), scale=SCALE, mass_rows=q.shape[2])


@dtypes
@groups
@sizes
def test_lse_agrees_with_the_oracle(dtype, group, rows, keys):
    q, k = case(rows, keys, group, dtype)
    lse = column_lse(q, k, scale=SCALE)
    assert lse.dtype == torch.float32
    assert lse.shape == (2, 2 * group, rows)
    assert (lse - truth(q, k).lse).abs().max() <= 1e-4


@dtypes
@groups
@sizes
def test_mass_agrees_with_the_oracle(dtype, group, rows, keys):
    q, k = case(rows, keys, group, dtype)
    mass = column_mass(q, k, truth(q, k).lse.float(), scale=SCALE)
    assert mass.dtype == torch.float32
    assert mass.shape == (2, 2, keys)
    assert (mass - truth(q, k).mass).abs().max() <= 1e-4


@dtypes
@groups
@sizes
def test_every_query_gives_away_one(dtype, group, rows, keys):
    q, k = case(rows, keys, group, dtype)
    total = column_mass(q, k, column_lse(q, k, scale=SCALE), scale=SCALE).sum(dim=-1)
    assert (total - rows).abs().max() <= 1e-5 * rows


@groups
def test_no_mass_reaches_a_key_before_its_own_query(group):
    q, k = case(8, 8, group, torch.float32)
    lse = column_lse(q, k, scale=SCALE)
    for rows in range(1, 9):
        early = column_mass(q[:, :, :rows], k[:, :, :rows], lse[:, :, :rows], scale=SCALE)
        assert (early.sum(dim=-1) - rows).abs().max() <= 1e-5 * rows
    first = column_mass(q[:, :, :1], k[:, :, :1], lse[:, :, :1], scale=SCALE)
    assert (first - 1).abs().max() <= 1e-6  # the first query has only itself


def test_equal_scores_share_the_mass_equally():
    k = torch.ones(1, 1, 4, 2)
    q = torch.ones(1, 1, 2, 2)
    mass = column_mass(q, k, column_lse(q, k, scale=SCALE), scale=SCALE)
    # the first of the two queries sees three keys, the second four
    assert torch.allclose(mass, torch.tensor([[[7 / 12, 7 / 12, 7 / 12, 1 / 4]]]))


def test_the_group_is_averaged():
    k = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    q = torch.tensor([[[[100.0, 0.0]], [[0.0, 100.0]]]])  # two heads of one group, each on another key
    mass = column_mass(q, k, column_lse(q, k, scale=1.0), scale=1.0)
    assert torch.allclose(mass, torch.tensor([[[0.5, 0.5]]]))


@groups
@pytest.mark.parametrize("block", [1, 777, 4000], ids=["a-query-a-block", "few-a-block", "uneven-last-block"])
def test_seams_between_blocks_do_not_show(monkeypatch, group, block):
    monkeypatch.setattr(mass_ref, "BLOCK_ELEMENTS", block)
    q, k = case(64, 129, group, torch.float32)
    lse = column_lse(q, k, scale=SCALE)
    assert (lse - truth(q, k).lse).abs().max() <= 1e-4
    assert (column_mass(q, k, lse, scale=SCALE) - truth(q, k).mass).abs().max() <= 1e-4


@given(queries=st.integers(0, 5000), width=st.integers(1, 1 << 24))
@settings(max_examples=100)
def test_blocks_cover_the_queries_in_order_and_stay_small(queries, width):
    blocks = list(query_blocks(queries, width))
    assert [q for start, stop in blocks for q in range(start, stop)] == list(range(queries))
    assert all((stop - start) * width <= max(mass_ref.BLOCK_ELEMENTS, width) for start, stop in blocks)
    assert all(stop > start for start, stop in blocks)
    fewest = -(-queries // max(1, mass_ref.BLOCK_ELEMENTS // width))
    assert len(blocks) == fewest


@groups
@pytest.mark.parametrize("blocks", [1, 1 << 20], ids=["head-by-head", "at-once"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 9), (5, 5), (7, 64), (32, 129)])
def test_moments_agree_with_the_whole_matrix(group, blocks, rows, keys, monkeypatch):
    monkeypatch.setattr(moments, "BLOCK_ELEMENTS", blocks)
    q, k = case(rows, keys, group, torch.float32)
    found = column_moments(q, k, column_lse(q, k, scale=SCALE), scale=SCALE)
    p, _ = oracle.probabilities(q, k, oracle.causal(rows, keys), scale=SCALE)
    p = p.unflatten(1, (2, group))
    variance = p.var(3).mean(2) if rows > 1 else torch.zeros(2, 2, keys)
    wanted = [p.mean((2, 3)), variance, torch.special.entr(p).sum(3).mean(2), p.amax((2, 3))]
    assert found.dtype == torch.float32
    assert (found - torch.stack(wanted, dim=-1)).abs().max() <= 1e-5


def test_moments_under_a_softcap():
    q, k = case(6, 20, 3, torch.float32)
    found = column_moments(q, k, column_lse(q, k, scale=SCALE, softcap=2.0), scale=SCALE, softcap=2.0)
    assert (found[..., 0].sum(dim=-1) - 1).abs().max() <= 1e-5
    assert torch.allclose(
        found[..., 0] * 6,
        column_mass(q, k, column_lse(q, k, scale=SCALE, softcap=2.0), scale=SCALE, softcap=2.0),
        atol=1e-5,
    )
