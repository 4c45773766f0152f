"""How the attention of a window of queries is spread: key by key its mean and variance over queries, and entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels.mass.ref import BLOCK_ELEMENTS, block_scores


@dataclass(frozen=True, slots=True)
class Moments:
    """Four numbers per key over the newest `rows` queries of a forward, three averaged over a group's query heads.

    The mean of the probability that it got; its variance, of a sample, 0 where there is one query; what it adds to
    the entropies of the queries, the sum of -p ln p; and the largest of all these probabilities.
    """

    rows: int

    def last(self, queries: int) -> int:
        """How many of `queries` queries count."""
        return min(self.rows, queries)


MEAN, VARIANCE, ENTROPY, LARGEST = 0, 1, 2, 3
NUMBERS = 4


def column_moments(q: Tensor, k: Tensor, lse: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
    """What `Moments` says of the attention of R queries, by key: in torch, a few heads at a time.

    q [B, H*G, R, D] are the last R queries of the N keys k [B, H, N, D]; lse [B, H*G, R] fp32. -> [B, H, N, 4] fp32.
    """
    batch, heads, keys = k.shape[:3]
    group, rows = q.shape[1] // heads, q.shape[2]
    found = torch.empty(batch, heads, keys, NUMBERS, dtype=torch.float32, device=q.device)
    size = max(1, BLOCK_ELEMENTS // max(1, batch * group * rows * keys))
    for start in range(0, heads, size):
        part, every = slice(start, start + size), slice(start * group, (start + size) * group)
        scores = block_scores(q[:, every], k[:, part], keys - rows, scale, softcap)  # [B, h, G, R, N]
        p = (scores - lse[:, every].unflatten(1, (-1, group))[..., None]).exp_()
        found[:, part, :, MEAN] = p.mean(dim=3).mean(dim=2)
        found[:, part, :, VARIANCE] = p.var(dim=3).mean(dim=2) if rows > 1 else 0.0
        found[:, part, :, ENTROPY] = torch.special.entr(p).sum(dim=3).mean(dim=2)
        found[:, part, :, LARGEST] = p.amax(dim=(2, 3))
    return found
