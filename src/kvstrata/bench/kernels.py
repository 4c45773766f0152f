"""Attention kernels on random pages: what to call, what a call must read, and its error against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.kernels import attention, dispatch
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.codec import CODECS
from kvstrata.kernels.codec.ref import pack
from kvstrata.kernels.dense import read
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.pages import PAGE, Block, Format, Pages

EXACT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = (*EXACT, *CODECS)
PAGED = ("native", "triton")
DENSE = ("sdpa", "reference")  # sdpa as transformers calls it; both on tensors without pages
NEWEST = Reduction(rows=1)
OWN = 16  # entries of the exact tier that stands before a coded one
DISTINCT = 64  # pages of random numbers; more pages repeat them

RAGGED, EVEN = (1000, 64, 130, 1, 7, 200), (1000,)  # entries of the segments that a kernel is checked on
OF_LARGEST = {torch.float32: 5e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the output rounds
CODED = {8: 1e-3, 4: 2e-3, 2: 2e-3}  # by bits of a key: queries and probabilities are coded too
MASS, MASS_CODED = 1e-5, 4e-3  # attention mass is always fp32
DENSE_ROUNDS = 2  # torch and Triton round probabilities to 16 bit as well

Call = Callable[[], tuple[Tensor, Tensor | None]]  # -> out [B, H*G, 1, D], mass [B, H, N]


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows, key-value heads, query heads for each of them, head_dim."""

    rows: int
    heads: int
    group: int
    dim: int

    @property
    def segments(self) -> int:
        """Rows times key-value heads."""
        return self.rows * self.heads

    def __str__(self) -> str:
        return f"B{self.rows} H{self.heads} G{self.group} D{self.dim}"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel on one format: `format` names an exact dtype or a codec, whose cache is in `dtype`."""

    kernel: str
    format: str
    mass: bool = False
    dtype: torch.dtype = torch.bfloat16

    def of(self, dim: int) -> Format:
        """The format of its pages."""
        dtype = EXACT.get(self.format, self.dtype)
        return Format(CODECS.get(self.format), dtype, dim, dim)

    @property
    def allowed(self) -> float:
        """The error that rounding explains, of the largest number."""
        codec, rounding = CODECS.get(self.format), OF_LARGEST[EXACT.get(self.format, self.dtype)]
        if codec is not None:
            return max(rounding, CODED[codec.k_bits])
        return rounding * (DENSE_ROUNDS if self.kernel in (*DENSE, "triton") else 1)

    @property
    def mass_allowed(self) -> float:
        """The same for attention mass."""
        return MASS if self.format in EXACT else MASS_CODED


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest differences from float64, of the largest number, and what rounding explains; mass where there is any."""

    out: float
    out_allowed: float
    mass: float | None = None
    mass_allowed: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the kernel computes what it should."""
        mass_is_right = self.mass is None or self.mass_allowed is None or self.mass <= self.mass_allowed
        return self.out <= self.out_allowed and mass_is_right


def variants(formats: Sequence[str], device: torch.device) -> list[Variant]:
    """Kernels that serve on a device, with attention mass where they can give it."""
    found: list[Variant] = []
    for name in formats:
        exact = name in EXACT
        wanted = Variant("triton" if device.type == "cuda" else "native", name)
        if _serves(wanted, device):
            found += [wanted, Variant(wanted.kernel, name, mass=True)]
        if exact:
            found += [Variant("reference", name), Variant("reference", name, mass=True), Variant("sdpa", name)]
    return found


def _serves(variant: Variant, device: torch.device) -> bool:
    if variant.kernel == "triton":
        return dispatch.has_triton()
    return dispatch.native_serves(variant.of(64), device)


# -- pages --------------------------------------------------------------------------------------------------------


def random_tiers(format: Format, lengths: Sequence[int], device: torch.device, native: bool) -> list[Pages]:
    """Pages with random numbers for segments of these lengths; before coded pages an exact tier of a few entries."""
    coded = _random_pages(format, lengths, device, native)
    if format.codec is None:
        return [coded]
    own = Format(None, format.dtype, format.k_dim, format.v_dim)
    return [_random_pages(own, [OWN] * len(lengths), device, native), coded]


def _random_pages(format: Format, lengths: Sequence[int], device: torch.device, native: bool) -> Pages:
    """One block, the pages of a segment one after the other."""
    counts = [max(1, -(-n // PAGE)) for n in lengths]
    total = sum(counts)
    few = [torch.randn(min(total, DISTINCT), PAGE, d, device=device) for d in (format.k_dim, format.v_dim)]
    k, v = (x.to(format.dtype) for x in few)
    grid = k.new_empty(len(k), 0)
    if format.codec is not None:
        k, v, grid, _ = pack(format, k, v)
    block = Block(0, *(_repeated(x, total) for x in (k, v, grid)))
    first = torch.tensor([sum(counts[:i]) for i in range(len(counts))])
    table = (first[:, None] + torch.arange(max(counts))).clamp_max(total - 1).to(device, torch.int32)
    stored = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = Pages(format, [block], table, stored)
    if not native:
        return pages
    arena = dispatch.native_arena("native", format)
    arena.add(*block)
    return dispatch.with_twin("native", arena, pages)


def _repeated(pages: Tensor, total: int) -> Tensor:
    out = pages.new_empty(total, *pages.shape[1:])
    for start in range(0, total, len(pages)):
        out[start : start + len(pages)] = pages[: total - start]
    return out


# -- calls --------------------------------------------------------------------------------------------------------


def make_call(variant: Variant, shape: Shape, q: Tensor, tiers: list[Pages]) -> Call:
    """One decode step of q [B, H*G, 1, D] over these tiers; dense kernels read their entries out first, here."""
    softmax, reduction = Softmax(shape.dim**-0.5), NEWEST if variant.mass else None
    widths = [int(tier.lengths.max()) for tier in tiers]
    if variant.kernel == "native":
        return lambda: attention.attend_pages(q, tiers, softmax=softmax, reduction=reduction, widths=widths)
    if variant.kernel == "triton":
        return _triton_call(q, tiers, softmax, reduction, widths)
    k, v = (x.unflatten(0, (shape.rows, shape.heads)).contiguous() for x in read(tiers[0]))
    if variant.kernel == "sdpa":
        grouped = shape.group > 1
        return lambda: (scaled_dot_product_attention(q, k, v, scale=softmax.scale, enable_gqa=grouped), None)

    def reference() -> tuple[Tensor, Tensor | None]:
        done = attention.attend(q, k, v, softmax=softmax, reduction=reduction, kernels="reference")
        return done.out, done.mass

    return reference


def _triton_call(
    q: Tensor, tiers: list[Pages], softmax: Softmax, reduction: Reduction | None, widths: list[int]
) -> Call:
    from kvstrata.kernels.attention import triton

    at = [triton.addresses(tier) for tier in tiers]

    def call() -> tuple[Tensor, Tensor | None]:
        done = triton.attend_pages(q, tiers, softmax=softmax, reduction=reduction, widths=widths, at=at)
        return done[0], done[-1]

    return call


def errors(variant: Variant, shape: Shape, device: torch.device) -> Errors:
    """Compare with float64 on the values as stored."""
    lengths = (RAGGED if variant.kernel in PAGED else EVEN) * shape.segments
    tiers = random_tiers(variant.of(shape.dim), lengths[: shape.segments], device, variant.kernel == "native")
    q = random_queries(variant, shape, device)
    out, mass = make_call(variant, shape, q, tiers)()
    true_out, true_mass = _truth(q, tiers, shape)
    found = _of_largest(out, true_out)
    if mass is None:
        return Errors(found, variant.allowed)
    return Errors(found, variant.allowed, _of_largest(mass, true_mass), variant.mass_allowed)


def random_queries(variant: Variant, shape: Shape, device: torch.device) -> Tensor:
    """q [B, H*G, 1, D]."""
    q = torch.randn(shape.rows, shape.heads * shape.group, 1, shape.dim, device=device)
    return q.to(variant.of(shape.dim).dtype)


def _truth(q: Tensor, tiers: list[Pages], shape: Shape) -> tuple[Tensor, Tensor]:
    """Out [B, H*G, 1, D] and mass [B, H, N] in float64."""
    entries = [read(tier) for tier in tiers]
    k, v = (torch.cat([pair[i].double() for pair in entries], dim=1) for i in (0, 1))  # [S, N, D]
    valid = torch.cat(
        [
            torch.arange(pair[0].shape[1], device=q.device) < tier.lengths[:, None]
            for pair, tier in zip(entries, tiers, strict=True)
        ],
        dim=1,
    )
    folded = q.double().reshape(shape.segments, shape.group, shape.dim)
    scores = (folded @ k.transpose(1, 2) * shape.dim**-0.5).masked_fill(~valid[:, None], -math.inf)
    p = scores.softmax(dim=-1)
    return (p @ v).reshape(q.shape), p.mean(dim=1).unflatten(0, (shape.rows, shape.heads))


def _of_largest(found: Tensor, truth: Tensor) -> float:
    difference = (found.double() - truth).abs().max() / truth.abs().max()
    return float(difference) if bool(difference.isfinite()) else math.inf
