"""Wrong arguments of every kind: the native module raises ValueError or TypeError, or computes, and never crashes.

An access outside of its memory may pass unseen here; `make sanitize` runs this file on a module that sees it.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstrata.kernels.pages import PAGE

_native = pytest.importorskip("kvstrata._native")

CODECS = (8, 8, True, False, 64), (4, 4, False, True, 64), (2, 8, False, True, 16)
ODD_INTS = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 63, 64, 65, 255, 2**31 - 1, 2**31, 2**62])
BATCH, HEADS, GROUP, QUERIES, DIM = 2, 2, 2, 3, 16
PAGES = 4  # of a segment

pytestmark = pytest.mark.slow


def reshaped(x):
    """The same tensor in other shapes: fewer or more axes, other sizes, none at all."""
    yield x.flatten()
    yield x[None]
    yield x[:0]
    yield x.new_zeros(())
    yield x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)
    yield x.new_zeros(*x.shape[:-1], max(0, x.shape[-1] - 1))
    yield x.new_zeros(x.shape[0] + 1, *x.shape[1:])
    yield x.new_zeros(*x.shape[:-1], 0)
    yield x.new_zeros([1] * 9)


def relaid(x):
    """The same shape, laid out otherwise, or on no device that has memory."""
    yield torch.stack([x, x], dim=-1)[..., 0]
    yield x.new_zeros(()).expand(x.shape)
    yield x[:1].expand(2**40, *x.shape[1:])
    yield x.mT.contiguous().mT if x.dim() > 1 else x
    yield x.to("meta")
    yield x.to_sparse() if x.dtype != torch.bfloat16 else x
    yield x.clone().requires_grad_() if x.is_floating_point() else x.bool()


def retyped(x):
    """Other types of numbers, and things that are no tensor."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        yield x.to(dtype)
    yield x.to(torch.complex64)
    yield x.float().numpy()
    frozen = x.float().numpy().copy()
    frozen.setflags(write=False)
    yield frozen
    yield np.array(["a"])
    yield from (None, 3, "text", [1.0], object())


def spoilt(x):
    """Integers that are no page, length or count, each in one place."""
    for value in (-1, 2**31 - 1, -(2**31), 10_000, PAGE * PAGES + 1):
        bad = x.clone()
        bad.view(-1)[-1] = value
        yield bad


@st.composite
def wrong(draw, right):
    """Something else than `right`."""
    if not isinstance(right, torch.Tensor):
        others = [
            st.sampled_from([None, "text", 1.5, float("nan"), float("inf"), [], [None], (1, 2), [1e300]]),
            ODD_INTS,
        ]
        return draw(st.one_of(others))
    kinds = [reshaped, relaid, retyped] + ([spoilt] if right.dtype == torch.int32 else [])
    return draw(st.sampled_from(list(draw(st.sampled_from(kinds))(right))))


def block(dtype, codec, pages):
    if codec is None:
        k, v = (torch.randn(pages, PAGE, DIM).to(dtype) for _ in range(2))
        return k, v, torch.zeros(pages, 0, dtype=dtype)
    k, v = (torch.randint(0, 256, (pages, PAGE * DIM * bits // 8), dtype=torch.uint8) for bits in codec[:2])
    numbers = 2 * DIM if codec[2] else 2 * (PAGE // codec[4]) * DIM + 2 * PAGE
    return k, v, torch.rand(pages, numbers).to(torch.float32 if codec[2] else dtype)


@st.composite
def tiers(draw, dtype, codec):
    """Pages over one arena; at times with a table or lengths that name what is not there."""
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    arena = _native.Arena(name, codec, DIM, DIM)
    segments = BATCH * HEADS
    arena.add(5, *block(dtype, codec, segments * PAGES))
    table = torch.arange(5, 5 + segments * PAGES, dtype=torch.int32).view(segments, PAGES)
    lengths = torch.tensor(draw(st.lists(st.integers(0, PAGE * PAGES - QUERIES), min_size=4, max_size=4))).int()
    if draw(st.integers(0, 5)) == 0:
        table = draw(st.sampled_from(list(spoilt(table))))
    if draw(st.integers(0, 5)) == 0:
        lengths = draw(st.sampled_from(list(spoilt(lengths))))
    fills = None
    if codec and draw(st.booleans()):
        fills = torch.randint(0, 3 * PAGE // 2, (segments, PAGES), dtype=torch.int32)
        lengths = torch.full((segments,), PAGE * PAGES, dtype=torch.int32)
        fills = fills.clamp(max=PAGE) if draw(st.booleans()) else fills
    pages = _native.Pages(arena, table, lengths, fills)
    if draw(st.integers(0, 9)) == 0:
        arena.remove(5)
    return pages


def attempt(function, *args, **options):
    """Call, and forgive the two errors that a caller can expect."""
    with contextlib.suppress(ValueError, TypeError):
        function(*args, **options)


def some(names, most):
    """A few of the names, each once."""
    return st.lists(st.sampled_from(sorted(names)), max_size=most, unique=True)


@given(st.data())
@settings(max_examples=6_000, phases=[Phase.generate])
def test_attend(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    own, coded = data.draw(tiers(dtype, None)), data.draw(tiers(dtype, data.draw(st.sampled_from(CODECS))))
    width = 2 * PAGE * PAGES
    heads = HEADS * GROUP
    args = {
        "q": torch.randn(BATCH, heads, QUERIES, DIM).to(dtype),
        "tiers": [own, coded],
        "out": torch.zeros(BATCH, heads, QUERIES, DIM, dtype=dtype),
        "scale": 0.25,
        "new_k": torch.randn(BATCH, HEADS, QUERIES, DIM).to(dtype),
        "new_v": torch.randn(BATCH, HEADS, QUERIES, DIM).to(dtype),
        "tokens": torch.tensor([3, 1], dtype=torch.int32),
        "softcap": 2.0,
        "sinks": torch.randn(heads),
        "weights": [1.0, 0.5],
        "counts": True,
        "mass": torch.zeros(BATCH, HEADS, width),
        "offsets": [0, PAGE * PAGES],
        "lse": torch.zeros(BATCH, heads, QUERIES),
        "positions": torch.randint(0, 500, (BATCH, HEADS, width), dtype=torch.int32),
        "window": 100,
        "threads": data.draw(st.sampled_from([1, 2, 3])),
    }
    for name in data.draw(some(args, 3)):
        if name == "tiers":
            args[name] = data.draw(st.sampled_from([[], [own], [coded], [own] * 9, [None], None, [coded, own], [3]]))
        else:
            args[name] = data.draw(wrong(args[name]))
    if data.draw(st.booleans()):
        for name in data.draw(some(["new_k", "new_v", "mass", "lse", "positions", "offsets"], 6)):
            args.pop(name, None)
    attempt(_native.attend, **args)


@given(st.data())
@settings(max_examples=2_000, phases=[Phase.generate])
def test_append_move_and_gather(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    source, target = (
        data.draw(tiers(dtype, None)),
        data.draw(tiers(dtype, data.draw(st.sampled_from([None, None, *CODECS])))),
    )
    args = {
        "pages": source,
        "new_k": torch.randn(BATCH, HEADS, QUERIES, DIM).to(dtype),
        "new_v": torch.randn(BATCH, HEADS, QUERIES, DIM).to(dtype),
        "tokens": torch.tensor([3, 1], dtype=torch.int32),
    }
    order = torch.randint(-1, 200, (BATCH * HEADS, 90), dtype=torch.int32)
    moves = {"source": source, "target": data.draw(st.sampled_from([source, target])), "order": order, "threads": 2}
    names = (torch.randint(-1, high, (7,), dtype=torch.int32) for high in (BATCH * HEADS, 200))
    copies = {"pages": source, **dict(zip(("segment", "slot"), names, strict=True))}
    copies |= {name: torch.empty(7, DIM, dtype=dtype) for name in ("k_out", "v_out")}
    for given_args, function in ((args, _native.append), (moves, _native.move), (copies, _native.gather)):
        for name in data.draw(some(given_args, 2)):
            given_args[name] = data.draw(wrong(given_args[name]))
        attempt(function, **given_args)


@given(st.data())
@settings(max_examples=2_000, phases=[Phase.generate])
def test_echo_and_norms(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q = torch.randn(BATCH, HEADS * GROUP, QUERIES, DIM).to(dtype)
    k, sinks = (torch.randn(BATCH, HEADS, n, DIM).to(dtype) for n in (9, 4))
    asks = {"q": q, "k": k, "sinks": sinks, "lse": torch.randn(q.shape[:3]), "less": torch.randn(BATCH, HEADS, QUERIES)}
    asks |= {"cos": torch.ones(DIM // 2), "sin": torch.zeros(DIM // 2), "best_out": torch.empty(*q.shape[:2], 9)}
    asks |= {"scale": 1.0, "neighbours": data.draw(st.booleans()), "first": 0, "low": -2, "high": 2, "before": 6}
    asks |= {"skip": 1, "softcap": 0.0, "threads": 2}
    norms = {"outputs": torch.randn(HEADS * GROUP, DIM, DIM), "v": k, "threads": 2}
    norms["norms_out"] = torch.empty(BATCH, HEADS, GROUP, 9)
    for given_args, function in ((asks, _native.echo), (norms, _native.output_norms)):
        for name in data.draw(some(given_args, 2)):
            given_args[name] = data.draw(wrong(given_args[name]))
        attempt(function, **given_args)


@given(st.data())
@settings(max_examples=2_000, phases=[Phase.generate])
def test_arenas_and_pages(data):
    codec = data.draw(st.sampled_from([None, *CODECS]))
    first = {"dtype": "bfloat16", "codec": codec, "k_dim": DIM, "v_dim": DIM}
    for name in data.draw(some(first, 1)):
        odd_codecs = st.tuples(ODD_INTS, ODD_INTS, st.booleans(), st.booleans(), ODD_INTS)
        first[name] = data.draw(odd_codecs if name == "codec" else wrong(first[name]))
    attempt(_native.Arena, **first)
    arena = _native.Arena("bfloat16", codec, DIM, DIM)
    for _ in range(3):
        k, v, grid = block(torch.bfloat16, codec, data.draw(st.integers(1, 4)))
        args = {"first": data.draw(st.integers(0, 6)), "k": k, "v": v, "grid": grid}
        for name in data.draw(some(args, 2)):
            args[name] = data.draw(wrong(args[name]))
        attempt(arena.add, **args)
        attempt(arena.remove, data.draw(st.one_of(st.integers(0, 6), ODD_INTS)))
    table = torch.zeros(2, 3, dtype=torch.int32)
    args = {"arena": arena, "table": table, "lengths": table[:, 0].clone(), "fills": table + 64 if codec else None}
    for name in data.draw(some(args, 2)):
        args[name] = data.draw(wrong(args[name]))
    attempt(_native.Pages, **args)
    attempt(_native.read, data.draw(wrong(grid)), data.draw(ODD_INTS))
