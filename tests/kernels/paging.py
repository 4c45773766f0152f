"""Random pages for kernel tests, with the numbers they stand for, and attention over them in float64.

Pages lie in several blocks in random order, unused slots hold NaN or garbage, and page numbers of slots that are not
used are out of every block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata import _native
from kvstrata.kernels.pages import PAGE

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
NOWHERE = 123_456_789  # a page number that no block has
INT8, INT4, INT2 = (8, 8, True, False, 64), (4, 4, False, True, 64), (2, 2, False, True, 64)


@dataclass
class Tier:
    """Pages of S segments with `lengths` entries and room for `room` more, holding k and v [S, longest, D] float64."""

    dtype: torch.dtype
    codec: tuple | None
    lengths: list[int]
    k_dim: int
    v_dim: int
    room: int = 0
    spread: float = 1.0  # of the numbers
    blocks: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self):
        per_segment = [-(-(n + self.room) // PAGE) for n in self.lengths]
        numbers = torch.randperm(sum(per_segment)).split(per_segment)
        columns = max(1, *per_segment)
        table = torch.full((len(self.lengths), columns + 2), NOWHERE, dtype=torch.int32)  # a view of wider rows
        self.table = table[:, :columns]
        for row, pages in zip(self.table, numbers, strict=True):
            row[: len(pages)] = pages + 7
        self.counts = torch.tensor(self.lengths, dtype=torch.int32)
        self.arena = _native.Arena(NAMES[self.dtype], self.codec, self.k_dim, self.v_dim)
        total = max(2, sum(per_segment))
        for first, n in ((0, total // 2), (total // 2, total - total // 2)):
            self.blocks.append((first + 7, *self.random_block(n)))
            self.arena.add(*self.blocks[-1])
        self.pages = _native.Pages(self.arena, self.table, self.counts)
        self.k, self.v = self.read(max(1, *self.lengths))
        self.poison()

    def random_block(self, n):
        if self.codec is None:
            k, v = (self.spread * torch.randn(n, PAGE, d).to(self.dtype) for d in (self.k_dim, self.v_dim))
            return k, v, torch.zeros(n, 0, dtype=self.dtype)
        k_bits, v_bits, symmetric, _, window = self.codec
        k, v = (
            torch.randint(0, 256, (n, PAGE * d * b // 8), dtype=torch.uint8)
            for d, b in ((self.k_dim, k_bits), (self.v_dim, v_bits))
        )
        if symmetric:
            k.clamp_(min=1)  # 0 would be -128
            v[v == 128] = 127
            return k, v, self.spread * (torch.rand(n, self.k_dim + self.v_dim) + 0.5) / 64
        windows = PAGE // window
        grids = [
            (torch.rand(n, windows * self.k_dim) + 0.5) * 3 / 2**k_bits,
            -1.5 + 0.3 * torch.randn(n, windows * self.k_dim),
            (torch.rand(n, PAGE) + 0.5) * 3 / 2**v_bits,
            -1.5 + 0.3 * torch.randn(n, PAGE),
        ]
        return k, v, self.spread * torch.cat(grids, dim=1).to(self.dtype)

    def page(self, number):
        """k [64, D] and v [64, Dv] of a page in float64."""
        k, v, grid = next(
            (k[number - first], v[number - first], grid[number - first])
            for first, k, v, grid in self.blocks
            if first <= number < first + len(k)
        )
        return (k.double(), v.double()) if self.codec is None else decoded(k, v, grid, self.codec)

    def read(self, longest):
        """What the pages hold, k and v [S, longest, D]; NaN past a segment's length."""
        k, v = (torch.full((len(self.lengths), longest, d), math.nan).double() for d in (self.k_dim, self.v_dim))
        for s, n in enumerate(self.counts.tolist()):
            for t in range(0, n, PAGE):
                page_k, page_v = self.page(int(self.table[s, t // PAGE]))
                k[s, t : min(n, t + PAGE)], v[s, t : min(n, t + PAGE)] = page_k[: n - t], page_v[: n - t]
        return k, v

    def poison(self):
        """NaN in every number of the cache's dtype that belongs to no entry: rows of exact pages, grids of tokens."""
        used = {}
        for s, n in enumerate(self.counts.tolist()):
            used |= {int(self.table[s, t // PAGE]): min(PAGE, n - t) for t in range(0, n, PAGE)}
        for first, k, v, grid in self.blocks:
            for i in range(len(k)):
                n = used.get(first + i, 0)
                if self.codec is None:
                    k[i, n:], v[i, n:] = math.nan, math.nan
                elif n == 0:
                    grid[i] = math.nan
                elif not self.codec[2]:
                    grid[i, -2 * PAGE :].view(2, PAGE)[:, n:] = math.nan
                    windows = PAGE // self.codec[4]
                    grid[i, : -2 * PAGE].view(2, windows, -1)[:, -(-n // self.codec[4]) :] = math.nan


def decoded(k, v, grid, codec):
    """k [64, D] and v [64, Dv] in float64 of one coded page, as `kvstrata.kernels.pages` words it."""
    k_bits, v_bits, symmetric, _, window = codec
    k_dim, v_dim = k.numel() * 8 // k_bits // PAGE, v.numel() * 8 // v_bits // PAGE
    codes = unstacked(k.view(-1, PAGE, 4), k_bits)  # [D/4, 64, 4]
    k_codes = codes.permute(1, 0, 2).reshape(PAGE, k_dim).double()
    codes = unstacked(v.view(-1, v_dim // 16, 16, 4), v_bits)  # [16, Dv/16, 16, 4]
    v_codes = codes.permute(0, 3, 1, 2).reshape(PAGE, v_dim)
    grid = grid.double()
    if symmetric:
        return (k_codes - 128) * grid[:k_dim], v_codes.to(torch.int8).double() * grid[k_dim:]
    windows = PAGE // window
    scale, zero = grid[: -2 * PAGE].view(2, windows, k_dim).repeat_interleave(window, dim=1)
    v_scale, v_zero = grid[-2 * PAGE :].view(2, PAGE, 1)
    return zero + scale * k_codes, v_zero + v_scale * v_codes.double()


def unstacked(packed, bits):
    """Codes of `bits` bits, lowest first, along the first axis."""
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=1).flatten(0, 1)


@dataclass
class Truth:
    out: Tensor  # [B, H*G, Q, Dv]
    lse: Tensor  # [B, H*G, Q]
    mass: list[Tensor]  # of each tier [S, longest]


def attend(q, tiers, scale, *, tokens=None, softcap=0.0, sinks=None, weights=(), counts=False, after=None):
    """What `_native.attend` must give, in float64, after the new entries are in `tiers`.

    `after`: for each tier, visible [S, Q, longest] bool; None shows all.
    """
    batch, heads, queries = q.shape[0], len(tiers[0].counts) // q.shape[0], q.shape[2]
    group = q.shape[1] // heads
    out = torch.zeros(*q.shape[:3], tiers[0].v_dim).double()
    lse = torch.full(q.shape[:3], -math.inf).double()
    held = [tier.read(max(1, int(tier.counts.max()))) for tier in tiers]
    mass = [torch.zeros(k.shape[:2]).double() for k, _ in held]
    for s in range(batch * heads):
        b, h = divmod(s, heads)
        lengths = [int(tier.counts[s]) for tier in tiers]
        k, v = (torch.cat([x[i][s, :n] for x, n in zip(held, lengths, strict=True)]) for i in (0, 1))
        for i in range(queries - (queries if tokens is None else int(tokens[b])), queries):
            age = queries - 1 - i
            visible = [torch.ones(n, dtype=torch.bool) for n in lengths]
            visible[0][max(0, lengths[0] - age) :] = False
            if after is not None:
                visible = [seen & w[s, i, :n] for seen, w, n in zip(visible, after, lengths, strict=True)]
            seen = torch.cat(visible)
            mean = torch.zeros(len(seen)).double()
            for head in range(h * group, (h + 1) * group):
                scores = scale * (k @ q[b, head, i].double())
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores.masked_fill(~seen, -math.inf)
                extra = torch.tensor([-math.inf if sinks is None else float(sinks[head])]).double()
                lse[b, head, i] = total = torch.cat([scores, extra]).logsumexp(0)
                p = torch.zeros_like(scores) if total == -math.inf else (scores - total).exp()
                out[b, head, i] = p @ v.nan_to_num(nan=0.0) if len(p) else 0.0
                mean += p / group
            if age < len(weights):
                part = (mean * int(seen.sum()) > 1).double() if counts else mean
                for to, given in zip(mass, (weights[age] * part).split(lengths), strict=True):
                    to[s, : len(given)] += given
    return Truth(out, lse, mass)
