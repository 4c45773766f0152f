"""The native kernels against float64, with every instruction set that this machine runs."""

from __future__ import annotations

import math

import pytest
import torch

from . import paging
from .paging import INT2, INT4, INT8, Tier

_native = pytest.importorskip("kvstrata._native")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of the largest number; output rounds

isas = pytest.mark.parametrize("isa", _native.isas())
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))


@pytest.fixture(autouse=True)
def as_before():
    before = _native.isa()
    yield
    _native._force_isa(before)


def empty_like_queries(q, dim):
    return torch.full((*q.shape[:3], dim), math.nan, dtype=q.dtype)


def close(found, truth, limit):
    assert torch.isfinite(found).all()
    assert float((found.double() - truth).abs().max()) <= limit * max(1e-30, float(truth.abs().max()))


def check(tiers, *, batch=2, group=3, queries=1, limit=None, **options):
    """Run and compare out, lse and, where `weights` are given, mass."""
    heads = len(tiers[0].counts) // batch
    q = torch.randn(batch, heads * group, queries, tiers[0].k_dim).to(tiers[0].dtype)
    scale = 1.3 / math.sqrt(tiers[0].k_dim)
    out, lse = empty_like_queries(q, tiers[0].v_dim), torch.full(q.shape[:3], math.nan)
    given = dict(options)
    sizes = [max(1, int(tier.counts.max())) for tier in tiers]
    offsets = [sum(sizes[:i]) + 2 * i for i in range(len(sizes))]
    if "weights" in options:
        given |= {"mass": torch.full((batch, heads, sum(sizes) + 9), math.nan), "offsets": offsets}
    _native.attend(q, [tier.pages for tier in tiers], out, scale, lse=lse, **given)
    for name in ("new_k", "new_v", "threads"):
        options.pop(name, None)
    truth = paging.attend(q, tiers, scale, **options)
    close(out, truth.out, limit or LIMITS[tiers[0].dtype])
    shown = truth.lse.isfinite()
    assert torch.equal(lse == -math.inf, ~shown)
    close(lse[shown], truth.lse[shown], limit or 1e-5)
    if "weights" in options:
        expected = torch.zeros(batch * heads, sum(sizes) + 9).double()
        for mass, at in zip(truth.mass, offsets, strict=True):
            expected[:, at : at + mass.shape[1]] += mass
        close(given["mass"].flatten(0, 1), expected, limit or 1e-5)
    return out, lse, given.get("mass")


@isas
@dtypes
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_head_dims_and_groups(isa, dtype, dim, group):
    _native._force_isa(isa)
    check([Tier(dtype, None, [130, 64, 1, 200], dim, dim)], group=group, weights=[1.0])


@isas
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 71])
def test_every_size_of_group(isa, group):
    _native._force_isa(isa)
    check([Tier(torch.bfloat16, None, [70, 5], 64, 64)], batch=1, group=group, weights=[1.0])


@isas
@dtypes
@pytest.mark.parametrize("queries", [1, 2, 5, 8, 19, 70])
@pytest.mark.parametrize("group", [1, 4])
def test_several_queries_are_causal_among_their_own(isa, dtype, queries, group):
    _native._force_isa(isa)
    tier = Tier(dtype, None, [queries, 66 + queries, 128, 64 + queries], 16, 32)
    check([tier], queries=queries, group=group, weights=[1.0, 0.5, 0.0, 0.25])


@isas
@pytest.mark.parametrize(("k_dim", "v_dim"), [(8, 64), (64, 8), (192, 128), (40, 24)])
def test_keys_and_values_may_differ_in_size(isa, k_dim, v_dim):
    _native._force_isa(isa)
    check([Tier(torch.bfloat16, None, [65, 3], k_dim, v_dim)], batch=1, weights=[1.0])


@isas
@dtypes
def test_new_entries_are_appended_and_seen(isa, dtype):
    _native._force_isa(isa)
    tier = Tier(dtype, None, [0, 62, 64, 127], 64, 32, room=3)
    k, v = (torch.randn(2, 2, 3, d).to(dtype) for d in (64, 32))
    check([tier], queries=3, new_k=k, new_v=v, weights=[1.0, 1.0, 1.0])
    assert tier.counts.tolist() == [3, 65, 67, 130]
    stored_k, stored_v = tier.read(130)
    for s, n in enumerate(tier.counts.tolist()):
        assert torch.equal(stored_k[s, n - 3 : n], k.flatten(0, 1)[s].double())
        assert torch.equal(stored_v[s, n - 3 : n], v.flatten(0, 1)[s].double())


@isas
def test_rows_may_bring_fewer_tokens(isa):
    _native._force_isa(isa)
    tier = Tier(torch.float32, None, [5, 60, 0, 0, 9, 9], 16, 16, room=4)
    k, v = torch.randn(2, 3, 1, 4, 16).transpose(2, 3).squeeze(3), torch.randn(3, 2, 4, 16)
    tokens = torch.tensor([4, 0, 2], dtype=torch.int32)
    k = torch.cat([k.transpose(0, 1)])
    out, lse, _ = check([tier], batch=3, queries=4, new_k=k, new_v=v, tokens=tokens, weights=[1.0, 0.5])
    assert tier.counts.tolist() == [9, 64, 0, 0, 11, 11]
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()
    assert not out[2, :, :2].any()


@isas
@pytest.mark.parametrize("options", [{"sinks": True}, {"softcap": 2.0}, {"sinks": True, "softcap": 0.7}], ids=str)
def test_sinks_and_soft_capping(isa, options):
    _native._force_isa(isa)
    if options.get("sinks"):
        options = options | {"sinks": torch.randn(6)}
    tier = Tier(torch.float32, None, [130, 64, 0, 3], 64, 64)
    check([tier], queries=2, weights=[1.0, 1.0], **options)


@isas
@pytest.mark.parametrize("window", [1, 40, 100, 1000])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_windows_are_of_positions(isa, window, shared, counts):
    """The heads of a row may share positions: then their own entries stand at the same slots."""
    _native._force_isa(isa)
    own = Tier(torch.float32, None, [80, 80, 64, 64] if shared else [80, 7, 64, 65], 16, 16)
    older, sizes, offsets, queries = Tier(torch.float32, None, [0, 100, 3, 64], 16, 16), [80, 100], [0, 82], 3
    positions = torch.randint(0, 250, (4, 191), dtype=torch.int32)
    if shared:
        positions = positions[::2].repeat_interleave(2, 0)
    for s, n in enumerate(own.lengths):
        positions[s, n - queries : n] = torch.arange(250, 250 + queries)
    after = []
    for tier_size, at in zip(sizes, offsets, strict=True):
        p = positions[:, at : at + tier_size]
        mine = torch.stack([positions[s, n - queries : n] for s, n in enumerate(own.counts.tolist())])
        after.append(p[:, None] > mine[:, :, None] - window)
    q = torch.randn(2, 6, queries, 16)
    out, lse = torch.full_like(q, math.nan), torch.full(q.shape[:3], math.nan)
    mass = torch.full((2, 2, 191), math.nan)
    given = positions.view(2, 2, -1)[:, :1].contiguous() if shared else positions.view(2, 2, -1)
    weights = [1.0, 0.5, 0.25]
    _native.attend(q, [own.pages, older.pages], out, 0.4, lse=lse, mass=mass, offsets=offsets, weights=weights,
                   counts=counts, positions=given, window=window)  # fmt: skip
    truth = paging.attend(q, [own, older], 0.4, after=after, weights=weights, counts=counts)
    close(out, truth.out, 5e-6)
    close(lse, truth.lse, 1e-5)
    found = mass.flatten(0, 1)
    close(found[:, :80], truth.mass[0], 1e-5)
    close(found[:, 82:182], truth.mass[1], 1e-5)
    assert not found[:, 80:82].any()
    assert not found[:, 182:].any()


@isas
@pytest.mark.parametrize("queries", [1, 4])
def test_counts_ask_for_more_than_an_even_share(isa, queries):
    _native._force_isa(isa)
    tier = Tier(torch.float32, None, [130, 64, 9, 200], 64, 64)
    _, _, mass = check([tier], queries=queries, weights=[1.0, 0.5], counts=True)
    assert set(mass.unique().tolist()) <= {0.0, 0.5, 1.0, 1.5}


@isas
def test_several_exact_tiers_and_empty_segments(isa):
    _native._force_isa(isa)
    tiers = [Tier(torch.bfloat16, None, n, 64, 64) for n in ([3, 0, 64, 0], [0, 0, 70, 200], [128, 0, 1, 0])]
    out, lse, mass = check(tiers, weights=[1.0])
    assert not out[0, 3:].any()
    assert (lse[0, 3:] == -math.inf).all()
    assert not mass[0, 1].any()


@isas
@dtypes
def test_queries_and_results_may_have_any_strides(isa, dtype):
    _native._force_isa(isa)
    tier = Tier(dtype, None, [130, 64, 0, 3], 64, 32)
    dense = torch.randn(2, 6, 3, 64).to(dtype)
    expected = empty_like_queries(dense, 32)
    _native.attend(dense, [tier.pages], expected, 0.2)
    wide = torch.full((2, 3, 6, 100), math.nan, dtype=dtype)
    q = wide[..., 7:71].transpose(1, 2)
    q.copy_(dense)
    out = torch.full((2, 3, 6, 40), math.nan, dtype=dtype)
    _native.attend(q, [tier.pages], out[..., 4:36].transpose(1, 2), 0.2)
    assert torch.equal(out[..., 4:36].transpose(1, 2), expected)
    assert out[..., :4].isnan().all()
    assert out[..., 36:].isnan().all()


@isas
@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("lengths", [[3000, 0, 70, 1], [64] * 40, [900, 900]], ids=["long", "many", "two"])
def test_threads_agree_with_one_and_with_themselves(isa, threads, lengths):
    _native._force_isa(isa)
    tier = Tier(torch.float32, None, lengths, 64, 64)
    q = torch.randn(2, len(lengths) // 2 * 3, 2, 64)

    def run(threads):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        mass = torch.empty(2, len(lengths) // 2, 3000)
        _native.attend(q, [tier.pages], out, 0.2, lse=lse, mass=mass, weights=[1.0, 0.5], offsets=[0], threads=threads)
        return out, lse, mass

    first, again, alone = run(threads), run(threads), run(1)
    for a, b, c in zip(first, again, alone, strict=True):
        assert torch.equal(a, b)
        close(a.nan_to_num(neginf=0.0), c.nan_to_num(neginf=0.0).double(), 1e-5)


@isas
def test_large_scores_stay_finite(isa):
    _native._force_isa(isa)
    tier = Tier(torch.float32, None, [130, 64, 2, 3], 64, 64, spread=100.0)
    check([tier], limit=1e-4, weights=[1.0])


@isas
def test_nan_in_a_stored_entry_is_not_hidden(isa):
    _native._force_isa(isa)
    tier = Tier(torch.float32, None, [70, 70], 16, 16)
    block_first, k, _, _ = next(b for b in tier.blocks if b[0] <= int(tier.table[0, 1]) < b[0] + len(b[1]))
    k[int(tier.table[0, 1]) - block_first, 2] = math.nan
    q = torch.randn(1, 2, 1, 16)
    out = torch.zeros_like(q)
    _native.attend(q, [tier.pages], out, 1.0)
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()


MIXED = (8, 4, False, True, 64), (8, 8, False, True, 64), (2, 8, False, True, 64), (4, 2, False, True, 32)
WINDOWS = tuple((4, 4, False, True, window) for window in (8, 16, 32))
CODECS = {str(codec): codec for codec in (INT8, INT4, INT2, *MIXED, *WINDOWS)}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
ERRORS = {8: 1e-3, 4: 2e-3, 2: 2e-3}  # of the kernel on the stored values, by bits


@isas
@codecs
@dtypes
@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.thin(2)
def test_coded_pages(isa, codec, dtype, dim):
    _native._force_isa(isa)
    own, coded = Tier(dtype, None, [3, 70, 1, 0], dim, dim), Tier(dtype, codec, [130, 64, 0, 200], dim, dim)
    check([own, coded], weights=[1.0], limit=max(LIMITS[dtype], ERRORS[codec[0]]))
    check([own, coded], group=4, queries=5, weights=[1.0, 0.5, 0.25], limit=max(LIMITS[dtype], ERRORS[codec[0]]))


@isas
@codecs
@pytest.mark.parametrize("dims", [(128, 64), (256, 256), (512, 32)], ids=str)
@pytest.mark.parametrize("group", [1, 2, 7])
def test_coded_pages_of_other_sizes(isa, codec, dims, group):
    _native._force_isa(isa)
    own, coded = Tier(torch.float32, None, [3, 1], *dims), Tier(torch.float32, codec, [30, 65], *dims)
    check([own, coded], batch=1, group=group, limit=ERRORS[codec[0]])


@isas
@codecs
@pytest.mark.parametrize("counts", [True, False])
def test_coded_pages_may_be_short_or_empty(isa, codec, counts):
    _native._force_isa(isa)
    own, coded = Tier(torch.float32, None, [3, 70], 16, 16), Tier(torch.float32, codec, [192, 128], 16, 16)
    fills = torch.tensor([[64, 1, 40], [0, 17, 0]], dtype=torch.int32)
    pages = _native.Pages(coded.arena, coded.table, coded.counts, fills)
    filled = torch.arange(192) % 64 < fills.repeat_interleave(64, dim=1)
    q = torch.randn(1, 4, 2, 16)
    out, lse, mass = torch.zeros_like(q), torch.zeros(q.shape[:3]), torch.full((1, 2, 262), math.nan)
    options = {"weights": [1.0, 0.5], "counts": counts}
    _native.attend(q, [own.pages, pages], out, 0.3, lse=lse, mass=mass, offsets=[0, 70], **options)
    seen = [torch.ones(2, 2, 70, dtype=torch.bool), filled[:, None].expand(-1, 2, -1)]
    truth = paging.attend(q, [own, coded], 0.3, after=seen, **options)
    close(out, truth.out, ERRORS[codec[0]])
    close(lse, truth.lse, 1e-4)
    if not counts:
        close(mass[0], torch.cat(truth.mass, dim=1), ERRORS[codec[0]])
    else:
        assert float((mass[0] - torch.cat(truth.mass, dim=1)).abs().sum()) <= 1.0  # one that is nearly even may differ
