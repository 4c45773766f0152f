"""The banded repeat, every implementation against a plain loop in float64."""

from __future__ import annotations

import math
import os

import pytest
import torch

from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec.rotation import Turn
from kvstrata.kernels.echo import Band, echo

try:
    from kvstrata import _native
except ImportError:
    _native = None

# batch, heads, group, rows, keys, before, dim, (low, high), skip, sinks, first
CASES = [
    (1, 1, 1, 1, 1, 0, 8, (0, 0), 0, 0, 0),
    (2, 2, 3, 40, 40, 0, 16, (-4, 4), 4, 4, 0),  # the first queries do not see all sinks
    (1, 3, 3, 700, 700, 0, 64, (-4, 4), 4, 4, 0),
    (1, 2, 1, 20, 33, 9, 80, (-4, 4), 0, 4, 50),  # keys before the first query
    (1, 1, 2, 12, 6, 4, 13, (-1, 2), 0, 1, 2),  # queries without keys
    (2, 1, 7, 5, 300, 295, 128, (0, 1), 0, 17, 6),  # keys without queries
    (1, 1, 2, 30, 30, 0, 20, (1, 20), 3, 64, 1000),
    (1, 1, 1, 300, 300, 0, 256, (-31, 31), 0, 3, 0),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)).replace(" ", ""))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def made(case, dtype=torch.float32):
    batch, heads, group, rows, keys, before, dim, (low, high), skip, sinks, first = case
    q, k = 2 * torch.randn(batch, heads * group, rows, dim), torch.randn(batch, heads, keys, dim)
    angle = 9 * torch.rand(dim // 2 - 1 if dim > 8 else dim // 2)  # the last channels stay as they are
    turn = Turn(angle.cos(), angle.sin(), "neighbours" if dim % 16 else "halves")
    first_keys = torch.randn(batch, heads, sinks, dim)
    own = 0.3 * q.unflatten(1, (heads, group)) @ first_keys[:, :, None].transpose(-1, -2)
    more = torch.randn(batch, heads * group, rows)  # what queries saw beside the sinks, which is at least half
    seen = own.flatten(1, 2).logsumexp(dim=-1)
    lse = torch.logaddexp(seen, torch.maximum(seen, more))
    options = {"turn": turn, "first": first, "before": before, "band": Band(low, high), "skip": skip}
    options["less"] = torch.randn(batch, heads, rows)
    return [q.to(dtype), k.to(dtype), first_keys.to(dtype), lse], options


def turned(x, turn):
    x, size = x.double(), 2 * len(turn.cos)
    one, other = (
        (slice(size // 2), slice(size // 2, size)) if turn.pairs == "halves" else (slice(0, size, 2), slice(1, size, 2))
    )
    a, b = x[..., one].clone(), x[..., other].clone()
    x[..., one], x[..., other] = a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin
    return x


def truth(q, k, sinks, lse, turn, first, before, band, skip, less, scale, softcap=None):
    group, keys = q.shape[1] // k.shape[1], k.shape[2]

    def scores(x, of):
        s = scale * torch.einsum("bhd,bhnd->bhn", x.double(), of.double().repeat_interleave(group, 1))
        return s if softcap is None else softcap * (s / softcap).tanh()

    best = torch.full((*q.shape[:2], keys), -math.inf, dtype=torch.float64)
    for r in range(q.shape[2]):
        seen = [c for c in range(r + before + band.low, r + before + band.high + 1) if skip <= c < keys]
        if not seen:
            continue
        s = scores(q[:, :, r], turned(k, turn)[:, :, seen])
        own = scores(q[:, :, r], sinks[:, :, : first + r + 1])
        left = (1 - (own - lse[:, :, r, None].double()).exp().sum(-1)).clamp_min(1e-6)
        whole = left * lse[:, :, r].double().exp() + scores(q[:, :, r], turned(sinks, turn)).exp().sum(-1)
        s -= (whole + s.exp().sum(-1)).log()[..., None]
        s -= less[:, :, r].repeat_interleave(group, 1)[..., None]
        best[:, :, seen] = torch.maximum(best[:, :, seen], s)
    return best


def agree(got, true, limit=2e-5):
    assert got.dtype == torch.float32
    assert torch.equal(got.isinf(), true.isinf())
    assert (got.double() - true).nan_to_num(nan=0.0).abs().max() <= limit


@dtypes
@cases
def test_every_implementation_agrees_with_a_plain_loop(kernels, case, dtype):
    inputs, options = made(case, dtype)
    got = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **options)
    agree(got, truth(*inputs, scale=0.3, **options))


def test_softcap(kernels):
    inputs, options = made(CASES[1])
    got = echo(*inputs, softmax=Softmax(0.3, softcap=2.0), kernels=kernels, **options)
    agree(got, truth(*inputs, scale=0.3, softcap=2.0, **options))


def test_a_query_that_saw_nothing_shares_all_among_its_band(kernels):
    inputs, options = made(CASES[1])
    inputs[2], inputs[3] = inputs[2][:, :, :0], torch.full_like(inputs[3], -math.inf)
    got = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **options)
    agree(got, truth(*inputs, scale=0.3, **options))


@pytest.mark.parametrize("score", [60.0, 90.0, 200.0, 260.0])
def test_a_sink_above_what_a_query_saw_leaves_nothing_of_it(kernels, score):
    """As may be where sinks were coded after their queries had seen them."""
    q, sinks = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)
    q[..., 0], sinks[..., 0] = 1.0, score
    turn = Turn(torch.zeros(4), torch.ones(4))  # the turned sink scores 0, as the key does
    options = {"turn": turn, "first": 10, "before": 0, "band": Band(0, 0)}
    got = echo(
        q, torch.zeros(1, 1, 1, 8), sinks, torch.zeros(1, 1, 1), softmax=Softmax(1.0), kernels=kernels, **options
    )
    assert got.item() == pytest.approx(math.log(0.5), abs=1e-5)


def test_what_is_taken_off_may_be_nothing_or_all(kernels):
    inputs, options = made(CASES[1])
    plain = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **{**options, "less": None})
    options["less"][:] = 0
    agree(plain, truth(*inputs, scale=0.3, **options))
    options["less"][:, 1, 7:30] = math.inf
    got = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **options)
    agree(got, truth(*inputs, scale=0.3, **options))
    assert got[:, 3:, 12:25].isinf().all()


def test_strided_inputs(kernels):
    inputs, options = made(CASES[1])
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    agree(echo(*strided, softmax=Softmax(0.3), kernels=kernels, **options), truth(*inputs, scale=0.3, **options))


def test_a_nan_key_spoils_no_other_than_its_neighbours(kernels):
    inputs, options = made(CASES[1])
    clean = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **options)
    inputs[1][:, :, 20] = math.nan
    got = echo(*inputs, softmax=Softmax(0.3), kernels=kernels, **options)
    far = [c for c in range(40) if abs(c - 20) > 8]
    assert torch.equal(got[..., far], clean[..., far])


@pytest.mark.skipif(_native is None, reason="no native kernels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 3, "high": 2}, "low to high"),
        ({"low": 0, "high": 64}, "low to high"),
        ({"low": -(10**12), "high": -(10**12)}, "low to high"),
        ({"before": -1}, "before"),
        ({"skip": 41}, "skip"),
        ({"threads": 0}, "threads"),
        ({"softcap": -1.0}, "softcap"),
        ({"lse": torch.zeros(2, 6, 39)}, "lse"),
        ({"sinks": torch.zeros(2, 2, 65, 16)}, "sinks"),
        ({"sinks": torch.zeros(2, 2, 4, 15)}, "sinks"),
        ({"cos": torch.zeros(9), "sin": torch.zeros(9)}, "cos"),
        ({"sin": torch.zeros(6)}, "sin"),
        ({"first": -1}, "first"),
        ({"less": torch.zeros(2, 6, 40)}, "less"),
        ({"best_out": torch.zeros(2, 6, 40, dtype=torch.float64)}, "best_out"),
        ({"k": torch.zeros(2, 4, 40, 16)}, "multiple"),
        ({"q": torch.zeros(2, 6, 0, 16), "lse": torch.zeros(2, 6, 0), "less": torch.zeros(2, 2, 0)}, "empty"),
    ],
    ids=str,
)
def test_bad_calls_raise(change, message):
    inputs, options = made(CASES[1])
    call = dict(zip(("q", "k", "sinks", "lse"), inputs, strict=True))
    call |= {"less": options["less"], "cos": options["turn"].cos, "sin": options["turn"].sin}
    call |= {"best_out": torch.zeros(2, 6, 40), "scale": 1.0, "neighbours": False, "first": 0}
    with pytest.raises(ValueError, match=message):
        _native.echo(**{**call, "low": -4, "high": 4, "before": 0, **change})


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="no Triton here"
)
@pytest.mark.parametrize(
    ("case", "dtype"), [(CASES[i], torch.float32) for i in (0, 1, 4)] + [(CASES[3], torch.bfloat16)], ids=str
)
def test_triton(case, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, options = made(case, dtype)
    on = (tensor.to(device) for tensor in inputs)
    there = {**options, "less": options["less"].to(device)}
    got = echo(*on, softmax=Softmax(0.3), kernels="triton", **there)
    agree(got.cpu(), truth(*inputs, scale=0.3, **options))
