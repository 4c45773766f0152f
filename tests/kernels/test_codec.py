from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings

from kvstrata.kernels.codec import CODECS, Codec
from kvstrata.kernels.codec.ref import pack, reorder, unpack
from kvstrata.kernels.pages import PAGE, Format

from .coding import DIMS, DTYPES, cases, fill, fp32, key_place, plain_code, plain_grid, plain_group, value_place

ROUNDING = 2.0**-24  # of one operation in fp32, relative
TINY = 2.0**-149  # the least number of fp32


def sizes(format: Format) -> tuple[int, int]:
    """Groups of a page's keys and of its values."""
    assert format.codec is not None
    values = format.v_dim if format.codec.v_axis == "channel" else PAGE
    return PAGE // format.codec.window * format.k_dim, values


def grids(format: Format, grid: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scale and zero of keys and of values, float64, as [n, 64, D] or what broadcasts to it."""
    assert format.codec is not None
    k_groups, v_groups = sizes(format)
    each = 1 if format.codec.symmetric else 2
    parts = grid.double().split([k_groups] * each + [v_groups] * each, dim=1)
    found = []
    for half, dim, window, per_token in (
        (parts[:each], format.k_dim, format.codec.window, False),
        (parts[each:], format.v_dim, PAGE, format.codec.v_axis == "token"),
    ):
        scale, zero = half if each == 2 else (half[0], torch.zeros_like(half[0]))
        if per_token:
            found.append((scale[..., None], zero[..., None]))
        else:
            found.append(tuple(g.unflatten(1, (-1, dim)).repeat_interleave(window, 1) for g in (scale, zero)))
    return found


def group_max(x: torch.Tensor, format: Format, values: bool) -> torch.Tensor:
    """The largest of each number's group, at every number."""
    assert format.codec is not None
    if values and format.codec.v_axis == "token":
        return x.amax(2, keepdim=True)
    window = PAGE if values else format.codec.window
    return x.unflatten(1, (-1, window)).amax(2).repeat_interleave(window, 1)


# -- laws ------------------------------------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=100)
def test_shapes_and_types_are_those_of_a_block(case):
    format, k, v = case
    packed = pack(format, k, v)
    n = k.shape[0]
    assert packed.k.shape == (n, *format.k_shape)
    assert packed.v.shape == (n, *format.v_shape)
    assert packed.k.dtype == packed.v.dtype == format.payload_dtype
    assert packed.grid.dtype == format.grid_dtype
    assert packed.grid.shape == (n, sum(sizes(format)) * (1 if format.codec.symmetric else 2))
    assert all(t.is_contiguous() for t in packed[:3])
    assert packed.nonfinite == sum(int((~x.isfinite()).sum()) for x in (k, v))
    assert packed.grid.isfinite().all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("pages", [0, 2])
def test_grids_fill_what_the_format_says(codec, pages):
    format = Format(codec, torch.bfloat16, 80, 64)
    packed = pack(format, *(torch.randn(pages, PAGE, dim).bfloat16() for dim in (80, 64)))
    assert packed.grid.shape == (pages, format.grid_numbers)
    assert [x.shape for x in unpack(format, *packed[:3])] == [(pages, PAGE, 80), (pages, PAGE, 64)]


@given(cases())
@settings(max_examples=200)
def test_a_round_trip_is_within_half_a_step_of_the_grid_as_kept(case):
    format, k, v = case
    packed = pack(format, k, v)
    back = unpack(format, *packed[:3])
    codec = format.codec
    for values, (x, got, (scale, zero)) in enumerate(zip((k, v), back, grids(format, packed.grid), strict=True)):
        bits = codec.v_bits if values else codec.k_bits
        top = 2 ** (bits - 1) - 1 if codec.symmetric else 2**bits - 1
        finite, x, got = x.isfinite(), x.double(), got.double()
        away = torch.where(finite, x - zero, 0.0)
        beyond = group_max(away.abs(), format, bool(values)) - top * scale  # the grid as kept may end before the group
        half_step = torch.maximum(scale / 2, beyond)
        # rounded: x - zero and the quotient; scale * code; and the sum, whose size is that of what came out
        rounding = 2.01 * ROUNDING * away.abs() + 1.01 * ROUNDING * ((got - zero).abs() + got.abs()) + TINY
        assert ((got - x).abs() <= half_step + rounding)[finite].all()


@given(cases())
@settings(max_examples=100)
def test_what_comes_back_is_finite_and_within_the_grid(case):
    format, k, v = case
    packed = pack(format, k, v)
    for values, (x, got, (scale, zero)) in enumerate(
        zip((k, v), unpack(format, *packed[:3]), grids(format, packed.grid), strict=True)
    ):
        bits = format.codec.v_bits if values else format.codec.k_bits
        top = 2 ** (bits - 1) - 1 if format.codec.symmetric else 2**bits - 1
        assert got.isfinite().all()
        ends = [(zero + code * scale) for code in (-top if format.codec.symmetric else 0, top)]
        for end, infinity in zip(ends, (-math.inf, math.inf), strict=True):
            there = x == infinity
            error = 1.01 * ROUNDING * ((end - zero).abs() + end.abs()) + TINY
            assert ((got - end).abs() <= error)[there].all()
        assert (got == (0 if format.codec.symmetric else zero.expand(got.shape)))[x.isnan()].all()


@given(cases(nonfinite=[0.0]))
@settings(max_examples=100)
def test_packing_again_what_came_back_changes_no_code(case):
    format, k, v = case
    format = Format(
        format.codec, torch.float32, format.k_dim, format.v_dim
    )  # in fewer bits the numbers themselves move
    codec = format.codec
    first = pack(format, k.float(), v.float())
    back = unpack(format, *first[:3])
    again = pack(format, *back)
    places = [
        codes_at(format, packed, values)  # [n, 64, D]
        for values in (False, True)
        for packed in (first, again)
    ]
    for values, (x, got, (scale, zero)) in enumerate(zip((k, v), back, grids(format, first.grid), strict=True)):
        bits = codec.v_bits if values else codec.k_bits
        top = 2 ** (bits - 1) - 1 if codec.symmetric else 2**bits - 1
        # numbers that came back are off by `error`, so the new grid is too, and the quotient is rounded three times
        error = ROUNDING * (top * scale + group_max(got.double().abs(), format, bool(values)))
        reaches_top = group_max((x.double() - zero).abs(), format, bool(values)) >= (top - 0.49) * scale
        surely = (2 * error / scale + 4 * ROUNDING * top < 0.49) & reaches_top & (scale > 2.0**-100)
        before, after = places[2 * values], places[2 * values + 1]
        assert (before == after)[surely.expand(before.shape)].all()


def codes_at(format: Format, packed, values: bool) -> torch.Tensor:
    """Codes as stored [n, 64, D]."""
    bits, dim = (format.codec.v_bits, format.v_dim) if values else (format.codec.k_bits, format.k_dim)
    place = value_place if values else key_place
    where = [place(slot, channel, bits, dim) for slot, channel in itertools.product(range(PAGE), range(dim))]
    byte, bit = torch.tensor(where).T
    stored = (packed.v if values else packed.k)[:, byte].int() >> bit
    return (stored & (2**bits - 1)).view(-1, PAGE, dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_ordinary_numbers_come_back_the_same_twice(codec, dtype):
    format = Format(codec, torch.float32, 64, 64)
    k, v = torch.randn(2, 3, PAGE, 64).to(dtype).float()
    first = pack(format, k, v)
    again = pack(format, *unpack(format, *first[:3]))
    assert torch.equal(first.k, again.k)
    assert torch.equal(first.v, again.v)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_every_bit_is_where_a_plain_decoder_looks(symmetric, bits, dim):
    """Grid, codes, layout and decoding of a whole page against one-number-at-a-time Python."""
    dtype = DTYPES[DIMS.index(dim) % 3]
    codec = Codec("any", bits, bits, symmetric, "channel" if symmetric or dim == 96 else "token", window=16)
    format = Format(codec, dtype, dim, dim)
    k, v = (fill(kind, 1, dim, dtype, 0.01) for kind in ("far from zero", "halves"))
    packed = pack(format, k, v)
    back = unpack(format, *packed[:3])
    per_token = codec.v_axis == "token"
    flat, start = packed.grid[0].tolist(), 0
    for x, stored, got, place, bias, half in (
        (k, packed.k, back[0], key_place, 2 ** (bits - 1), (False, codec.window)),
        (v, packed.v, back[1], value_place, 0, (per_token, PAGE)),
    ):
        groups: dict[int, list[float]] = {}
        for slot, channel in itertools.product(range(PAGE), range(dim)):
            groups.setdefault(plain_group(slot, channel, *half, dim), []).append(x[0, slot, channel].item())
        grid = {number: plain_grid(group, bits, symmetric, dtype) for number, group in groups.items()}
        assert flat[start : start + len(grid)] == [grid[i][0] for i in range(len(grid))]
        if not symmetric:
            assert flat[start + len(grid) : start + 2 * len(grid)] == [grid[i][1] for i in range(len(grid))]
        start += len(grid) * (1 if symmetric else 2)
        numbers, codes, decoded = x[0].tolist(), stored[0].tolist(), got[0].tolist()
        for slot, channel in itertools.product(range(PAGE), range(dim)):
            scale, zero = grid[plain_group(slot, channel, *half, dim)]
            code = plain_code(numbers[slot][channel], scale, zero, bits, symmetric)
            byte, bit = place(slot, channel, bits, dim)
            assert codes[byte] >> bit & (2**bits - 1) == (code + bias * symmetric) % 2**bits
            assert decoded[slot][channel] == fp32(zero + fp32(scale * code))
    assert start == len(flat)


@given(cases())
@settings(max_examples=60)
def test_entries_change_places_with_their_codes_and_grids(case):
    format, k, v = case
    packed = pack(format, k, v)
    order = torch.rand(k.shape[0], PAGE).argsort(dim=1)
    if format.codec.window != PAGE:
        with pytest.raises(ValueError, match="windows"):
            reorder(format, *packed[:3], order)
        return
    moved = unpack(format, *reorder(format, *packed[:3], order))
    for found, before in zip(moved, unpack(format, *packed[:3]), strict=True):
        assert torch.equal(found, before.gather(1, order[..., None].expand_as(before)))


# -- single cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_constant_channels_come_back_exactly_or_to_one_rounding(codec):
    format = Format(codec, torch.float32, 16, 16)
    x = torch.randn(16).expand(1, PAGE, 16)
    k, _ = unpack(format, *pack(format, x, x)[:3])
    if codec.symmetric:
        assert ((k - x).abs() <= 2 * ROUNDING * x.abs()).all()
    else:
        assert torch.equal(k, x)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_an_outlier_channel_costs_the_others_nothing(codec):
    format = Format(codec, torch.float32, 16, 16)
    k, v = torch.randn(2, 1, PAGE, 16)
    loud = k.clone()
    loud[..., 3] *= 1000
    quiet_k, loud_k = (unpack(format, *pack(format, x, v)[:3])[0] for x in (k, loud))
    others = [c for c in range(16) if c != 3]
    assert torch.equal(quiet_k[..., others], loud_k[..., others])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_pages_of_zeros_and_of_nothing_finite_come_back_as_zeros(codec):
    format = Format(codec, torch.float16, 16, 16)
    for number, count in ((0.0, 0), (-0.0, 0), (math.nan, 2 * PAGE * 16)):
        x = torch.full((1, PAGE, 16), number, dtype=torch.float16)
        packed = pack(format, x, x)
        assert packed.nonfinite == count
        scales = 32 if codec.symmetric else 16 * PAGE // codec.window
        assert (packed.grid[:, :scales] == 1).all()
        assert all(not part.any() for part in unpack(format, *packed[:3]))


def test_a_zero_of_either_sign_is_kept_as_positive():
    format = Format(CODECS["int4"], torch.float32, 16, 16)
    x = torch.where(torch.rand(1, PAGE, 16) < 0.5, -0.0, 0.0)
    assert not pack(format, x, x).grid.signbit().any()


@pytest.mark.parametrize(
    ("k", "v", "problem"),
    [
        (torch.zeros(1, 63, 16), torch.zeros(1, 64, 16), "no pages"),
        (torch.zeros(1, 64, 32), torch.zeros(1, 64, 16), "no pages"),
        (torch.zeros(1, 64, 16), torch.zeros(2, 64, 16), "no pages"),
        (torch.zeros(1, 64, 16), torch.zeros(1, 64, 16).half(), "float16"),
    ],
)
def test_what_is_no_page_is_refused(k, v, problem):
    with pytest.raises(ValueError, match=problem):
        pack(Format(CODECS["int8"], torch.float32, 16, 16), k, v)


def test_exact_pages_have_no_codes():
    x = torch.zeros(1, PAGE, 16)
    with pytest.raises(ValueError, match="exact"):
        pack(Format(None, torch.float32, 16, 16), x, x)
