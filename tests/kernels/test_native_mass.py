"""Native column sums against float64, with every instruction set that this machine runs."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvstrata.kernels.mass import ALL_ROWS, Reduction, column_lse, column_mass

from .. import oracle

_native = pytest.importorskip("kvstrata._native")

SCALE = 0.3
LIMIT = 2e-5  # of an lse, absolutely; some hundred sums of fp32 numbers around 10
# batch, heads, group, rows, keys, dim: single ones, part tiles, part pages, part vectors, several ranges of keys
SHAPES = [
    (1, 1, 1, 1, 1, 8),
    (2, 2, 3, 17, 63, 16),
    (1, 2, 4, 129, 129, 80),
    (2, 1, 3, 40, 700, 64),
    (1, 1, 7, 33, 300, 128),
    (1, 1, 70, 5, 100, 20),
    (1, 2, 2, 64, 256, 13),
    (1, 1, 1, 20, 2500, 16),
    (1, 1, 2, 300, 513, 256),
]
isas = pytest.mark.parametrize("isa", _native.isas())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=["-".join(map(str, shape)) for shape in SHAPES])


@pytest.fixture(autouse=True)
def as_before():
    before = _native.isa()
    yield
    _native._force_isa(before)


def case(shape, dtype):
    batch, heads, group, rows, keys, dim = shape
    spread = 8 / math.sqrt(dim)  # scores of about the same size whatever the width
    return (spread * torch.randn(batch, heads * group, rows, dim)).to(dtype), torch.randn(batch, heads, keys, dim).to(
        dtype
    )


def truth(q, k, softcap=0.0, sinks=None):
    """Probabilities [B, H*G, R, N] and lse [B, H*G, R] in float64."""
    group = q.shape[1] // k.shape[1]
    scores = SCALE * q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~oracle.causal(q.shape[2], k.shape[2]), -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    return (scores - lse[..., None]).exp(), lse


def native_lse(q, k, **options):
    out = torch.full(q.shape[:3], math.nan)
    _native.column_lse(q, k, out, SCALE, **options)
    return out


def native_mass(q, k, lse, **options):
    out = torch.full(k.shape[:3], math.nan)
    _native.column_mass(q, k, lse, out, SCALE, **options)
    return out


def received(p, heads, weights):
    """Mass [B, H, N] of probabilities p [B, H*G, R, N], weights [R]."""
    return (p * weights[:, None]).unflatten(1, (heads, -1)).mean(2).sum(2)


@isas
@dtypes
@shapes
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.5, True)], ids=["plain", "softcap-sinks"])
def test_lse_and_mass_agree_with_float64(isa, dtype, shape, softcap, with_sinks):
    _native._force_isa(isa)
    q, k = case(shape, dtype)
    sinks = 3 * torch.randn(q.shape[1]) if with_sinks else None
    p, lse = truth(q, k, softcap, sinks)
    found = native_lse(q, k, softcap=softcap, sinks=sinks)
    assert (found - lse).abs().max() <= LIMIT
    for decay in (1.0, 0.9, 0.0):
        weights = decay ** torch.arange(q.shape[2] - 1, -1, -1).double()
        mass = native_mass(q, k, lse.float(), softcap=softcap, decay=decay)
        expected = received(p, k.shape[1], weights)
        assert (mass - expected).abs().max() <= LIMIT * max(1.0, float(expected.max()))


@isas
@shapes
def test_counts_are_of_queries_that_gave_more_than_an_even_share(isa, shape):
    _native._force_isa(isa)
    q, k = case(shape, torch.float32)
    p, lse = truth(q, k)
    mass = native_mass(q, k, lse.float(), counts=True, decay=0.9)
    seen = torch.arange(k.shape[2] - q.shape[2] + 1, k.shape[2] + 1).double()
    shares = p.unflatten(1, (k.shape[1], -1)).mean(2) * seen[:, None]
    weights = 0.9 ** torch.arange(q.shape[2] - 1, -1, -1).double()[:, None]
    low, high = ((weights * (shares > 1 + edge)).sum(2) for edge in (1e-4, -1e-4))
    assert (low - 1e-5 <= mass).all()
    assert (mass <= high + 1e-5).all()
    assert (high - low).max() <= 1.01 * weights[0] + 0.05 * weights.sum()  # hardly any share is that close to even


@isas
def test_the_only_key_a_query_sees_has_no_more_than_its_share(isa):
    _native._force_isa(isa)
    q, k = case((1, 1, 3, 1, 1, 64), torch.float32)
    for _ in range(20):
        q = torch.randn_like(q)
        assert native_mass(q, k, native_lse(q, k), counts=True).item() == 0


@isas
@pytest.mark.parametrize("options", [{}, {"decay": 0.95}, {"counts": True}, {"softcap": 4.0}], ids=str)
def test_the_reference_means_the_same(isa, options):
    _native._force_isa(isa)
    q, k = case((2, 2, 3, 50, 200, 64), torch.bfloat16)
    softcap = options.get("softcap")
    lse = column_lse(q, k, scale=SCALE, softcap=softcap)
    assert (native_lse(q, k, softcap=softcap or 0.0) - lse).abs().max() <= LIMIT
    reduction = Reduction(ALL_ROWS, options.get("decay", 1.0), options.get("counts", False))
    mass = column_mass(q, k, lse, scale=SCALE, reduction=reduction, softcap=softcap)
    assert (native_mass(q, k, lse, **options) - mass).abs().max() <= LIMIT * float(mass.max())


@isas
@dtypes
def test_tensors_may_lie_anywhere(isa, dtype):
    _native._force_isa(isa)
    q, k = case((2, 2, 3, 40, 150, 64), dtype)
    lse = native_lse(q, k)
    mass = native_mass(q, k, lse)
    padded = torch.full((40, 2, 6, 100), math.nan, dtype=dtype)
    padded[..., 17:81] = q.permute(2, 0, 1, 3)
    moved = padded[..., 17:81].permute(1, 2, 0, 3)  # [B, H*G, R, D]
    shared = k[:1].expand(2, -1, -1, -1)
    assert torch.equal(native_lse(moved, k), lse)
    assert torch.equal(native_mass(moved, k, lse), mass)
    assert torch.equal(native_lse(q, shared), native_lse(q, shared.contiguous()))


@isas
@pytest.mark.parametrize("shape", [(2, 2, 3, 40, 700, 64), (1, 3, 2, 500, 1500, 16), (1, 1, 1, 1, 3, 16)], ids=str)
def test_threads_change_nothing(isa, shape):
    _native._force_isa(isa)
    q, k = case(shape, torch.float32)
    lse = native_lse(q, k)
    mass = native_mass(q, k, lse)
    for threads in (2, 5):
        assert torch.equal(native_lse(q, k, threads=threads), lse)
        assert torch.equal(native_mass(q, k, lse, threads=threads), mass)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(found, lse) for found in pool.map(lambda _: native_lse(q, k, threads=2), range(6)))


@isas
def test_large_scores_do_not_overflow(isa):
    _native._force_isa(isa)
    q, k = case((1, 1, 2, 30, 90, 32), torch.float32)
    q = q * 1000
    lse = truth(q, k)[1]
    found = native_lse(q, k)
    assert ((found - lse) / lse).abs().max() <= 1e-5
    assert (native_mass(q, k, found).sum(-1) - 30).abs().max() <= 0.05  # scores of 10^4 have errors of 10^-3
    assert native_mass(q, k, found).isfinite().all()


@isas
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_shows_where_it_is_seen_and_only_there(isa, number):
    _native._force_isa(isa)
    q, k = case((1, 2, 2, 100, 100, 16), torch.float32)
    clean_lse = native_lse(q, k)
    clean = native_mass(q, k, clean_lse)
    k[0, 1, 60, 3] = number
    lse = native_lse(q, k)
    assert torch.equal(lse[:, :2], clean_lse[:, :2])  # the other head's queries
    assert torch.equal(lse[:, 2:, :60], clean_lse[:, 2:, :60])
    assert not lse[:, 2:, 60:].isfinite().any() or number == math.inf
    assert lse[:, 2:, 60:].isnan().any()
    mass = native_mass(q, k, lse)
    assert torch.equal(mass[:, 0], clean[:, 0])
    assert mass[:, 1].isnan().any()


WRONG = {
    "rank": (0, lambda t: t[0], "q must be"),
    "double": (0, lambda t: t.double(), "q must be float32, bfloat16 or float16"),
    "other dtype": (1, lambda t: t.bfloat16(), "k must be float32"),
    "batch": (1, lambda t: t[:1], "k must be float32"),
    "width": (1, lambda t: t[..., :8], "k must be float32"),
    "heads": (0, lambda t: t[:, :3], "multiple of 2"),
    "rows": (1, lambda t: t[:, :, :3], "last of the keys"),
    "no rows": (0, lambda t: t[:, :, :0], "empty"),
    "no keys": (1, lambda t: t[:, :, :0], "empty"),
    "no heads": (1, lambda t: t[:, :0], "empty"),
    "no channels": (0, lambda t: t[..., :0], "k must be float32"),
    "strided rows": (1, lambda t: torch.cat([t, t], -1)[..., ::2], "dense along its last axis"),
    "too many": (0, lambda t: t[:, :1].expand(-1, 2**33, -1, -1), "too large"),
    "list": (0, lambda t: t.tolist(), "q is no tensor"),
    "None": (1, lambda t: None, "incompatible"),
    "lse's type": (2, lambda t: t.double(), "lse.* must be float32"),
    "lse's rows": (2, lambda t: t[..., 1:].contiguous(), "lse.* must be float32"),
    "lse's gaps": (2, lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]], "lse.* must be contiguous"),
}


@pytest.mark.parametrize(("at", "change", "problem"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(at, change, problem):
    arguments = [*case((2, 2, 2, 5, 9, 16), torch.float32), torch.zeros(2, 4, 5)]
    arguments[at] = change(arguments[at])
    with pytest.raises((ValueError, TypeError), match=problem):
        _native.column_lse(*arguments, SCALE)
    with pytest.raises((ValueError, TypeError), match=problem):
        _native.column_mass(*arguments, torch.zeros(2, 2, 9), SCALE)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": -3},
        {"threads": 10**6},
        {"softcap": -1.0},
        {"softcap": math.nan},
        {"softcap": math.inf},
        {"scale": math.inf},
        {"scale": math.nan},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options):
    q, k = case((1, 1, 2, 5, 9, 16), torch.float32)
    options = {"scale": SCALE, **options}
    with pytest.raises(ValueError, match=r"threads|softcap|scale"):
        _native.column_lse(q, k, torch.zeros(1, 2, 5), **options)
    with pytest.raises(ValueError, match=r"threads|softcap|scale"):
        _native.column_mass(q, k, torch.zeros(1, 2, 5), torch.zeros(1, 1, 9), **options)


def test_sinks_decay_and_mass_are_checked():
    q, k = case((1, 1, 2, 5, 9, 16), torch.float32)
    lse = torch.zeros(1, 2, 5)
    for sinks in (torch.zeros(3), torch.zeros(2).double(), torch.zeros(1, 2), torch.zeros(4)[::2]):
        with pytest.raises(ValueError, match="sinks"):
            _native.column_lse(q, k, lse, SCALE, sinks=sinks)
    for out in (torch.zeros(1, 1, 8), torch.zeros(1, 9), torch.zeros(1, 1, 9).half(), torch.zeros(1, 1, 18)[..., ::2]):
        with pytest.raises(ValueError, match="mass_out"):
            _native.column_mass(q, k, lse, out, SCALE)
    with pytest.raises(ValueError, match="decay"):
        _native.column_mass(q, k, lse, torch.zeros(1, 1, 9), SCALE, decay=math.nan)
