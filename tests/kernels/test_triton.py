"""Triton kernels against float64: on a GPU if there is one, else under Triton's interpreter, in a process of its own.

The interpreter must be asked for before anybody imports Triton, and transformers does.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec import INT2, INT4, INT8, Codec
from kvstrata.kernels.mass import ALL_ROWS, Reduction
from kvstrata.kernels.pages import PAGE, Format, Pages, block_of

from . import random_pages
from .random_pages import read

attention = pytest.importorskip("kvstrata.kernels.attention.triton", exc_type=ImportError)
mass = pytest.importorskip("kvstrata.kernels.mass.triton", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
runs = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="runs under the interpreter")

WINDOWS = Codec("windows", 4, 2, symmetric=False, v_axis="token", window=16)
FOUR = Codec("four", 4, 4, symmetric=True, v_axis="channel")
CODECS = {"exact": None, "int8": INT8, "int4": INT4, "int2": INT2, "windows": WINDOWS, "four": FOUR}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALE = 0.3  # not a power of two, so that scaling rounds
TWO = attention.Tuning(pages=2)
ROUNDING = {torch.float32: 2.0**-21, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}  # fp32's is of sums


def mend_bfloat16():
    """Let the interpreter round to bf16, and multiply numbers: it truncates, and multiplies their bits."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def mended(self, x, dtype):
        if dtype.scalar == tl.bfloat16 and x.dtype.scalar == tl.float32:
            rounded = torch.from_numpy(x.data.copy()).bfloat16().view(torch.int16).numpy()
            return TensorHandle(rounded.view("uint16"), tl.bfloat16)
        return cast(self, x, dtype)

    def multiplied(self, a, b, *rest):
        if a.dtype.scalar == tl.bfloat16:
            a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = mended, multiplied


if INTERPRETED:
    mend_bfloat16()


@pytest.mark.skipif(INTERPRETED or DEVICE.type == "cuda", reason="they run here")
def test_all_of_these_under_the_interpreter():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    others = Path(__file__).with_name("test_echo.py")
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__, str(others)],
        env={**environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def make_pages(*args, **options):
    return random_pages.make_pages(*args, **options, device=DEVICE)


def truth(q, tiers, softmax, tokens=None, reduction=None):
    """Out, lse and mass in float64, and how far rounding of 16-bit queries may move a score."""
    (batch, every, queries, _), heads = q.shape, len(tiers[0].table) // q.shape[0]
    group = every // heads
    out = torch.zeros(*q.shape[:3], tiers[0].format.v_dim, dtype=torch.float64, device=DEVICE)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=DEVICE)
    widths = [PAGE * tier.table.shape[1] for tier in tiers]
    weight = torch.zeros(batch, heads, sum(widths), dtype=torch.float64, device=DEVICE)
    moved = 0.0
    for s in range(batch * heads):
        b, h = divmod(s, heads)
        held = [read(tier, s) for tier in tiers]
        k, v = (torch.cat([part[i] for part in held]) for i in (0, 1))
        slots = torch.cat([part[2] + sum(widths[:i]) for i, part in enumerate(held)])
        for i in range(queries - (queries if tokens is None else tokens[b]), queries):
            age, own = queries - 1 - i, len(held[0][0])
            visible = torch.arange(len(k), device=DEVICE)
            visible = (visible < own - age) | (visible >= own)
            rows = slice(h * group, (h + 1) * group)
            x = softmax.scale * q[b, rows, i].double()
            scores = x @ k.T
            if len(k):
                moved = max(moved, float((x.abs() @ (k - k.mean(0)).abs().T).max() + scores.abs().max()))
            if softmax.softcap is not None:
                scores = softmax.softcap * (scores / softmax.softcap).tanh()
            scores[:, ~visible] = -math.inf
            sinks = x.new_full((group,), -math.inf) if softmax.sinks is None else softmax.sinks[rows].double()
            lse[b, rows, i] = total = torch.cat([scores, sinks[:, None]], dim=1).logsumexp(1)
            p = (scores - total[:, None]).exp().nan_to_num(nan=0.0)
            out[b, rows, i] = p @ v
            if reduction and age < reduction.last(queries):
                mean = p.mean(0)
                mean = (mean * visible.sum() > 1).double() if reduction.counts else mean
                weight[b, h].index_add_(0, slots, mean * reduction.decay**age)
    return out, lse, weight, moved


def check(q, tiers, softmax=None, tokens=None, reduction=None, widths=None, tuning=TWO):
    softmax = softmax or Softmax(SCALE)
    options = {"softmax": softmax, "tokens": tokens, "reduction": reduction}
    out, lse, got = attention.attend_pages(q, tiers, **options, widths=widths, tuning=tuning)
    true_out, true_lse, true_mass, moved = truth(q, tiers, softmax, tokens, reduction)
    assert out.dtype == q.dtype
    assert out.shape == true_out.shape
    assert lse.dtype == torch.float32
    assert torch.equal(lse.isinf(), true_lse.isinf())
    coded = q.dtype != torch.float32 and any(tier.format.codec for tier in tiers)
    windows = any(tier.format.codec and tier.format.codec.window < PAGE for tier in tiers)
    eps = ROUNDING[q.dtype if windows else torch.float16] if coded else 2.0**-22
    score = eps * moved + 1e-6  # coded keys meet queries in fp16; with windows, they are rounded themselves
    values = torch.cat([read(tier, s)[1].flatten() for tier in tiers for s in range(len(tier.table))])
    largest = float(values.abs().max())
    error = (out.double() - true_out).abs().max()
    assert error <= (2 * ROUNDING[q.dtype] + 2 * score) * largest  # of probabilities, and of the output
    assert (lse.double() - true_lse).nan_to_num(nan=0.0).abs().max() <= score
    if reduction is None:
        assert got is None
        return out, lse, got
    if widths:
        starts = torch.tensor([0, *(PAGE * t.table.shape[1] for t in tiers)]).cumsum(0).tolist()
        true_mass = torch.cat([true_mass[..., a : a + w] for a, w in zip(starts[:-1], widths, strict=True)], dim=-1)
    assert got.dtype == torch.float32
    assert got.shape == true_mass.shape
    assert (got.double() - true_mass).abs().max() <= 2 * score * true_mass.max().clamp_min(1)
    return out, lse, got


def queries(batch, heads, count, dim, dtype):
    q = torch.randn(batch, count, heads, dim).to(dtype).to(DEVICE)
    return q.transpose(1, 2)  # as models give them


# -- attention -------------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_agrees_with_float64(codec, dtype):
    tiers = [make_pages(None, dtype, [70, 1], 64), make_pages(codec, dtype, [0, 130], 64)]
    check(queries(1, 6, 1, 64, dtype), tiers, reduction=Reduction(1))


@runs
@pytest.mark.parametrize(("dim", "v_dim"), [(16, 16), (80, 80), (96, 96), (128, 128), (64, 96)])
@pytest.mark.parametrize("codec", [None, INT8, INT4, INT2], ids=["exact", "int8", "int4", "int2"])
def test_heads_of_any_dimension(codec, dim, v_dim):
    tiers = [make_pages(None, torch.float16, [3], dim, v_dim), make_pages(codec, torch.float16, [100], dim, v_dim)]
    check(queries(1, 4, 1, dim, torch.float16), tiers)


@runs
@pytest.mark.parametrize(("count", "group"), [(1, 1), (1, 8), (4, 1), (4, 3), (8, 4), (8, 8), (9, 8)])
def test_queries_see_what_came_before_them(count, group):
    tiers = [make_pages(None, torch.float32, [68], 16), make_pages(INT8, torch.float32, [65], 16)]
    check(queries(1, group, count, 16, torch.float32), tiers, reduction=Reduction(3, decay=0.5))


@runs
@pytest.mark.parametrize(
    "reduction", [Reduction(ALL_ROWS, 0.0), Reduction(2, 0.9, counts=True)], ids=["newest", "counts"]
)
def test_rows_may_have_fewer_queries(reduction):
    tiers = [make_pages(None, torch.float32, [66, 2, 130, 4], 16), make_pages(INT4, torch.float32, [70, 0, 64, 3], 16)]
    q = queries(2, 6, 4, 16, torch.float32)
    q[0, :, :2], q[1, :, :3] = math.nan, math.nan
    check(q, tiers, tokens=[2, 1], reduction=reduction)


@runs
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_sinks_take_probability(softcap):
    sinks = torch.tensor([-1.0, 2.0, 30.0, 0.0], device=DEVICE)
    tiers = [make_pages(None, torch.float32, [5, 0], 16), make_pages(INT2, torch.float32, [70, 0], 16)]
    softmax = Softmax(SCALE, softcap, sinks)
    out, lse, got = check(queries(1, 4, 1, 16, torch.float32), tiers, softmax, reduction=Reduction(1))
    assert (lse[0, 2:, 0] - sinks[2:]).abs().max() <= 1e-5  # where nothing is stored
    assert not out[0, 2:].any()
    assert not got[0, 1].any()


@runs
def test_nothing_stored_gives_nothing():
    tiers = [make_pages(None, torch.float32, [0, 3], 16), make_pages(INT8, torch.float32, [0, 0], 16)]
    out, lse, got = check(queries(1, 4, 1, 16, torch.float32), tiers, reduction=Reduction(1))
    assert not out[0, :2].any()
    assert (lse[0, :2] == -math.inf).all()
    assert not got[0, 0].any()


@runs
def test_seams_between_splits_do_not_show():
    tiers = [make_pages(None, torch.float32, [200], 16), make_pages(INT8, torch.float32, [300], 16)]
    q = queries(1, 2, 2, 16, torch.float32)
    for pages in (1, 100):
        check(q, tiers, reduction=Reduction(2), tuning=attention.Tuning(pages=pages))


@runs
def test_many_splits_are_merged():
    check(
        queries(1, 1, 1, 16, torch.float32),
        [make_pages(None, torch.float32, [1200], 16)],
        tuning=attention.Tuning(pages=1),
    )


@runs
def test_mass_of_narrower_columns():
    lengths = [[70], [130], [1]]
    tiers = [make_pages(c, torch.float32, n, 16, room=70) for c, n in zip([None, INT8, None], lengths, strict=True)]
    check(queries(1, 2, 1, 16, torch.float32), tiers, reduction=Reduction(1), widths=[75, 130, 1])


@runs
@pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("counts", [False, True])
def test_pages_may_be_short(codec, counts):
    coded = make_pages(codec, torch.float32, [192, 128], 16, fills=[[64, 1, 40], [0, 17, 0]])
    tiers = [make_pages(None, torch.float32, [5, 70], 16), coded]
    check(queries(1, 4, 1, 16, torch.float32), tiers, reduction=Reduction(1, counts=counts))


@runs
def test_channels_far_from_zero_cost_no_precision():
    """As biases of keys make them: what their scale does not hold is added in fp32."""
    k = torch.randn(4, PAGE, 64) + 200 * (torch.arange(64) < 4)
    tiers = [make_pages(None, torch.float16, [1], 64), make_pages(INT4, torch.float16, [200], 64, k=k)]
    q = queries(1, 1, 1, 64, torch.float16)
    q[..., :4] = torch.tensor([3.1, -2.3, 1.7, 2.9])
    _, lse, _ = check(q, tiers)
    assert (lse.double() - truth(q, tiers, Softmax(SCALE))[1]).abs().max() <= 2e-3


@runs
@pytest.mark.parametrize("codec", [INT4, INT2], ids=["int4", "int2"])
def test_small_scales_keep_their_bits(codec):
    tiers = [make_pages(None, torch.bfloat16, [0], 16), make_pages(codec, torch.bfloat16, [128], 16)]
    for block in tiers[1].blocks:
        block.grid[:, -2 * PAGE :] *= 2.0**-30
    check(queries(1, 1, 1, 16, torch.bfloat16), tiers)


# -- what goes before ------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("tokens", [None, [2, 0]])
def test_append_writes_after_the_last(tokens):
    pages = make_pages(None, torch.float32, [62, 0, 5, 64], 16, 80, room=3)
    before = [read(pages, s)[:2] for s in range(4)]
    k, v = queries(2, 2, 3, 16, torch.float32), queries(2, 2, 3, 80, torch.float32)
    attention.append(pages, k, v, tokens=tokens)
    for s in range(4):
        b, h = divmod(s, 2)
        n = 3 if tokens is None else tokens[b]
        for x, old, new in zip(read(pages, s)[:2], before[s], (k, v), strict=True):
            assert torch.equal(x, torch.cat([old, new[b, h, 3 - n :].double()]))


@runs
def test_append_of_more_than_the_table_holds_harms_nobody():
    pages = make_pages(None, torch.float32, [63, 1], 16)
    before = read(pages, 1)
    attention.append(pages, queries(1, 2, 2, 16, torch.float32), queries(1, 2, 2, 16, torch.float32))
    pages.lengths.fill_(1)
    assert torch.equal(read(pages, 1)[0], before[0])


@runs
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # NumPy's, under the interpreter
@pytest.mark.parametrize("where", ["key", "query"])
def test_nan_is_not_hidden(where):
    pages, q = make_pages(None, torch.float32, [380], 16), queries(1, 1, 1, 16, torch.float32)
    if where == "key":
        page = int(pages.table[0, 1])
        block = block_of(pages.blocks, page)
        block.k[page - block.first, 3] = torch.nan
    else:
        q[..., 2] = torch.nan
    out, lse, _ = attention.attend_pages(q, [pages], softmax=Softmax(SCALE), reduction=Reduction(1), tuning=TWO)
    assert out.isnan().all()
    assert lse.isnan().all()


@runs
def test_append_of_a_prompt():
    pages = make_pages(None, torch.bfloat16, [1], 16, room=70)
    k = queries(1, 1, 70, 16, torch.bfloat16)
    attention.append(pages, k, k, at=attention.addresses(pages))
    assert torch.equal(read(pages, 0)[0][1:], k[0, 0].double())


@runs
def test_addresses_of_no_pages():
    none = Pages(Format(INT8, torch.float32, 16, 16), [], torch.empty(1, 0, dtype=torch.int32), torch.zeros(1).int())
    none = Pages(none.format, [], none.table.to(DEVICE), none.lengths.to(DEVICE))
    exact = make_pages(None, torch.float32, [3], 16)
    q = queries(1, 1, 1, 16, torch.float32)
    out, _, got = attention.attend_pages(q, [exact, none], softmax=Softmax(SCALE), reduction=Reduction(1), tuning=TWO)
    alone, _, mass_alone = attention.attend_pages(
        q, [exact], softmax=Softmax(SCALE), reduction=Reduction(1), tuning=TWO
    )
    assert torch.equal(out, alone)
    assert torch.equal(got, mass_alone)


def test_what_does_not_go_together_is_refused():
    exact, coded = make_pages(None, torch.float32, [3, 3], 16), make_pages(INT8, torch.float32, [3, 3], 16)
    q = queries(1, 4, 1, 16, torch.float32)
    odd = make_pages(Codec("odd", 8, 8, True, "token"), torch.float32, [3, 3], 16)
    refused = [
        ((q, [coded]), {}, "first tier is exact"),
        ((q[:, :3], [exact]), {}, "do not go with 2 segments"),
        ((q.half(), [exact]), {}, "torch.float16"),
        ((q[..., :8], [exact]), {}, "beside pages of"),
        ((q, [exact, make_pages(None, torch.float32, [3], 16)]), {}, "1 segments"),
        ((q, [exact, make_pages(None, torch.float32, [3, 3], 16, 32)]), {}, "other heads"),
        ((q, [exact, odd]), {}, "no Triton kernel for codec 'odd'"),
        ((q, [exact]), {"widths": [65]}, "widths"),
        ((q, [exact]), {"tokens": [2]}, "tokens"),
        ((q, [exact]), {"tokens": [1, 1]}, "tokens"),
    ]
    for given, options, message in refused:
        with pytest.raises(ValueError, match=message):
            attention.attend_pages(*given, softmax=Softmax(SCALE), **options)
    with pytest.raises(ValueError, match="exact tier"):
        attention.append(coded, q[:, :2], q[:, :2])


# -- column sums -----------------------------------------------------------------------------------------------------

LOTS = Reduction(ALL_ROWS)
COLUMNS = [
    (1, 1, 1, 16, LOTS, None),
    (5, 70, 3, 64, Reduction(ALL_ROWS, 0.5), None),
    (70, 130, 2, 16, Reduction(ALL_ROWS, 0.9, counts=True), 3.0),
    (65, 65, 1, 80, Reduction(ALL_ROWS, 0.0), None),
    (3, 200, 1, 96, LOTS, 5.0),
]


@runs
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("rows", "keys", "group", "dim", "reduction", "softcap"), COLUMNS)
def test_column_sums(monkeypatch, dtype, rows, keys, group, dim, reduction, softcap):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(mass, "SPLIT", 128)
    q = queries(1, group, rows + 2, dim, dtype)[:, :, 2:]
    k = queries(1, 1, keys + 3, dim, dtype)[:, :, :keys]
    sinks = torch.randn(group, device=DEVICE)
    lse = mass.column_lse(q, k, scale=SCALE, softcap=softcap, sinks=sinks)
    got = mass.column_mass(q, k, lse, scale=SCALE, softcap=softcap, reduction=reduction)
    scores = SCALE * q.double() @ k.double().transpose(2, 3)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    row = torch.arange(rows, device=DEVICE)
    scores.masked_fill_(torch.arange(keys, device=DEVICE) > (keys - rows + row)[:, None], -math.inf)
    true_lse = torch.cat([scores, sinks.double().expand(1, rows, -1).mT[..., None]], dim=3).logsumexp(3)
    mean = (scores - true_lse[..., None]).exp().mean(1)
    if reduction.counts:
        mean = (mean * (keys - rows + 1 + row)[:, None] > 1).double()
    true = (mean * (reduction.decay ** row.flip(0).double())[:, None]).sum(1)
    assert (lse - true_lse).abs().max() <= 1e-5
    assert (got[:, 0] - true).abs().max() <= 2e-5 * true.max().clamp_min(1)
