"""Reference of the banded repeat in torch, fp32 whatever the dtype of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstrata.kernels.attention.ref import Softmax

ROWS = 512  # queries at once, which bounds memory
WIDEST = 64  # offsets of a band
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
    q: Tensor, k: Tensor, base: Tensor, less: Tensor, *, before: int, band: Band, softmax: Softmax, skip: int
) -> Tensor:
    """See `kernels.echo`."""
    batch, heads, keys, dim = k.shape
    rows, group = q.shape[2], q.shape[1] // heads
    left, right = max(0, -before - band.low), max(0, rows + before + band.high - keys)
    k = pad(k.float(), (0, 0, left, right))
    index = torch.arange(-left, keys + right, device=k.device)
    there = (index >= skip) & (index < keys)
    best = torch.full((batch, heads, group, k.shape[2]), -torch.inf, device=k.device)
    for start in range(0, rows, ROWS):
        part = q[:, :, start : start + ROWS].view(batch, heads, group, -1, dim).float() * softmax.scale
        first, count = left + before + band.low + start, part.shape[3]
        spans = [slice(first + step, first + step + count) for step in range(band.width)]
        scores = torch.stack([(part * k[:, :, None, span]).sum(dim=-1) for span in spans])  # [W, B, H, G, R]
        if softmax.softcap is not None:
            scores = scores.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
        for score, span in zip(scores, spans, strict=True):
            score.masked_fill_(~there[span], -torch.inf)
        rest = base[:, :, start : start + ROWS].view(batch, heads, group, -1)
        scores -= torch.logaddexp(rest, scores.logsumexp(dim=0)) + less[:, :, None, start : start + ROWS]
        for score, span in zip(scores, spans, strict=True):
            best[..., span] = torch.where(there[span], best[..., span].fmax(score), -torch.inf)
    return best[..., left : left + keys].reshape(batch, heads * group, keys)
