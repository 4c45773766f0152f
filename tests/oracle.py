"""Attention in float64, written to be read: the whole matrix, no blocks, no tricks.

q [B, H*G, Q, D] · k, v [B, H, N, D] · visible: bool, broadcast to [B, H*G, Q, N]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    out: Tensor  # [B, H*G, Q, D]
    lse: Tensor  # [B, H*G, Q]
    mass: Tensor  # [B, H, N], summed over the last `mass_rows` queries, averaged over the group


def causal(queries: int, keys: int) -> Tensor:
    """[Q, N] bool: the queries are the last `queries` tokens, and each sees itself and what came before."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mass_rows: int) -> Attended:
    """Causal attention of the last Q of N tokens."""
    return attend_masked(q, k, v, causal(q.shape[2], k.shape[2]), scale=scale, mass_rows=mass_rows)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float, mass_rows: int) -> Attended:
    """Attention over the full cache where `visible` says which keys each query still has. Hidden rows give zeros."""
    p, lse = probabilities(q, k, visible, scale=scale)
    out = p @ v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return Attended(out, lse, received(p, k.shape[1], mass_rows))


def probabilities(q: Tensor, k: Tensor, visible: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax [B, H*G, Q, N] and its log-sum-exp [B, H*G, Q]."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (scale * q.double() @ k.transpose(-1, -2)).masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().nan_to_num(nan=0.0), lse


def received(p: Tensor, heads: int, rows: int) -> Tensor:
    """Mass [B, H, N] of each key: probabilities p of the last `rows` queries summed, then averaged over the group."""
    batch, _, queries, keys = p.shape
    newest = p[:, :, queries - min(rows, queries) :]
    return newest.sum(dim=2).view(batch, heads, -1, keys).mean(dim=2)
