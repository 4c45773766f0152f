"""Attention over pages on a GPU, in Triton: every segment's pages are split over programs, then merged by lse.

The queries' own entries are the newest of tiers[0]: `append` puts them there, then `attend_pages` attends. Nothing
here waits for the device or reads from it; how many programs start follows from the columns of the page tables.
"""

# a launch takes tensors and numbers for what the kernel sees as pointers and constants, and Triton's own options
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.attention.triton_page import Layout
from kvstrata.kernels.attention.triton_pages import (
    COLUMNS,
    Found,
    Partial,
    append_entries,
    attend_split,
    merge_splits,
    reduce_scores,
)
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.mass.triton import tl, triton
from kvstrata.kernels.pages import PAGE, Format, Pages

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LEAST_ROWS, MOST_ROWS = 16, 64  # of a block of queries: what tensor cores take, and what registers hold
LEAST_PAGES = 4  # of a split: merging fewer costs more than they take
PROGRAMS = 4  # per multiprocessor, so that segments of unequal lengths even out


@dataclass(frozen=True, slots=True)
class Tuning:
    """How work is cut: pages of a split, None for so many that the device is full; Triton's warps and stages."""

    pages: int | None = None
    warps: int | None = None  # None: 8 for many rows, else 4
    stages: int = 3  # of exact pages, which go through shared memory
    coded_stages: int = 1  # their words go through registers: staged, each of them would be copied alone
    coded_registers: int | None = 168  # of a thread, NVIDIA only: three programs of 4 warps then run at a time


TUNING = Tuning()


@dataclass(frozen=True, slots=True, eq=False)
class Addresses:
    """Where the pages of a table lie, int64 [S, P] on its device; true until the table or its blocks change."""

    k: Tensor
    v: Tensor
    grid: Tensor | None


def addresses(pages: Pages) -> Addresses:
    """Look the pages of a table up in their blocks of memory, without waiting for the device."""
    blocks, table = sorted(pages.blocks, key=lambda block: block.first), pages.table.contiguous()
    coded = pages.format.codec is not None
    if not blocks:
        nowhere = torch.zeros_like(table, dtype=torch.int64)
        return Addresses(nowhere, nowhere, nowhere if coded else None)
    firsts = _numbers([block.first for block in blocks], torch.int32, table.device)
    block = (torch.searchsorted(firsts, table, right=True) - 1).clamp_(min=0)  # columns of no meaning get any
    page = table.long() - firsts[block]

    def where(parts: list[Tensor]) -> Tensor:
        starts = _numbers([part.data_ptr() for part in parts], torch.int64, table.device)
        return starts[block] + page * (parts[0].nbytes // parts[0].shape[0])

    grid = where([block.grid for block in blocks]) if coded else None
    return Addresses(where([block.k for block in blocks]), where([block.v for block in blocks]), grid)


def append(
    pages: Pages, k: Tensor, v: Tensor, *, tokens: Sequence[int] | None = None, at: Addresses | None = None
) -> None:
    """Write k [B, H, Q, D] and v [B, H, Q, Dv] after the entries of an exact tier, and lengthen it.

    Of row b the last tokens[b] are written, else all. Entries that the table has no column for are lost.
    """
    _, heads, queries, _ = k.shape
    if pages.format.codec is not None:
        raise ValueError("entries are appended to an exact tier")
    _check(k, pages, pages.format.k_dim, heads)
    _check(v, pages, pages.format.v_dim, heads)
    at, layout = at or addresses(pages), _layout(pages.format, 1)
    new = _per_segment(tokens, k, heads)
    segments, columns = pages.table.shape
    k, v = k.reshape(segments, queries, -1), v.reshape(segments, queries, -1)
    grid = (segments, triton.cdiv(queries, layout.rows))
    with torch.cuda.device_of(k):
        append_entries[grid](k, v, Found(at.k, at.v, None, None), pages.lengths, new, queries, columns, layout=layout)
    pages.lengths.add_(queries if new is None else new)


def attend_pages(
    q: Tensor,
    tiers: Sequence[Pages],
    *,
    softmax: Softmax,
    tokens: Sequence[int] | None = None,
    reduction: Reduction | None = None,
    widths: Sequence[int] | None = None,
    at: Sequence[Addresses] | None = None,
    tuning: Tuning = TUNING,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attend with q [B, H*G, Q, D] to all tiers, each of S = B*H segments: out [B, H*G, Q, Dv], lse fp32 [B, H*G, Q].

    tiers[0] is exact and ends with the queries' own entries. Of row b the last tokens[b] queries are real, else all;
    of others out is 0 and lse -inf, as it is where nothing is stored. With a reduction also mass fp32 [B, H, N], 0
    where there is no entry: slot t of tier i is at widths[0] + .. + widths[i-1] + t. A width is at most, and if not
    given, all that the columns of a tier's table hold. `at` saves looking addresses up.
    """
    heads = _heads(q, tiers)
    columns = [tier.table.shape[1] for tier in tiers]
    widths = widths or [PAGE * n for n in columns]
    if any(width > PAGE * n for width, n in zip(widths, columns, strict=True)):
        raise ValueError(f"widths {widths} of tiers whose tables hold {[PAGE * n for n in columns]}")
    counted, every = reduction.last(q.shape[2]) if reduction else 0, q.shape[1] // heads * q.shape[2]
    cuts = [tuning.pages or _pages_of_a_split(tier, every) for tier in tiers]
    firsts = [0, *accumulate(triton.cdiv(n, cut) for n, cut in zip(columns, cuts, strict=True))]
    offsets = [0, *accumulate(widths)]
    made = _partial(q, heads, tiers[0].format.v_dim, firsts[-1], counted, offsets[-1])
    call = _Call(q, q.reshape(q.shape[0] * heads, every, -1), heads, counted, _per_segment(tokens, q, heads), made)
    with torch.cuda.device_of(q):
        for i, tier in enumerate(tiers):
            found = at[i] if at else addresses(tier)
            call.attend(tier, found, cuts[i], firsts[i], widths[i], offsets[i], softmax, tuning)
        out, lse = call.merge(softmax.sinks)
        return out, lse, call.reduce(lse, tiers, reduction) if reduction else None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of `attend_pages`: what its kernels share and hand on to each other."""

    q: Tensor
    rows: Tensor  # q as [S, R, D]
    heads: int
    counted: int
    real: Tensor | None
    made: Partial

    def attend(
        self,
        tier: Pages,
        at: Addresses,
        pages: int,
        first: int,
        width: int,
        offset: int,
        softmax: Softmax,
        tuning: Tuning,
    ) -> None:
        (segments, columns), (_, splits, every) = tier.table.shape, self.made.lse.shape
        layout = _layout(tier.format, every)
        grid = (segments, triton.cdiv(columns, pages), triton.cdiv(every, layout.rows))
        if columns == 0:
            return
        attend_split[grid](
            self.rows,
            Found(at.k, at.v, at.grid, None if tier.fills is None else tier.fills.contiguous()),
            tier.lengths,
            self.real,
            self.made,
            every,
            self.q.shape[2],
            self.counted,
            columns,
            pages,
            first,
            splits,
            width,
            offset,
            0 if self.made.scores is None else self.made.scores.shape[3],
            softmax.scale,
            softmax.softcap,
            layout=layout,
            NEWEST=first == 0,
            **_options(layout, tuning),
        )

    def merge(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        segments, splits, every, v_dim = self.made.out.shape
        out = self.q.new_empty(*self.q.shape[:3], v_dim)
        lse = self.q.new_empty(self.q.shape[:3], dtype=torch.float32)
        sinks = None if sinks is None else sinks.float().contiguous()
        numbers, block = (self.heads, every, self.q.shape[2], splits), triton.next_power_of_2(v_dim)
        merge_splits[(every, segments)](self.made, sinks, self.real, out, lse, *numbers, V_DIM=v_dim, V_BLOCK=block)
        return out, lse

    def reduce(self, lse: Tensor, tiers: Sequence[Pages], reduction: Reduction) -> Tensor:
        scores = self.made.scores
        assert scores is not None
        segments, group, counted, width = scores.shape
        mass = lse.new_empty(len(self.q), self.heads, width)
        entries = (
            torch.stack([_entries(tier) for tier in tiers]).sum(0, dtype=torch.int32) if reduction.counts else None
        )
        numbers, block = (group, self.q.shape[2], counted, width), triton.next_power_of_2(group)
        grid = (segments, triton.cdiv(width, COLUMNS.value))
        reduce_scores[grid](scores, lse, self.real, entries, mass, *numbers, reduction.decay, G_BLOCK=block)
        return mass


def _partial(q: Tensor, heads: int, v_dim: int, splits: int, counted: int, width: int) -> Partial:
    segments, group, queries = q.shape[0] * heads, q.shape[1] // heads, q.shape[2]
    out = q.new_empty(segments, splits, group * queries, v_dim, dtype=torch.float32)
    scores = q.new_empty(segments, group, counted, width, dtype=torch.float32) if counted else None
    return Partial(out, q.new_empty(out.shape[:3], dtype=torch.float32), scores)


def _heads(q: Tensor, tiers: Sequence[Pages]) -> int:
    """Key-value heads, of queries and tiers that go together."""
    newest, segments = tiers[0].format, len(tiers[0].table)
    if newest.codec is not None or tiers[0].table.shape[1] == 0:
        raise ValueError("the first tier is exact and holds the queries' own entries")
    if segments == 0 or segments % q.shape[0] or q.shape[1] % (segments // q.shape[0]):
        raise ValueError(f"queries {tuple(q.shape)} do not go with {segments} segments")
    for tier in tiers:
        _check(q, tier, newest.k_dim, segments // q.shape[0])
        if (tier.format.k_dim, tier.format.v_dim) != (newest.k_dim, newest.v_dim):
            raise ValueError(f"tiers of other heads: {tier.format} beside {newest}")
        _layout(tier.format, 1)  # refuses what no kernel serves, before any runs
    return segments // q.shape[0]


def _check(x: Tensor, pages: Pages, dim: int, heads: int) -> None:
    """Refuse x [B, heads or more, Q, dim] that does not go with the pages."""
    if x.dtype != pages.format.dtype or x.shape[-1] != dim:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} beside pages of {pages.format.dtype} [{dim}]")
    if not len(pages.table) == len(pages.lengths) == x.shape[0] * heads:
        raise ValueError(f"{len(pages.table)} segments are not {x.shape[0]} rows of {heads} heads")
    if not pages.lengths.is_contiguous():
        raise ValueError("lengths of pages are contiguous")


def _entries(tier: Pages) -> Tensor:
    """Of every segment, int32 [S]."""
    return tier.lengths if tier.fills is None else tier.fills.sum(1, dtype=torch.int32)


@cache
def _layout(format: Format, every: int) -> Layout:
    """Of `every` rows of a segment; in blocks, if they are too many."""
    codec = format.codec
    if format.dtype not in DTYPES:
        raise ValueError(f"no Triton kernel for {format.dtype}")
    if codec and (codec.symmetric != (codec.v_axis == "channel") or (codec.symmetric and codec.window != PAGE)):
        raise ValueError(f"no Triton kernel for codec {codec.name!r}: symmetric codes have one grid a channel and page")
    if codec and (format.k_dim % 16 or format.v_dim % 16):
        raise ValueError(f"no coded pages of dimensions {format.k_dim} and {format.v_dim}, which 16 does not divide")
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(every)))
    return Layout(
        rows=rows,
        k_dim=format.k_dim,
        k_block=max(16, triton.next_power_of_2(format.k_dim)),
        v_dim=format.v_dim,
        v_block=max(16, triton.next_power_of_2(format.v_dim)),
        dtype=DTYPES[format.dtype],
        compute=tl.float32 if format.dtype == torch.float32 else tl.float16,
        k_bits=codec.k_bits if codec else 0,
        v_bits=codec.v_bits if codec else 0,
        symmetric=codec.symmetric if codec else False,
        window=codec.window if codec else PAGE,
    )


def _options(layout: Layout, tuning: Tuning) -> dict[str, int]:
    """Triton's."""
    coded, narrow = layout.k_bits > 0, max(layout.k_block, layout.v_block) <= 128 and layout.rows == LEAST_ROWS
    options = {
        "num_warps": tuning.warps or (8 if layout.rows == MOST_ROWS else 4),
        "num_stages": tuning.coded_stages if coded else tuning.stages,
    }
    if coded and narrow and layout.compute == tl.float16 and tuning.coded_registers:
        options["maxnreg"] = tuning.coded_registers
    return options


def _pages_of_a_split(tier: Pages, every: int) -> int:
    """So many that PROGRAMS run on each multiprocessor, if there are enough pages."""
    device = tier.table.device
    wanted = PROGRAMS * (torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1)
    programs = tier.table.numel() * triton.cdiv(every, MOST_ROWS)  # if each took one page
    return max(LEAST_PAGES, triton.cdiv(programs, wanted))


def _per_segment(tokens: Sequence[int] | None, x: Tensor, heads: int) -> Tensor | None:
    """How many of x [B, ., Q, D] are real, of each segment: int32 [S]."""
    if tokens is None:
        return None
    if len(tokens) != x.shape[0] or not all(0 <= n <= x.shape[2] for n in tokens):
        raise ValueError(f"tokens {list(tokens)} of {x.shape[0]} rows of {x.shape[2]}")
    return _numbers([n for n in tokens for _ in range(heads)], torch.int32, x.device)


def _numbers(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host numbers on a device, without waiting for it."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)
