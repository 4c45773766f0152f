"""Scorers that read how attention is spread over queries, not only how much there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Signals, SpecError
from kvstrata.kernels.mass import Moments
from kvstrata.kernels.mass.moments import LARGEST, MEAN, VARIANCE
from kvstrata.policy.scorers import SCORERS, Stateless
from kvstrata.policy.scorers.attention import check_window, pooled

TINY = 1e-30


@SCORERS.add("mean-variance")
@dataclass(frozen=True, slots=True)
class MeanVariance(Stateless):
    """Mean + gamma * variance of the attention from the last `rows` queries of this forward, smoothed over `pool` keys.

    The eviction indicator of CAKE (arXiv:2503.12491, section 4.2): what the queries attend to now and then stays too.
    """

    rows: int = 32
    pool: int = 5
    gamma: float = 200.0

    def __post_init__(self) -> None:
        check_window(self.rows, self.pool)

    @property
    def mass(self) -> Moments:
        """Mean and variance over the last `rows` queries."""
        return Moments(self.rows)

    def score(self, signals: Signals) -> Tensor:
        """Pooled; protected entries add nothing to their neighbours."""
        assert signals.mass is not None
        worth = signals.mass[..., MEAN] + self.gamma * signals.mass[..., VARIANCE]
        if signals.position.shape[1] == 1:
            worth = worth.mean(dim=1, keepdim=True)
        return pooled(worth, signals, self.pool)


@SCORERS.add("defensive")
@dataclass(frozen=True, slots=True)
class Defensive(Stateless):
    """The most attention that any query of the window gives, not the mean: what may be needed (DefensiveKV).

    arXiv:2510.13334, section 4. Smoothed over `pool` keys, never under its own mean, times the share that a head has
    of what all heads' projections make of the token's values. Before anything else come the tokens with most mean
    attention, until they and the window have a `sure` part of it.
    """

    rows: int = 32
    pool: int = 5
    sure: float = 0.9

    def __post_init__(self) -> None:
        check_window(self.rows, self.pool)
        if not 0 <= self.sure <= 1:
            raise SpecError(f"sure={self.sure}: give a part of the attention, 0 to 1")

    @property
    def needs(self) -> frozenset[str]:
        """What projections make of values, and the budget."""
        return frozenset({"added", "caps"})

    @property
    def mass(self) -> Moments:
        """The window's mean and largest attention."""
        return Moments(self.rows)

    def score(self, signals: Signals) -> Tensor:
        """Infinite for what comes first."""
        assert signals.mass is not None
        assert signals.added is not None
        free = (signals.valid & ~signals.protected).expand(signals.mass.shape[:3])
        largest = signals.mass[..., LARGEST].masked_fill(~free, 0.0)
        smooth = pooled(largest, signals, self.pool).masked_fill(~free, 0.0)
        smooth *= largest.sum(dim=-1, keepdim=True) / smooth.sum(dim=-1, keepdim=True).clamp_min(TINY)
        floor = smooth.sum(dim=-1, keepdim=True) / free.sum(dim=-1, keepdim=True).clamp_min(1)
        weight = signals.added / _over_heads(signals.added, signals).clamp_min(TINY)
        return (torch.maximum(smooth, floor) * weight).masked_fill(self._first(signals, free), torch.inf)

    def _first(self, signals: Signals, free: Tensor) -> Tensor:
        """Which entries [B, H, N] of `free` ones come before anything else."""
        assert signals.mass is not None
        assert signals.caps is not None
        mean = signals.mass[..., MEAN].masked_fill(~signals.valid, 0.0)
        window = mean.masked_fill(free, 0.0).sum(dim=-1, keepdim=True)
        mean = mean.masked_fill(~free, 0.0)
        share, order = mean.sort(dim=-1, descending=True, stable=True)
        share = share / share.sum(dim=-1, keepdim=True).clamp_min(TINY)
        count = (share.cumsum(dim=-1) < self.sure - window).sum(dim=-1, keepdim=True)
        room = signals.caps[..., None] - (signals.valid & ~free).sum(dim=-1, keepdim=True)
        first = torch.arange(mean.shape[-1], device=mean.device) < torch.minimum(count, room)
        return torch.zeros_like(free).scatter_(-1, order, first) & free


def _over_heads(x: Tensor, signals: Signals) -> Tensor:
    """Sums of x [B, H, N] over the heads that hold a token, for each of their entries: slots say nothing of tokens."""
    position = signals.position.long().masked_fill(~signals.valid, 0).expand(x.shape).flatten(1)
    x = x.masked_fill(~signals.valid, 0.0)
    sums = x.new_zeros(x.shape[0], int(position.amax()) + 1 if position.numel() else 1)
    return sums.scatter_add_(1, position, x.flatten(1)).gather(1, position).view(x.shape)
