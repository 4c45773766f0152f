"""The banded repeat on a GPU, in Triton: first what each query's softmax runs over, then the best of each key."""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.codec.rotation import Turn
from kvstrata.kernels.echo.ref import Band, rest_of

try:
    import triton
    import triton.language as tl

    from kvstrata.kernels.mass.triton import LN2, LOG2E, capped, load_tile
except ImportError as error:
    raise ImportError("Triton kernels need the package triton: pip install 'kvstrata[triton]'") from error

TILE = 64  # queries, or keys, of a program
COUNTS = ["group", "rows", "keys", "first", "skip"]


def echo(
    q: Tensor,
    k: Tensor,
    sinks: Tensor,
    lse: Tensor,
    less: Tensor,
    *,
    turn: Turn,
    first: int,
    before: int,
    band: Band,
    softmax: Softmax,
    skip: int,
) -> Tensor:
    """See `kernels.echo`."""
    (batch, every, rows, dim), (_, heads, keys, _) = q.shape, k.shape
    base = rest_of(q, sinks, lse, turn, first, softmax)
    k = turn(k)
    q = q if q.stride(-1) == 1 else q.contiguous()
    total = torch.empty(batch, every, rows, dtype=torch.float32, device=q.device)
    best = torch.empty(batch, every, keys, dtype=torch.float32, device=q.device)
    where = (every // heads, rows, keys, before + band.low, skip, softmax.scale, softmax.softcap)
    sizes = (band.width, dim, max(16, triton.next_power_of_2(dim)), TILE)
    inputs = (q, *q.stride()[:3], k, *k.stride()[:3])
    with torch.cuda.device_of(q):
        grid = (triton.cdiv(rows, TILE), every, batch)
        total_of_queries[grid](*inputs, base.contiguous(), less.contiguous(), total, *where, *sizes)
        grid = (triton.cdiv(keys, TILE), every, batch)
        best_of_keys[grid](*inputs, total, best, *where, *sizes)
    return best


@triton.jit(do_not_specialize=COUNTS)
def total_of_queries(
    q,  # [B, H*G, R, D]
    q_batch,
    q_head,
    q_row,
    k,  # [B, H, S, D]
    k_batch,
    k_head,
    k_row,
    base,  # fp32 [B, H*G, R], natural
    less,  # fp32 [B, H, R], natural
    total,  # fp32 [B, H*G, R], to the base 2
    group,
    rows,
    keys,
    first,
    skip,
    scale,
    softcap,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Log-sum-exp of a tile of queries over band and rest, with what comes off: program (tile, query head, row)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x = load_tile(q + b * q_batch + head * q_head, row, q_row, rows, DIM, BLOCK)
    k += b * k_batch + head // group * k_head
    at = (b * tl.num_programs(1) + head) * rows + row
    high = tl.load(base + at, mask=row < rows, other=0.0) * LOG2E
    weight = tl.where(high == float("-inf"), 0.0, 1.0)
    for step in range(WIDTH):
        s = products(x, k, row + first + step, k_row, keys, skip, scale, softcap, DIM, BLOCK)
        new = tl.maximum(high, s)
        at_zero = tl.where(new == float("-inf"), 0.0, new)
        weight = weight * tl.exp2(high - at_zero) + tl.exp2(s - at_zero)
        high = new
    some = weight != 0.0  # true of NaN, which passes through
    found = tl.where(some, high + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    segment = b * (tl.num_programs(1) // group) + head // group
    off = tl.load(less + segment * rows + row, mask=row < rows, other=0.0)
    tl.store(total + at, found + off * LOG2E, mask=row < rows)


@triton.jit(do_not_specialize=COUNTS)
def best_of_keys(
    q,
    q_batch,
    q_head,
    q_row,
    k,
    k_batch,
    k_head,
    k_row,
    total,  # fp32 [B, H*G, R], to the base 2, with what comes off
    best,  # fp32 [B, H*G, S], natural
    group,
    rows,
    keys,
    first,
    skip,
    scale,
    softcap,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What the likeliest query gives each key of a tile: program (tile, query head, row of batch)."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    y = load_tile(k + b * k_batch + head // group * k_head, key, k_row, keys, DIM, BLOCK).to(tl.float32)
    q += b * q_batch + head * q_head
    at = (b * tl.num_programs(1) + head) * rows
    found = tl.full([KEYS], float("-inf"), tl.float32)
    for step in range(WIDTH):
        row = key - first - step
        asks = (row >= 0) & (row < rows) & (key >= skip)
        x = load_tile(q, tl.where(asks, row, rows), q_row, rows, DIM, BLOCK)
        s = capped(tl.sum(x.to(tl.float32) * y, axis=1) * scale, softcap)
        whole = tl.load(total + at + row, mask=asks, other=0.0)
        found = tl.where(asks, tl.maximum(found, (s - whole) * LN2), found)
    tl.store(best + (b * tl.num_programs(1) + head) * keys + key, found, mask=key < keys)


@triton.jit
def products(x, k, key, k_row, keys, skip, scale, softcap, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Scores to the base 2 of rows x, each with the key of its own number; -inf where that is none."""
    there = (key >= skip) & (key < keys)
    y = load_tile(k, tl.where(there, key, keys), k_row, keys, DIM, BLOCK)
    s = capped(tl.sum(x.to(tl.float32) * y.to(tl.float32), axis=1) * scale, softcap)
    return tl.where(there, s, float("-inf"))
