"""Triton kernels of attention over pages: each program takes some pages of a segment, then one merges by lse.

S = B*H segments, R = G*Q rows of a segment (row g*Q + i is query i of head g), P columns of a page table. Scores and
logarithms in here are to the base 2. A page is reached through its address, as memory comes in blocks; what grows with
S is int64. Integers are plain arguments that are not specialised: each value 1 and each multiple of 16 would compile a
kernel anew, and within tuples they always are.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvstrata.kernels.attention.triton_page import (
    SLOTS,
    load_key_grid,
    load_keys,
    load_value_grid,
    load_values,
    scores_of,
    sum_of,
)
from kvstrata.kernels.mass.triton import LN2, LOG2E, capped, tl, triton

SPLITS = tl.constexpr(16)  # merged at a time
COLUMNS = tl.constexpr(256)  # of mass per program
INTEGERS = ["every", "queries", "counted", "columns", "pages", "first", "splits", "width", "offset", "total"]


class Found(NamedTuple):
    """Addresses of pages, int64 [S, P], grid None where pages are exact; fills int32 [S, P] where they may be short."""

    k: Tensor
    v: Tensor
    grid: Tensor | None
    fills: Tensor | None


class Partial(NamedTuple):
    """What splits leave, fp32: out [S, splits, R, Dv], lse [S, splits, R], scores [S, G, counted, N] or None."""

    out: Tensor
    lse: Tensor
    scores: Tensor | None


@triton.jit(do_not_specialize=["lengths", *INTEGERS])
def attend_split(
    q,  # [S, R, D]
    found: Found,
    lengths,  # int32 [S]
    real,  # int32 [S], how many of the newest queries are real; None: all
    partial: Partial,
    every,  # R
    queries,  # Q
    counted,  # of how many of the newest queries scores are kept
    columns,  # P
    pages,  # of a split
    first,  # this tier's splits are numbered from here,
    splits,  # of so many
    width,  # scores of slots 0 .. width-1
    offset,  # lie from here
    total,  # of so many
    scale,
    softcap,  # or None
    layout: tl.constexpr,
    NEWEST: tl.constexpr,  # whether the queries' own entries are the newest of this tier
):
    """Attend to one split of one segment's pages, for one block of rows: program (segment, split, block)."""
    segment, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * layout.rows + tl.arange(0, layout.rows)
    age, there = ages(row, segment, real, every, queries)
    x = load_rows(q + segment * every * layout.k_dim, row, there, layout.k_dim, layout.k_block)
    length = tl.load(lengths + segment)
    hidden = tl.where(NEWEST, age, 0)  # of the newest entries
    begin = split * pages
    end = tl.minimum(begin + pages, tl.cdiv(length, SLOTS))
    line = (segment * (every // queries) + row // queries) * counted + age
    line = tl.where((row < every) & (age < counted), line * total + offset, -1)
    if partial.scores is not None:
        for page in range(tl.maximum(begin, end), begin + pages):
            keep_scores(partial.scores, float("-inf"), line, page, width)
    scores, column = partial.scores, segment * columns
    walked = walk(x, found, column, length, begin, end, hidden, scores, line, width, scale, softcap, layout)
    at = (segment * splits + first + split) * every + row
    keep_partial(partial, walked, at, there, layout.v_dim)


@triton.jit
def walk(x, found, column, length, begin, end, hidden, scores, line, width, scale, softcap, layout: tl.constexpr):
    """Attend with x [rows, D] to pages begin .. end-1: out [rows, Dv] not yet divided by the weight [rows], at high."""
    ROWS: tl.constexpr = layout.rows
    V_BLOCK: tl.constexpr = layout.v_block
    high = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS, SLOTS], tl.float32)  # summed over slots in the end: sums across threads are dear
    middle = tl.zeros([ROWS, SLOTS], tl.float32)  # of what centred codes leave out, likewise
    out = tl.zeros([ROWS, V_BLOCK], tl.float32)
    for page in range(begin, end):
        left = length - page * SLOTS
        n = entries(found, column + page, left)
        k, v, k_step, k_middle, v_step, v_middle = load_page(found, column + page, n, layout)
        s = capped(scores_of(x, k, k_step, k_middle, scale, layout), softcap)
        seen = tl.minimum(n, left - hidden)
        s = tl.where(tl.arange(0, SLOTS)[None, :] < seen[:, None], s, float("-inf"))
        if scores is not None:
            keep_scores(scores, s, line, page, width)
        new = tl.maximum(high, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)  # a row may have seen nothing yet
        p, shrink = tl.exp2(s - base[:, None]), tl.exp2(high - base)[:, None]
        out = out * shrink + sum_of(p, v, v_step, layout)
        weight = weight * shrink + p
        if layout.v_bits and not layout.symmetric:
            middle = middle * shrink + p * v_middle[None, :]
        high = new
    return out + tl.sum(middle, axis=1)[:, None], high, tl.sum(weight, axis=1)


@triton.jit
def ages(row, segment, real, every, queries):
    """How much newer than each row's query the newest one is, and whether the row is a query that is real."""
    age = queries - 1 - row % queries
    there = row < every
    if real is not None:
        there = there & (age < tl.load(real + segment))
    return age, there


@triton.jit
def load_rows(x, row, there, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of x [., dim], 0 where not there."""
    d = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * DIM + d[None, :]
    return tl.load(x + at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def entries(found, at, left):
    """How many entries a page has, with `left` slots of the segment from its first on."""
    n = tl.minimum(left, SLOTS)
    if found.fills is not None:
        n = tl.minimum(n, tl.load(found.fills + at))
    return n


@triton.jit
def load_page(found, at, n, layout: tl.constexpr):
    """All of a page at once, before any of it is used: numbers or words, and grids."""
    grid = tl.load(found.grid + at) if layout.k_bits else 0
    k, v = load_keys(tl.load(found.k + at), layout), load_values(tl.load(found.v + at), n, layout)
    k_step, k_middle = load_key_grid(grid, layout)
    v_step, v_middle = load_value_grid(grid, n, layout)
    return k, v, k_step, k_middle, v_step, v_middle


@triton.jit
def keep_scores(scores, s, line, page, width):
    """Store scores s [rows, 64] of a page in each row's line; in none where that is negative."""
    slot = tl.arange(0, SLOTS) + page * SLOTS
    there = (line >= 0)[:, None] & (slot < width)[None, :]
    tl.store(scores + line[:, None] + slot[None, :], s, mask=there)


@triton.jit
def keep_partial(partial, walked, at, there, DIM: tl.constexpr):
    """Store what rows got from a split as if it were all; only the lse, -inf, of those that saw none of it."""
    out, high, weight = walked
    d = tl.arange(0, out.shape[1])
    some = weight != 0.0  # true of NaN, which passes through
    weight = tl.where(some, weight, 1.0)
    tl.store(partial.lse + at, tl.where(some, high + tl.log2(weight), float("-inf")), mask=there)
    there = (there & some)[:, None] & (d < DIM)[None, :]
    tl.store(partial.out + at[:, None] * DIM + d[None, :], out / weight[:, None], mask=there)


@triton.jit(do_not_specialize=["heads", *INTEGERS])
def merge_splits(
    partial: Partial,
    sinks,  # fp32 [H*G] or None
    real,
    out,  # [S, R, Dv]
    lse,  # fp32 [S, R], natural
    heads,  # H
    every,
    queries,
    splits,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """Merge the splits of one row: program (row, segment)."""
    row, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, there = ages(row, segment, real, every, queries)
    d, part = tl.arange(0, V_BLOCK), tl.arange(0, SPLITS)
    high, weight = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    if sinks is not None:
        high = tl.load(sinks + segment % heads * (every // queries) + row // queries) * LOG2E
        weight += 1.0
    merged = tl.zeros([V_BLOCK], tl.float32)
    for first in range(0, tl.where(there, splits, 0), SPLITS):
        at = (segment * splits + first + part) * every + row
        e = tl.load(partial.lse + at, mask=first + part < splits, other=float("-inf"))
        some = (e != float("-inf"))[:, None] & (d < V_DIM)[None, :]
        outs = tl.load(partial.out + at[:, None] * V_DIM + d[None, :], mask=some, other=0.0)
        new = tl.maximum(high, tl.max(e, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = tl.exp2(e - base), tl.exp2(high - base)
        merged = merged * shrink + tl.sum(outs * p[:, None], axis=0)
        weight = weight * shrink + tl.sum(p, axis=0)
        high = new
    some = tl.where(there, weight, 0.0) != 0.0
    weight = tl.where(some, weight, 1.0)
    at = segment * every + row
    tl.store(out + at * V_DIM + d, (merged / weight).to(out.dtype.element_ty), mask=d < V_DIM)
    tl.store(lse + at, tl.where(some, (high + tl.log2(weight)) * LN2, float("-inf")))


@triton.jit(do_not_specialize=["group", *INTEGERS])
def reduce_scores(
    scores,  # fp32 [S, G, counted, N]
    lse,  # fp32 [S, R], natural
    real,
    entries,  # int32 [S], how many the newest query saw, where shares are counted; else None
    mass,  # fp32 [S, N]
    group,  # G
    queries,
    counted,
    total,  # N
    decay,
    G_BLOCK: tl.constexpr,
):
    """Make of the scores of the counted queries one number per slot: program (segment, block of columns)."""
    segment = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.arange(0, G_BLOCK)
    there = (g < group)[:, None] & (column < total)[None, :]
    got = tl.zeros([COLUMNS], tl.float32)
    importance = 1.0
    newest = queries
    if real is not None:
        newest = tl.load(real + segment)
    for age in range(0, tl.minimum(counted, newest)):
        line = segment * group + g
        e = tl.load(lse + line * queries + queries - 1 - age, mask=g < group, other=0.0) * LOG2E
        e = tl.where(e == float("-inf"), 0.0, e)  # where nothing is stored
        at = (line * counted + age)[:, None] * total + column[None, :]
        p = tl.exp2(tl.load(scores + at, mask=there, other=float("-inf")) - e[:, None])
        mean = tl.sum(p, axis=0) / group
        if entries is not None:
            mean = tl.where(mean * (tl.load(entries + segment) - age) > 1.0, 1.0, 0.0)
        got += importance * mean
        importance *= decay
    tl.store(mass + segment * total + column, got, mask=column < total)


@triton.jit(do_not_specialize=["lengths", *INTEGERS])
def append_entries(
    k,  # [S, Q, D]
    v,  # [S, Q, Dv]
    found: Found,
    lengths,  # int32 [S], which stay
    real,
    queries,
    columns,
    layout: tl.constexpr,
):
    """Write new entries after the last of each segment: program (segment, block of queries)."""
    segment = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * layout.rows + tl.arange(0, layout.rows)
    age, there = ages(row, segment, real, queries, queries)
    new = queries
    if real is not None:
        new = tl.load(real + segment)
    slot = tl.load(lengths + segment) + new - 1 - age
    there = there & (slot < columns * SLOTS)
    page, slot = segment * columns + slot // SLOTS, slot % SLOTS
    k_row = load_rows(k + segment * queries * layout.k_dim, row, there, layout.k_dim, layout.k_block)
    v_row = load_rows(v + segment * queries * layout.v_dim, row, there, layout.v_dim, layout.v_block)
    store_rows(tl.load(found.k + page, mask=there, other=0), slot, k_row, there, layout.k_dim, layout.dtype)
    store_rows(tl.load(found.v + page, mask=there, other=0), slot, v_row, there, layout.v_dim, layout.dtype)


@triton.jit
def store_rows(address, slot, x, there, DIM: tl.constexpr, dtype: tl.constexpr):
    """Store row i of x [rows, dim] as slot[i] of the page at address[i]."""
    d = tl.arange(0, x.shape[1])
    at = address.to(tl.pointer_type(dtype))[:, None] + (slot * DIM)[:, None] + d[None, :]
    tl.store(at, x, mask=there[:, None] & (d < DIM)[None, :])
