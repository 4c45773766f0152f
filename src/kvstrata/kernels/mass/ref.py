"""Reference column sums in torch, fp32 whatever the dtype of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # scores held at once, 4 MiB in fp32: half the time of 2^22, a third under 2^17 (two cores)


def query_blocks(queries: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over the queries, `width` elements each, so that a block has at most BLOCK_ELEMENTS."""
    size = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def _block_scores(q: Tensor, k: Tensor, first: int, scale: float) -> Tensor:
    """Causal scores [B, H, G, q, n] of queries whose own keys are first .. first+q-1; k holds the n = first+q seen."""
    batch, heads, dim = k.shape[0], k.shape[1], q.shape[-1]
    grouped = q.reshape(batch, heads, -1, dim).float() * scale  # G and q folded: one matmul per key-value head
    scores = torch.matmul(grouped, k.float().transpose(-1, -2)).view(batch, heads, -1, q.shape[2], k.shape[2])
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu_(1)
    scores[..., first:].masked_fill_(hidden, float("-inf"))  # only among the queries' own keys is anything hidden
    return scores


def column_mass(q: Tensor, k: Tensor, lse: Tensor, *, scale: float) -> Tensor:
    """Sum over queries, and average over the group, of the probability each key received.

    q [B, H*G, R, D] are the last R queries of the N keys k [B, H, N, D]; lse [B, H*G, R] fp32. -> [B, H, N] fp32.
    """
    batch, heads, keys = k.shape[:3]
    group, rows = q.shape[1] // heads, q.shape[2]
    mass = torch.zeros(batch, heads, keys, dtype=torch.float32, device=q.device)
    k = k.float()
    for start, stop in query_blocks(rows, q.shape[0] * q.shape[1] * keys):
        first = keys - rows + start
        seen = keys - rows + stop
        scores = _block_scores(q[:, :, start:stop], k[:, :, :seen], first, scale)
        scores -= lse.reshape(batch, heads, group, rows)[..., start:stop, None]
        mass[:, :, :seen] += scores.exp_().sum(dim=(2, 3))
    return mass.div_(group)


def column_lse(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """Log-sum-exp [B, H*G, R] fp32 of the last R queries over the keys they see; shapes as `column_mass`."""
    keys, rows = k.shape[2], q.shape[2]
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for start, stop in query_blocks(rows, q.shape[0] * q.shape[1] * keys):
        first = keys - rows + start
        scores = _block_scores(q[:, :, start:stop], k[:, :, : keys - rows + stop], first, scale)
        lse[:, :, start:stop] = scores.logsumexp(dim=-1).flatten(1, 2)
    return lse
