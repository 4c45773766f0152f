"""A scorer that reads how attention is spread over queries, not only how much there is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvstrata.core import Signals, SpecError
from kvstrata.kernels.mass import Moments
from kvstrata.kernels.mass.moments import MEAN, VARIANCE
from kvstrata.policy.scorers import SCORERS, Stateless
from kvstrata.policy.scorers.attention import pooled


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
        if self.rows < 1:
            raise SpecError(f"rows={self.rows}: the window needs at least one query")
        if self.pool < 1 or self.pool % 2 == 0:
            raise SpecError(f"pool={self.pool} has no middle: give an odd number")

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
