"""The native codec against the reference, bit for bit, with every instruction set that this machine runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvstrata.kernels.codec import Codec
from kvstrata.kernels.codec.ref import pack, unpack
from kvstrata.kernels.pages import PAGE, Format

from .coding import DTYPES, FILLS, fill

_native = pytest.importorskip("kvstrata._native")

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CODECS = [
    Codec("8", 8, 8, symmetric=True, v_axis="channel"),
    *(
        Codec(f"{k}-{v}-w{window}", k, v, symmetric=False, v_axis="token", window=window)
        for k, v, window in ((4, 4, 64), (2, 2, 64), (2, 2, 8), (4, 2, 16), (2, 8, 32), (8, 4, 64))
    ),
]
isas = pytest.mark.parametrize("isa", _native.isas())
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
codecs = pytest.mark.parametrize("codec", CODECS, ids=[codec.name for codec in CODECS])


@pytest.fixture(autouse=True)
def as_before():
    before = _native.isa()
    yield
    _native._force_isa(before)


def arena(format):
    c = format.codec
    record = c and (c.k_bits, c.v_bits, c.symmetric, c.v_axis == "token", c.window)
    return _native.Arena(NAMES[format.dtype], record, format.k_dim, format.v_dim)


def garbage_like(tensors):
    return [torch.full_like(t, 99) for t in tensors]


def native_pack(format, k, v):
    shapes = pack(format, k[:0], v[:0])[:3]
    out = [torch.full((len(k), t.shape[1]), 99, dtype=t.dtype) for t in shapes]
    return *out, _native.pack(arena(format), k, v, *out)


def native_unpack(format, packed):
    out = [torch.full((len(packed[0]), PAGE, dim), 99.0) for dim in (format.k_dim, format.v_dim)]
    _native.unpack(arena(format), *packed[:3], *out)
    return out


def check(format, k, v):
    expected, found = pack(format, k, v), native_pack(format, k, v)
    assert found[3] == expected.nonfinite
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    for ours, theirs in zip(native_unpack(format, expected), unpack(format, *expected[:3]), strict=True):
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@isas
@dtypes
@codecs
@pytest.mark.parametrize("dims", [(16, 256), (80, 64), (64, 96), (128, 16)], ids=str)
@pytest.mark.thin(2)
def test_codes_grids_and_numbers_are_those_of_the_reference(isa, dtype, codec, dims):
    _native._force_isa(isa)
    format = Format(codec, dtype, *dims)
    for kind in FILLS:
        for share in (0.0, 0.05):
            check(format, *(fill(kind, 2, dim, dtype, share) for dim in dims))


@isas
@codecs
def test_rows_may_lie_anywhere(isa, codec):
    _native._force_isa(isa)
    format = Format(codec, torch.bfloat16, 32, 16)
    wide = torch.randn(PAGE, 3, 48).bfloat16()
    k, v = wide[:, :, 8:40].transpose(0, 1), wide[::1, 1:, :16].flip(0).transpose(0, 1)[:1].expand(3, -1, -1)
    check(format, k, v)
    packed = pack(format, k, v)
    room = torch.full((PAGE, 3, 48), 99.0)
    _native.unpack(arena(format), *packed[:3], room[:, :, 8:40].transpose(0, 1), room[:, :, :8].new_empty(3, PAGE, 16))
    assert torch.equal(room[:, :, 8:40].transpose(0, 1), unpack(format, *packed[:3])[0])
    assert (room[:, :, :8] == 99).all()
    assert (room[:, :, 40:] == 99).all()


@isas
def test_no_pages_are_coded_as_none(isa):
    _native._force_isa(isa)
    format = Format(CODECS[0], torch.float32, 16, 16)
    assert native_pack(format, torch.zeros(0, PAGE, 16), torch.zeros(0, PAGE, 16))[3] == 0


@isas
def test_numbers_that_wide_sums_of_half_precision_could_not_count(isa):
    _native._force_isa(isa)
    format = Format(CODECS[1], torch.float16, 256, 256)
    x = torch.full((40, PAGE, 256), torch.nan).half()
    assert native_pack(format, x, x)[3] == 2 * x.numel()


@isas
def test_several_threads_at_once(isa):
    _native._force_isa(isa)
    format = Format(CODECS[1], torch.bfloat16, 64, 64)
    pages = [fill("normal", 20, 64, torch.bfloat16, 0.0) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: native_pack(format, x, x), pages))
    for x, one in zip(pages, found, strict=True):
        assert all(map(torch.equal, one[:3], pack(format, x, x)[:3]))


def good():
    """A format, its arena, and arguments of pack that fit."""
    format = Format(CODECS[1], torch.bfloat16, 32, 16)
    k, v = torch.randn(2, PAGE, 32).bfloat16(), torch.randn(2, PAGE, 16).bfloat16()
    return format, [k, v, *garbage_like(pack(format, k, v)[:3])]


WRONG = {
    "rank": (0, lambda t: t[0], "k must be bfloat16"),
    "dtype": (0, lambda t: t.float(), "k must be bfloat16"),
    "slots": (0, lambda t: t[:, :63], "k must be bfloat16"),
    "width": (1, lambda t: t[..., :8], "v must be bfloat16"),
    "pages": (1, lambda t: t[:1], "v must be bfloat16"),
    "strided rows": (0, lambda t: torch.cat([t, t], -1)[..., ::2], "dense along its last axis"),
    "list": (0, lambda t: t.tolist(), "k is no tensor"),
    "None": (3, lambda t: None, "incompatible"),
    "backwards": (2, lambda t: np.ascontiguousarray(t.numpy())[:, ::-1], "k_codes must be contiguous"),
    "codes' type": (2, lambda t: t.int(), "k_codes must be uint8"),
    "codes' pages": (3, lambda t: t[:1], "v_codes must be uint8"),
    "codes' bytes": (3, lambda t: t[:, :-1].contiguous(), "v_codes must be uint8"),
    "gaps": (2, lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], "k_codes must be contiguous"),
    "scalar": (4, lambda t: t[0, 0], "grid must be bfloat16"),
    "grid's type": (4, lambda t: t.float(), "grid must be bfloat16"),
    "grid's numbers": (4, lambda t: t[:, 1:].contiguous(), "grid must be bfloat16"),
}


@pytest.mark.parametrize(("at", "change", "problem"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(at, change, problem):
    format, arguments = good()
    arguments[at] = change(arguments[at])
    with pytest.raises((ValueError, TypeError), match=problem):
        _native.pack(arena(format), *arguments)
    if at >= 2:
        out = [torch.zeros(2, PAGE, 32), torch.zeros(2, PAGE, 16)]
        with pytest.raises((ValueError, TypeError), match=problem):
            _native.unpack(arena(format), *arguments[2:], *out)


def test_numbers_come_back_in_fp32_only():
    format, (_, _, *stored) = good()
    with pytest.raises(ValueError, match="k_out must be float32"):
        _native.unpack(arena(format), *stored, torch.zeros(2, PAGE, 32).bfloat16(), torch.zeros(2, PAGE, 16))
    with pytest.raises(ValueError, match="v_out must be float32"):
        _native.unpack(arena(format), *stored, torch.zeros(2, PAGE, 32), torch.zeros(2, PAGE, 32))


def test_exact_pages_have_no_codes():
    _, arguments = good()
    with pytest.raises(ValueError, match="exact"):
        _native.pack(arena(Format(None, torch.bfloat16, 32, 16)), *arguments)
