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

LEAST = 1e-12  # range of a channel that is the same in all of a part


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
        if self.scorer.mass is None:
            raise SpecError("critical multiplies scores by norms, so they must be attention, as those of window-mass")
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
        z = self.scorer.score(signals)
        position, protected, valid = (t.expand(z.shape) for t in (signals.position, signals.protected, signals.valid))
        part = (signals.caps.double() * float(self.first)).long()
        best = select(z, position, part, protected, valid) & (part > 0)[..., None]
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
        """Expected attention times the norm; infinite for sinks."""
        assert signals.mass is not None
        worth = signals.mass
        if self.weight != "none":
            values = signals.values
            norm = signals.added if values is None else torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)
            assert norm is not None
            worth = (worth + self.epsilon) * norm
        return worth.masked_fill(signals.position < self.sinks, torch.inf)


@SCORERS.add("lag")
@dataclass(frozen=True, slots=True)
class Lag(Stateless):
    """How an entry's channels stand out of the range of the next `lag` entries (LagKV, arXiv:2504.04704, section 3).

    Behind the first `sinks` entries, in parts of `lag`: each part is brought to the range of the next one, channel by
    channel; the spread over channels, softmax over the part, keys and values averaged, then the rank within the part,
    so that every part keeps as many. Sinks, the last part and what is left of one stay before anything else.
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
        """The rank in its part, 0 to 1; 1 and more, newer first, where no part follows; infinite for sinks."""
        assert signals.keys is not None
        assert signals.values is not None
        batch, heads = signals.keys.shape[:2]
        position, valid = (t.expand(batch, heads, -1) for t in (signals.position, signals.valid))
        z = 2.0 + position.float() / (1 + position.amax(dim=-1, keepdim=True))
        z = z.masked_fill(position < self.sinks, torch.inf).flatten(0, 1)
        order = position.masked_fill(~valid, torch.iinfo(torch.int32).max).argsort(dim=-1).flatten(0, 1)
        lengths: list[int] = valid.sum(dim=-1).flatten().tolist()
        states = [t.flatten(0, 1) for t in (signals.keys, signals.values)]
        for length in set(lengths):  # one for prompts of one length
            parts = (length - self.sinks) // self.lag
            if parts < 2:
                continue
            segments = torch.tensor([s for s, n in enumerate(lengths) if n == length], device=z.device)[:, None]
            ranked = order[segments[:, 0], self.sinks : self.sinks + parts * self.lag]
            keys, values = (self._spread(t[segments, ranked]) for t in states)
            rank = (keys + values).argsort(dim=-1).argsort(dim=-1).flatten(1) / self.lag
            z[segments, ranked[:, : -self.lag]] = rank
        return z.unflatten(0, (batch, heads))

    def _spread(self, x: Tensor) -> Tensor:
        """x [S, P*lag, D] in order of position -> [S, P-1, lag]."""
        parts = x.float().unflatten(1, (-1, self.lag))
        after = parts[:, 1:]
        low, high = after.amin(dim=2, keepdim=True), after.amax(dim=2, keepdim=True)
        return ((parts[:, :-1] - low) / (high - low).clamp_min(LEAST)).std(dim=-1).softmax(dim=-1)
