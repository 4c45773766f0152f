"""Scorers that ask what a repetition of the context would attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.echo import MOST_SINKS, WIDEST, Band, Weight
from kvstrata.policy.scorers import SCORERS, Stateless

ASKED = Column("asked", torch.float32)  # what an entry is worth to the queries that asked for it; 0 while none did
LOUDNESS = Column("loudness", torch.float32)  # ln of the norm of its token's hidden state, written with the entry


@SCORERS.add("echo")
@dataclass(frozen=True, slots=True)
class Echo(Stateless):
    """What the context's own queries would give an entry if they stood `shift` positions later, in a repetition.

    Each entry is asked for by the queries of its neighbours, at offsets `low` to `high`, next to the first `sinks`
    tokens and to all that the query saw itself. weight="u*wov" multiplies the largest probability by the norm of what
    the output projection makes of the value; "u+" divides each query's by the norm of its hidden state besides, as
    KVzip+ does. The cache asks (docs/methods.md, "echo"); needs rotary positions.
    """

    low: int = -4
    high: int = 4
    shift: int = 512
    sinks: int = 4
    weight: Weight = "u*wov"

    def __post_init__(self) -> None:
        if not 0 <= self.high - self.low < WIDEST:
            raise SpecError(f"low={self.low}, high={self.high}: give a band of 1 to {WIDEST} offsets")
        if self.shift < 1:
            raise SpecError(f"shift={self.shift}: a repetition comes later, so give 1 or more")
        if not 0 <= self.sinks <= MOST_SINKS:
            raise SpecError(f"sinks={self.sinks}: give 0 to {MOST_SINKS}")

    @property
    def needs(self) -> frozenset[str]:
        """Turned queries, and what weighs."""
        return frozenset({"turn", *{"u": (), "u*wov": ("outputs",), "u+": ("outputs", "hidden")}[self.weight]})

    @property
    def asks(self) -> Band:
        """Who asks for an entry."""
        return Band(self.low, self.high, self.shift, self.sinks, self.weight)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What was asked so far, and what queries are divided by."""
        return (ASKED, LOUDNESS) if self.weight == "u+" else (ASKED,)

    def score(self, signals: Signals) -> Tensor:
        """Its logarithm."""
        return signals.columns[ASKED.name].log()
