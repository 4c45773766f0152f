"""Column sums on a GPU, in Triton: as `ref`, but no score leaves a program.

A kernel's language has no types that a checker could follow. Scores in kernels are to the base 2. Counts of rows and
keys are not specialised, as each value 1 and each multiple of 16 would compile a kernel anew; strides are, for loads
of 16 bytes.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvstrata.kernels.mass.ref import SUM, Reduction

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton kernels need the package triton: pip install 'kvstrata[triton]'") from error

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TILE = 64  # rows, and keys, of a tile of scores
SPLIT, PROGRAMS = 1024, 512  # keys of a program of `lse_of_rows`: that many, more if there are programs enough
COUNTS = ["batch", "group", "rows", "keys", "split"]


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, *, scale: float, reduction: Reduction = SUM, softcap: float | None = None
) -> Tensor:
    """Reduce the attention of the queries to one number per key.

    q [B, H*G, R, D] are the last R queries of the N keys k [B, H, N, D]; lse [B, H*G, R] fp32. -> [B, H, N] fp32.
    """
    (batch, every, rows, dim), (_, heads, keys, _) = q.shape, k.shape
    q, k, lse = _dense(q), _dense(k), lse.contiguous()
    mass = torch.empty(batch, heads, keys, dtype=torch.float32, device=q.device)
    log_decay = math.log2(reduction.decay) if reduction.decay > 0 else -1e30  # which 0 times is 0
    numbers = (every // heads, rows, keys, scale, softcap, log_decay, reduction.counts)
    with torch.cuda.device_of(q):
        mass_of_keys[(triton.cdiv(keys, TILE), heads, batch)](
            q, *q.stride()[:3], k, *k.stride()[:3], lse, mass, *numbers, *_blocks(rows, dim)
        )
    return mass


def column_lse(
    q: Tensor, k: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Log-sum-exp [B, H*G, R] fp32 of the last R queries over the keys they see; shapes as `column_mass`.

    `sinks` [H*G] are one more score per query head.
    """
    (batch, every, rows, dim), (_, heads, keys, _) = q.shape, k.shape
    q, k, blocks = _dense(q), _dense(k), _blocks(rows, dim)
    tiles = triton.cdiv(rows, blocks[2])
    split = max(SPLIT, TILE * triton.cdiv(keys * tiles * every * batch, TILE * PROGRAMS))
    parts = torch.empty(triton.cdiv(keys, split), batch, every, rows, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        lse_of_rows[(tiles, every, len(parts) * batch)](
            q,
            *q.stride()[:3],
            k,
            *k.stride()[:3],
            parts,
            batch,
            every // heads,
            rows,
            keys,
            split,
            scale,
            softcap,
            *blocks,
        )
    lse = parts[0] if len(parts) == 1 else parts.logsumexp(dim=0)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocks(rows: int, dim: int) -> tuple[int, int, int, int]:
    """Dimension, and of a tile its block, rows and keys: tensor cores take no fewer than 16."""
    return dim, max(16, triton.next_power_of_2(dim)), min(TILE, max(16, triton.next_power_of_2(rows))), TILE


@triton.jit(do_not_specialize=COUNTS)
def lse_of_rows(
    q,  # [B, H*G, R, D]
    q_batch,
    q_head,
    q_row,
    k,  # [B, H, N, D]
    k_batch,
    k_head,
    k_row,
    parts,  # fp32 [splits, B, H*G, R]
    batch,
    group,
    rows,
    keys,
    split,
    scale,
    softcap,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Natural lse of one tile of rows over one split of keys: program (tile, query head, split and row of batch)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, b = tl.program_id(1).to(tl.int64), (tl.program_id(2) % batch).to(tl.int64)
    x = load_tile(q + b * q_batch + head * q_head, row, q_row, rows, DIM, BLOCK)
    k += b * k_batch + head // group * k_head
    begin = tl.program_id(2) // batch * split
    end = tl.minimum(tl.minimum(begin + split, keys), keys - rows + tl.program_id(0) * ROWS + ROWS)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for first in range(begin, end, KEYS):
        key = first + tl.arange(0, KEYS)
        s = scores(x, load_tile(k, key, k_row, keys, DIM, BLOCK), row, key, rows, keys, scale, softcap)
        new = tl.maximum(high, tl.max(s, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight = weight * tl.exp2(high - base) + tl.sum(tl.exp2(s - base[:, None]), axis=1)
        high = new
    some = weight != 0.0  # true of NaN, which passes through
    lse = tl.where(some, (high + tl.log2(tl.where(some, weight, 1.0))) * LN2, float("-inf"))
    at = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head) * rows + row
    tl.store(parts + at, lse, mask=row < rows)


@triton.jit(do_not_specialize=COUNTS)
def mass_of_keys(
    q,
    q_batch,
    q_head,
    q_row,
    k,
    k_batch,
    k_head,
    k_row,
    lse,  # fp32 [B, H*G, R]
    mass,  # fp32 [B, H, N]
    group,
    rows,
    keys,
    scale,
    softcap,
    log_decay,
    SHARES: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Mass of one tile of keys from all rows that see them: program (tile, head, row of batch)."""
    first = tl.program_id(0) * KEYS
    key = first + tl.arange(0, KEYS)
    head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    y = load_tile(k + b * k_batch + head * k_head, key, k_row, keys, DIM, BLOCK)
    got = tl.zeros([KEYS], tl.float32)
    for top in range(tl.maximum(0, first - (keys - rows)) // ROWS * ROWS, rows, ROWS):
        row = top + tl.arange(0, ROWS)
        mean = tl.zeros([ROWS, KEYS], tl.float32)
        for g in range(0, group):
            every = head * group + g
            x = load_tile(q + b * q_batch + every * q_head, row, q_row, rows, DIM, BLOCK)
            at = (b * tl.num_programs(1) * group + every) * rows + row
            e = tl.load(lse + at, mask=row < rows, other=0.0) * LOG2E
            mean += tl.exp2(scores(x, y, row, key, rows, keys, scale, softcap) - e[:, None])
        mean = mean / group
        if SHARES:
            mean = tl.where(mean * (keys - rows + 1 + row)[:, None] > 1.0, 1.0, 0.0)
        age = tl.maximum(rows - 1 - row, 0)
        importance = tl.where(row < rows, tl.exp2(age * log_decay), 0.0)
        got += tl.sum(mean * importance[:, None], axis=0)
    tl.store(mass + (b * tl.num_programs(1) + head) * keys + key, got, mask=key < keys)


@triton.jit
def load_tile(x, index, stride, end, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of x at some indices [., D], 0 from `end` on."""
    d = tl.arange(0, BLOCK)
    at = index.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(x + at, mask=(index < end)[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def scores(x, y, row, key, rows, keys, scale, softcap):
    """Scores to the base 2 of rows x and keys y [rows, keys], -inf where a key is after the row's own."""
    s = capped(tl.dot(x, tl.trans(y), input_precision="ieee") * scale, softcap)
    return tl.where(key[None, :] <= (keys - rows + row)[:, None], s, float("-inf"))


@triton.jit
def capped(s, softcap):
    """Scores to the base 2, after soft-capping."""
    if softcap is not None:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)  # tanh
    return s * LOG2E
