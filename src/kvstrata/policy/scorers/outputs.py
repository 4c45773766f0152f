"""Scorers that ask what an entry adds to the output of attention, or how it differs from what came after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.echo import Band
from kvstrata.kernels.mass import Future, Summing
from kvstrata.policy.scorers import SCORERS, Scorer, Stateless
from kvstrata.policy.select import select


@SCORERS.add("critical")
@dataclass(frozen=True, slots=True)
class Critical:
    """Another scorer's best for a `first` part of the budget, the rest by (score + epsilon) * |W_O v| (CriticalKV).

    arXiv:2502.03805, Algorithm 1; its norm is the sum of absolute values, ours the Euclidean one, which needs no copy
    of the projection.
    """

    scorer: Scorer
    first: Fraction = Fraction(1, 2)
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise SpecError(f"first={float(self.first)}: give the part of the budget that goes by score alone, 0 to 1")

    @property
    def needs(self) -> frozenset[str]:
        """What the scorer reads, the norms and the budget."""
        return self.scorer.needs | {"added", "caps"}

    @property
    def mass(self) -> Summing | None:
        """As the scorer has it."""
        return self.scorer.mass

    @property
    def asks(self) -> Band | None:
        """As the scorer has it."""
        return self.scorer.asks

    @property
    def surrogate(self) -> str | None:
        """As the scorer has it."""
        return self.scorer.surrogate

    @property
    def columns(self) -> tuple[Column, ...]:
        """The scorer's."""
        return self.scorer.columns

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Let the scorer observe."""
        return self.scorer.observe(signals)

    def score(self, signals: Signals) -> Tensor:
        """Infinite for the first part."""
        assert signals.added is not None
        assert signals.caps is not None
        z, shape = self.scorer.score(signals), signals.position.shape
        protected, valid = signals.protected.expand(shape), signals.valid.expand(shape)
        part = (signals.caps.double() * float(self.first)).long()
        best = select(z.expand(shape), signals.position, part, protected, valid) & (part > 0)[..., None]
        return ((z + self.epsilon) * signals.added).masked_fill(best, torch.inf)


@SCORERS.add("expected")
@dataclass(frozen=True, slots=True)
class Expected(Stateless):
    """Attention that queries to come are expected to give, times the norm of the value (arXiv:2510.00636).

    weight: "v" the value's norm, as published; "wov" that of what the output projection makes of it.
    """

    positions: int = 512
    sinks: int = 4
    weight: Literal["v", "wov", "none"] = "v"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.positions < 1 or self.sinks < 0:
            raise SpecError(f"positions={self.positions}, sinks={self.sinks}: give 1 or more, and 0 or more")

    @property
    def needs(self) -> frozenset[str]:
        """Rotary positions, and what weighs."""
        return frozenset({"rotary"} | {"v": {"values"}, "wov": {"added"}, "none": set[str]()}[self.weight])

    @property
    def mass(self) -> Future:
        """The expectation."""
        return Future(self.positions, self.sinks)

    def score(self, signals: Signals) -> Tensor:
        """Expected attention times the norm."""
        assert signals.mass is not None
        if self.weight == "none":
            return signals.mass
        values = signals.values
        norm = signals.added if values is None else torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
        assert norm is not None
        return (signals.mass + self.epsilon) * norm


@SCORERS.add("lag")
@dataclass(frozen=True, slots=True)
class Lag(Stateless):
    """How an entry's channels stand out of the range of the next `lag` entries (LagKV, arXiv:2504.04704, section 3).

    Behind the first `sinks` entries, in parts of `lag`: each part is brought to the range of the next one, channel by
    channel; the spread over channels, softmax over the part, keys and values averaged, then the rank within the part,
    so that every part keeps as many. The last part and what is left of one stay before anything else.
    """

    lag: int = 128
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.lag < 2 or self.sinks < 0:
            raise SpecError(f"lag={self.lag}, sinks={self.sinks}: give parts of 2 or more, and 0 or more sinks")

    @property
    def needs(self) -> frozenset[str]:
        """Reads keys and values."""
        return frozenset({"keys", "values"})

    def score(self, signals: Signals) -> Tensor:
        """The rank in its part, 0 to 1; 1 and more, newer first, where no part follows."""
        assert signals.keys is not None
        assert signals.values is not None
        batch, heads = signals.keys.shape[:2]
        position, valid = (t.expand(batch, heads, -1) for t in (signals.position, signals.valid))
        z = 2.0 + position.float() / (1 + position.amax(dim=-1, keepdim=True))
        for row in range(batch):
            for head in range(heads):
                order = position[row, head].masked_fill(~valid[row, head], torch.iinfo(torch.int32).max).argsort()
                order = order[self.sinks : int(valid[row, head].sum())]
                parts = len(order) // self.lag
                if parts < 2:
                    continue
                order = order[: parts * self.lag]
                found = sum(self._spread(t[row, head][order]) for t in (signals.keys, signals.values))
                assert isinstance(found, Tensor)
                z[row, head, order[: -self.lag]] = found.argsort(dim=-1).argsort(dim=-1).flatten() / self.lag
        return z

    def _spread(self, x: Tensor) -> Tensor:
        """x [P*lag, D] in order of position -> [P-1, lag]."""
        parts = x.float().unflatten(0, (-1, self.lag))
        after = parts[1:]
        low, high = after.amin(dim=1, keepdim=True), after.amax(dim=1, keepdim=True)
        return ((parts[:-1] - low) / (high - low).clamp_min(1e-12)).std(dim=-1).softmax(dim=-1)
