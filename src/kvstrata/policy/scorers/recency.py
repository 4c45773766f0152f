"""Scorers that look at positions alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvstrata.core import Signals
from kvstrata.policy.chance import uniform
from kvstrata.policy.scorers import SCORERS, Stateless


@SCORERS.add("recency")
@dataclass(frozen=True, slots=True)
class Recency(Stateless):
    """Newer is better."""

    def score(self, signals: Signals) -> Tensor:
        """Position as the score."""
        return signals.position.float()


@SCORERS.add("random")
@dataclass(frozen=True, slots=True)
class Random(Stateless):
    """A new draw for every entry at every step: the control that any scorer must beat.

    The draw is a hash of (seed, layer, step, position), so a row gets the same draws alone and in a batch.
    """

    seed: int = 0

    def score(self, signals: Signals) -> Tensor:
        """Uniform in [0, 1)."""
        return uniform(signals.position, self.seed, signals.layer, signals.step)
