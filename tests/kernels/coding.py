"""Numbers to code, and a codec written to be read: one number at a time, in Python's floats rounded to fp32."""

from __future__ import annotations

import math
import struct

import torch
from hypothesis import strategies as st

from kvstrata.kernels.codec import Codec
from kvstrata.kernels.pages import PAGE, Format

DIMS = [16, 64, 80, 96, 128, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fp32(x: float) -> float:
    """Exactly what fp32 arithmetic gives: one rounding from double after + - * / changes nothing."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def kept(x: float, dtype: torch.dtype) -> float:
    return torch.tensor(x, dtype=torch.float32).to(dtype).item()


def plain_grid(group: list[float], bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[float, float]:
    finite = [x for x in group if math.isfinite(x)]
    if symmetric:
        scale = fp32(max(map(abs, finite), default=0.0) / (2 ** (bits - 1) - 1))
        return scale or 1.0, 0.0
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = kept(fp32(fp32(high - low) / (2**bits - 1)), dtype)
    return (scale if 0 < scale < math.inf else 1.0), kept(low, dtype)


def plain_code(x: float, scale: float, zero: float, bits: int, symmetric: bool) -> int:
    top = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    bottom = -top if symmetric else 0
    if math.isnan(x):
        return 0
    steps = fp32(fp32(x - zero) / scale)
    if math.isinf(steps):
        return top if steps > 0 else bottom
    return min(max(round(steps), bottom), top)  # Python rounds half to even


def key_place(slot: int, channel: int, bits: int, dim: int) -> tuple[int, int]:
    """Byte and lowest bit of a key's code in [D/4][64][4], whose first axis is stacked."""
    tile, per_byte = channel // 4, 8 // bits
    return (tile // per_byte * PAGE + slot) * 4 + channel % 4, tile % per_byte * bits


def value_place(slot: int, channel: int, bits: int, dim: int) -> tuple[int, int]:
    """Byte and lowest bit of a value's code in [16][Dv/16][16][4], whose first axis is stacked."""
    tile, per_byte = slot // 4, 8 // bits
    row = (tile // per_byte * (dim // 16) + channel // 16) * 16 + channel % 16
    return row * 4 + slot % 4, tile % per_byte * bits


def plain_group(slot: int, channel: int, per_token: bool, window: int, dim: int) -> int:
    return slot if per_token else slot // window * dim + channel


# -- cases -----------------------------------------------------------------------------------------------------------

FILLS = {
    "normal": lambda shape: torch.randn(shape),
    "constant channels": lambda shape: torch.randn(shape[-1]).expand(shape),
    "constant tokens": lambda shape: torch.randn(*shape[:2], 1).expand(shape),
    "outlier channels": lambda shape: torch.randn(shape) * torch.where(torch.rand(shape[-1]) < 0.1, 1e3, 1.0),
    "far from zero": lambda shape: torch.randn(shape) + 100 * torch.randn(shape[-1]),
    "all magnitudes": lambda shape: torch.randn(shape) * 2.0 ** torch.randint(-20, 15, shape),
    "denormals": lambda shape: torch.randint(-300, 300, shape) * 2.0**-149,
    "denormals of half": lambda shape: torch.randint(-300, 300, shape) * 2.0**-24,
    "huge": lambda shape: torch.randn(shape).clamp(-1, 1) * torch.finfo(torch.float32).max,
    "zero": lambda shape: torch.zeros(shape) * torch.randn(shape).sign(),  # of both signs
    "halves": lambda shape: torch.randint(-8, 8, shape) / 2,  # ties
}
NONFINITE = torch.tensor([math.nan, math.inf, -math.inf])


def fill(kind: str, pages: int, dim: int, dtype: torch.dtype, nonfinite: float) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    x = FILLS[kind]((pages, PAGE, dim)).clamp(-largest, largest).to(dtype)
    x = torch.where(torch.rand(x.shape) < nonfinite, NONFINITE[torch.randint(3, x.shape)].to(dtype), x)
    if nonfinite:
        x[0, :, 0] = NONFINITE[torch.randint(3, (PAGE,))]  # a channel and a token without a number
        x[-1, 5] = NONFINITE[torch.randint(3, (dim,))]
    return x


BITS = st.sampled_from([8, 4, 2])
codecs = st.builds(
    Codec,
    name=st.just("any"),
    k_bits=BITS,
    v_bits=BITS,
    symmetric=st.booleans(),
    v_axis=st.sampled_from(["channel", "token"]),
    window=st.sampled_from([8, 16, 32, 64]),
)
formats = st.builds(Format, codecs, st.sampled_from(DTYPES), st.sampled_from(DIMS), st.sampled_from(DIMS))


@st.composite
def cases(draw, nonfinite=(0.0, 0.05)):
    """A format and pages k and v for it, of which one of the shares `nonfinite` is infinite or NaN."""
    format = draw(formats)
    torch.manual_seed(draw(st.integers(0, 2**32)))
    pages, share = draw(st.integers(1, 3)), draw(st.sampled_from(nonfinite))
    kinds = [draw(st.sampled_from(sorted(FILLS))) for _ in range(2)]
    k, v = (
        fill(kind, pages, dim, format.dtype, share)
        for kind, dim in zip(kinds, (format.k_dim, format.v_dim), strict=True)
    )
    return format, k, v
