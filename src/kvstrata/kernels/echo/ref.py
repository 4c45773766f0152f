"""Reference of the banded repeat in torch, fp32 whatever the dtype of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.codec.rotation import Turn

ROWS = 512  # queries at once, which bounds memory
WIDEST = 64  # offsets of a band
MOST_SINKS = 64
LEAST_REST = 1e-6  # of a softmax, that what is left of it without the sinks counts as at least
Weight = Literal["u", "u*wov", "u+"]


@dataclass(frozen=True, slots=True)
class Band:
    """Offsets low .. high between an entry and the query that copies, how far queries are shifted, and the sinks.

    An offset of 1 is the entry behind the token that is copied, as an induction head reads it. The first `sinks` tokens
    stand in every denominator. `weight` says what becomes of a probability behind the kernels.
    """

    low: int = -4
    high: int = 4
    shift: int = 512
    sinks: int = 4
    weight: Weight = "u*wov"

    @property
    def width(self) -> int:
        """Offsets."""
        return self.high - self.low + 1


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
    batch, heads, keys, _ = k.shape
    rows, group = q.shape[2], q.shape[1] // heads
    left, right = max(0, -before - band.low), max(0, rows + before + band.high - keys)
    k = pad(turn(k), (0, 0, left, right))
    rest = rest_of(q, sinks, lse, turn, first, softmax).view(batch, heads, group, rows)
    index = torch.arange(-left, keys + right, device=k.device)
    there = (index >= skip) & (index < keys)
    best = torch.full((batch, heads, group, k.shape[2]), -torch.inf, device=k.device)
    for start in range(0, rows, ROWS):
        part = q[:, :, start : start + ROWS].unflatten(1, (heads, group)).float() * softmax.scale
        at, count = left + before + band.low + start, part.shape[3]
        spans = [slice(at + step, at + step + count) for step in range(band.width)]
        scores = _capped(torch.stack([(part * k[:, :, None, span]).sum(dim=-1) for span in spans]), softmax)
        for score, span in zip(scores, spans, strict=True):  # scores [W, B, H, G, R]
            score.masked_fill_(~there[span], -torch.inf)
        whole = torch.logaddexp(rest[..., start : start + ROWS], scores.logsumexp(dim=0))
        scores -= whole + less[:, :, None, start : start + ROWS]
        for score, span in zip(scores, spans, strict=True):
            best[..., span] = torch.where(there[span], best[..., span].fmax(score), -torch.inf)
    return best[..., left : left + keys].reshape(batch, heads * group, keys)


def rest_of(q: Tensor, sinks: Tensor, lse: Tensor, turn: Turn, first: int, softmax: Softmax) -> Tensor:
    """Log-sum-exp [B, H*G, R] of what a repeated query sees outside its band: the repetition so far, and the sinks."""
    (heads, count), rows = sinks.shape[1:3], q.shape[2]
    if count == 0:
        return lse
    both = torch.cat([sinks.float(), turn(sinks)], dim=2).repeat_interleave(q.shape[1] // heads, dim=1)
    scores = _capped(both @ q.float().transpose(-1, -2) * softmax.scale, softmax)  # [B, H*G, 2s, R]
    own, later = scores.split(count, dim=2)
    unseen = torch.arange(count, device=q.device)[:, None] > torch.arange(first, first + rows, device=q.device)
    own = (own - lse[:, :, None]).masked_fill_(unseen, -torch.inf).exp_().sum(dim=2)
    return torch.logaddexp(lse + (1 - own).clamp_min_(LEAST_REST).log_(), later.logsumexp(dim=2))


def _capped(scores: Tensor, softmax: Softmax) -> Tensor:
    if softmax.softcap is None:
        return scores
    return scores.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
