"""Reference column sums in torch, fp32 whatever the dtype of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # scores held at once, 4 MiB in fp32: half the time of 2^22, a third under 2^17 (two cores)
ALL_ROWS = -1  # every query of a forward


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the attention of a forward's queries becomes one number per key.

    rows: only the newest `rows` queries count. decay: the newest query weighs 1, the one before it `decay`, and so on.
    counts: instead of probabilities, sum how often a key got more than an even share 1/n of the n keys its query saw.
    The query heads of a group are averaged, before comparing where `counts`.
    """

    rows: int
    decay: float = 1.0
    counts: bool = False

    def last(self, queries: int) -> int:
        """How many of `queries` queries count."""
        return queries if self.rows == ALL_ROWS else min(self.rows, queries)

    def __call__(self, p: Tensor, keys_seen: Tensor, age: Tensor) -> Tensor:
        """p [B, H, G, R, N], keys_seen [1|B, 1, R], age (0 is the newest query) [R] -> [B, H, N]."""
        if not self.counts and self.decay == 1.0:
            return p.sum(dim=(2, 3)).div_(p.shape[2])
        mean = p.mean(dim=2)
        if self.counts:
            mean = (mean * keys_seen[..., None] > 1.0).float()
        return mean.mul_(self.decay ** age.float()[:, None]).sum(dim=2)


SUM = Reduction(ALL_ROWS)


def query_blocks(queries: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over the queries, `width` elements each, so that a block has at most BLOCK_ELEMENTS."""
    size = max(1, BLOCK_ELEMENTS // max(1, width))
    for start in range(0, queries, size):
        yield start, min(start + size, queries)


def block_scores(
    q: Tensor, k: Tensor, first: int, scale: float, softcap: float | None = None, own: Tensor | None = None
) -> Tensor:
    """Scores [B, H, G, q, n] of queries whose own keys are first .. first+q-1, and -inf for keys they may not see.

    Causal, and k holds the n = first+q keys up to the last query; or `own` [B, q, m] bool says which of the newest m
    of all n keys are seen.
    """
    batch, heads, dim = k.shape[0], k.shape[1], q.shape[-1]
    grouped = q.reshape(batch, heads, -1, dim).float() * scale  # G and q folded: one matmul per key-value head
    scores = torch.matmul(grouped, k.float().transpose(-1, -2)).view(batch, heads, -1, q.shape[2], k.shape[2])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if own is not None:
        scores[..., k.shape[2] - own.shape[2] :].masked_fill_(~own[:, None, None], float("-inf"))
        return scores
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu_(1)
    scores[..., first:].masked_fill_(hidden, float("-inf"))  # only among the queries' own keys is anything hidden
    return scores


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    reduction: Reduction = SUM,
    softcap: float | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Reduce the attention of the queries to one number per key.

    q [B, H*G, R, D] are the last R queries of the N keys k [B, H, N, D]; lse [B, H*G, R] fp32. -> [B, H, N] fp32.
    `own` [B, R, m] bool replaces causality among the newest m keys.
    """
    batch, heads, keys = k.shape[:3]
    group, rows = q.shape[1] // heads, q.shape[2]
    mass = torch.zeros(batch, heads, keys, dtype=torch.float32, device=q.device)
    seen = torch.arange(keys - rows + 1, keys + 1, device=q.device)
    counted = seen[None, None] if own is None else keys - own.shape[2] + own.sum(dim=-1)[:, None]
    k = k.float()
    for start, stop in query_blocks(rows, q.shape[0] * q.shape[1] * keys):
        first, end = keys - rows + start, keys if own is not None else keys - rows + stop
        part = None if own is None else own[:, start:stop]
        scores = block_scores(q[:, :, start:stop], k[:, :, :end], first, scale, softcap, part)
        scores -= lse.reshape(batch, heads, group, rows)[..., start:stop, None]
        mass[:, :, :end] += reduction(scores.exp_(), counted[..., start:stop], keys - seen[start:stop])
    return mass


def column_lse(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Log-sum-exp [B, H*G, R] fp32 of the last R queries over the keys they see; shapes as `column_mass`.

    `sinks` [H*G] are one more score per query head.
    """
    keys, rows = k.shape[2], q.shape[2]
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for start, stop in query_blocks(rows, q.shape[0] * q.shape[1] * keys):
        first, end = keys - rows + start, keys if own is not None else keys - rows + stop
        part = None if own is None else own[:, start:stop]
        scores = block_scores(q[:, :, start:stop], k[:, :, :end], first, scale, softcap, part)
        lse[:, :, start:stop] = scores.logsumexp(dim=-1).flatten(1, 2)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])
