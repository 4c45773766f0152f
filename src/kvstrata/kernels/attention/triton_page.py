"""One page in a Triton kernel: its loads, the scores of its keys, the sums of its values.

Codes are unpacked in registers to numbers centred on 0, which fp16 holds exactly. Scales are folded into the query for
keys, and for values into the probabilities or the sum. A kernel's language has no types that a checker could follow.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.kernels.mass.triton import tl, triton
from kvstrata.kernels.pages import PAGE

SLOTS = tl.constexpr(PAGE)


@dataclass(frozen=True)
class Layout:
    """What a kernel is compiled for: how a page is laid out, and the blocks, powers of two, that hold it."""

    rows: int  # of queries
    k_dim: int
    k_block: int
    v_dim: int
    v_block: int
    dtype: tl.dtype  # of the cache
    compute: tl.dtype  # in which codes are multiplied
    k_bits: int  # 0 where exact
    v_bits: int
    symmetric: bool
    window: int


@triton.jit
def load_keys(address, layout: tl.constexpr):
    """Keys [64, D], or their words [D * bits / 32, 64]."""
    slot = tl.arange(0, SLOTS)
    if layout.k_bits == 0:
        d = tl.arange(0, layout.k_block)
        at, there = slot[:, None] * layout.k_dim + d[None, :], (d < layout.k_dim)[None, :]
        k = tl.load(pointer(address, layout.dtype) + at, mask=there, other=0.0)
    else:
        word = tl.arange(0, layout.k_block * layout.k_bits // 32)
        at, there = word[:, None] * SLOTS + slot[None, :], (word < layout.k_dim * layout.k_bits // 32)[:, None]
        k = tl.load(pointer(address, tl.uint32) + at, mask=there, other=0)
    return k


@triton.jit
def load_values(address, n, layout: tl.constexpr):
    """Values [64, Dv] of n entries, 0 past them, or their words [2 * bits, Dv]."""
    d = tl.arange(0, layout.v_block)
    if layout.v_bits == 0:
        slot = tl.arange(0, SLOTS)
        at, there = slot[:, None] * layout.v_dim + d[None, :], (slot < n)[:, None] & (d < layout.v_dim)[None, :]
        v = tl.load(pointer(address, layout.dtype) + at, mask=there, other=0.0)
    else:
        word = tl.arange(0, 2 * layout.v_bits)
        at, there = word[:, None] * layout.v_dim + d[None, :], (d < layout.v_dim)[None, :]
        v = tl.load(pointer(address, tl.uint32) + at, mask=there, other=0)
    return v


@triton.jit
def load_key_grid(address, layout: tl.constexpr):
    """Of a page's keys the scale, and what a centred code 0 stands for: fp32 [64 / window, D], or [rows, D] if one."""
    WINDOWS: tl.constexpr = SLOTS // layout.window
    step, middle = 0.0, 0.0  # where there is none
    if layout.k_bits:
        d = tl.arange(0, layout.k_block)
        if WINDOWS == 1:  # the same for all rows: lying as queries do, it needs no exchange between threads
            at = tl.arange(0, layout.rows)[:, None] * 0 + d[None, :]
        else:
            at = tl.arange(0, WINDOWS)[:, None] * layout.k_dim + d[None, :]
        there = (d < layout.k_dim)[None, :]
        grid = pointer(address, tl.float32 if layout.symmetric else layout.dtype)
        step = tl.load(grid + at, mask=there, other=0.0).to(tl.float32)
        if not layout.symmetric:
            zero = tl.load(grid + WINDOWS * layout.k_dim + at, mask=there, other=0.0).to(tl.float32)
            middle = zero + 2 ** (layout.k_bits - 1) * step
    return step, middle


@triton.jit
def load_value_grid(address, n, layout: tl.constexpr):
    """Of n values the scale, fp32 [Dv] or [64], and with the latter what a centred code 0 stands for."""
    step, middle = 0.0, 0.0  # where there is none
    if layout.v_bits:
        if layout.symmetric:
            d = tl.arange(0, layout.v_block)
            grid = pointer(address, tl.float32) + layout.k_dim
            step = tl.load(grid + d, mask=d < tl.where(n > 0, layout.v_dim, 0), other=0.0)
        else:
            slot = tl.arange(0, SLOTS)
            grid = pointer(address, layout.dtype) + 2 * (SLOTS // layout.window) * layout.k_dim
            step = tl.load(grid + slot, mask=slot < n, other=0.0).to(tl.float32)
            zero = tl.load(grid + SLOTS + slot, mask=slot < n, other=0.0).to(tl.float32)
            middle = zero + 2 ** (layout.v_bits - 1) * step
    return step, middle


@triton.jit
def scores_of(x, k, step, middle, scale, layout: tl.constexpr):
    """q . k * scale of rows x [rows, D] and a page's keys -> fp32 [rows, 64]."""
    if layout.k_bits == 0:
        s = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
    else:
        code = codes(k, layout.k_bits, False, layout.compute)
        if layout.window == SLOTS:
            scaled = x.to(tl.float32) * scale
            folded = swapped((scaled * step).to(layout.compute))
            s = tl.dot(folded, code, input_precision="ieee")
            if not layout.symmetric:
                s += tl.sum(scaled * middle, axis=1)[:, None]
        else:  # several grids do not fold into one query: keys are decoded, and rounded as those of the exact tier are
            k = code.to(tl.float32) * over_slots(step, layout) + over_slots(middle, layout)
            s = tl.dot(swapped(x), k.to(layout.dtype), input_precision="ieee") * scale
    return s


@triton.jit
def sum_of(p, v, step, layout: tl.constexpr):
    """Values, or scaled codes, weighted by p [rows, 64], which is 0 past the entries -> fp32 [rows, Dv]."""
    if layout.v_bits == 0:
        out = tl.dot(p.to(layout.dtype), v, input_precision="ieee")
    else:
        code = codes(v, layout.v_bits, layout.symmetric, layout.compute)
        if layout.symmetric:
            weights = swapped(p.to(layout.compute))
            out = tl.dot(weights, code, input_precision="ieee") * step[None, :]
        else:
            largest = tl.max(step, axis=0)  # divided out, so that in fp16 small scales keep their bits
            largest = tl.where(largest > 0.0, largest, 1.0)  # a page may have no entries
            weights = swapped((p * (step / largest)[None, :]).to(layout.compute))
            out = tl.dot(weights, code, input_precision="ieee") * largest
    return out


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """What an address points to; the compiler must know it is aligned to load 16 bytes at once."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def codes(words, bits: tl.constexpr, signed: tl.constexpr, dtype: tl.constexpr):
    """Words [n, m] of four bytes -> codes [n * 32 / bits, m], less half their range.

    A word holds the first four codes at the lowest bits of its bytes, then the next four. Joined, they stay in the
    thread that has the word; bytes 0 and 2 first, then 1 and 3, as one mask then makes a pair of fp16. So rows come as
    the columns of `swapped`.
    """
    HALF: tl.constexpr = 2 ** (bits - 1)
    if signed:
        words = words ^ (HALF * (0xFFFFFFFF // (2**bits - 1)))  # two's complement to biased
    x = tl.join(words, words >> 16)
    x = tl.join(x, x >> 8)
    if bits == 8:
        x = tl.permute(x, [0, 3, 2, 1])
    elif bits == 4:
        x = tl.permute(tl.join(x, x >> 4), [0, 4, 3, 2, 1])
    else:
        x = tl.join(x, x >> 2)
        x = tl.permute(tl.join(x, x >> 4), [0, 5, 4, 3, 2, 1])
    code = tl.reshape(x, [words.shape[0] * 32 // bits, words.shape[1]]) & (2**bits - 1)
    if dtype == tl.float16:  # 0x6400 is 1024, and the last bits are ones: cheaper than to convert an integer
        number = (code | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - (1024.0 + HALF)
    else:
        number = code.to(tl.float32) - HALF
    return number


@triton.jit
def swapped(x):
    """Columns of x [rows, n], of every four the middle two exchanged."""
    fours = tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2])
    return tl.reshape(tl.permute(fours, [0, 1, 3, 2]), [x.shape[0], x.shape[1]])


@triton.jit
def over_slots(grid, layout: tl.constexpr):
    """Numbers of windows [64 / window, D] -> of slots [D, 64]."""
    WINDOWS: tl.constexpr = SLOTS // layout.window
    grid = swapped(grid)
    wide = tl.broadcast_to(tl.trans(grid)[:, :, None], [layout.k_block, WINDOWS, layout.window])
    return tl.reshape(wide, [layout.k_block, SLOTS])
