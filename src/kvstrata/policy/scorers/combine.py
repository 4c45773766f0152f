"""Scorers made of other scorers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.echo import Band
from kvstrata.kernels.mass import Summing
from kvstrata.policy.scorers import SCORERS, Scorer


@dataclass(frozen=True, slots=True)
class Part:
    """A scorer and what it weighs."""

    weight: float
    scorer: Scorer


@SCORERS.add("mix")
@dataclass(frozen=True, slots=True)
class Mix:
    """Weighted sum of scores, each brought to 0 .. 1 over the entries that may be dropped (min-max, row by row).

    A score that is the same for all of them counts 0. Parts may read attention if they read it alike.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise SpecError("mix needs at least one part")
        if len({part.scorer.mass for part in self.parts if part.scorer.mass}) > 1:
            raise SpecError("the parts of a mix must sum attention in the same way: give at most one such scorer")
        kinds = [(bool(part.scorer.columns), part.scorer.mass is not None) for part in self.parts]
        if (False, True) in kinds and any(keeps for keeps, _ in kinds):
            raise SpecError("a scorer that keeps numbers cannot be mixed with one that reads one forward's attention")
        if len({part.scorer.asks for part in self.parts if part.scorer.asks}) > 1:
            raise SpecError("the parts of a mix must ask in the same way: give at most one echo")

    @property
    def needs(self) -> frozenset[str]:
        """What any part reads."""
        return frozenset().union(*(part.scorer.needs for part in self.parts))

    @property
    def mass(self) -> Summing | None:
        """How the parts that read attention sum it."""
        return next((part.scorer.mass for part in self.parts if part.scorer.mass), None)

    @property
    def asks(self) -> Band | None:
        """Who asks for entries, if a part says so."""
        return next((part.scorer.asks for part in self.parts if part.scorer.asks), None)

    @property
    def surrogate(self) -> str | None:
        """Whose word a part takes."""
        return next((part.scorer.surrogate for part in self.parts if part.scorer.surrogate), None)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the parts keep."""
        return tuple(dict.fromkeys(column for part in self.parts for column in part.scorer.columns))

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Let every part observe."""
        return {name: value for part in self.parts for name, value in part.scorer.observe(signals).items()}

    def score(self, signals: Signals) -> Tensor:
        """The weighted sum."""
        candidates = signals.valid & ~signals.protected
        return torch.stack([p.weight * _unit(p.scorer.score(signals), candidates) for p in self.parts]).sum(dim=0)


def _unit(z: Tensor, candidates: Tensor) -> Tensor:
    """Bring z [B, 1|H, N] to 0 .. 1 over the candidates; NaN stays NaN, and infinities move no others."""
    counted = candidates & z.isfinite()
    low = z.masked_fill(~counted, torch.inf).amin(dim=-1, keepdim=True)
    span = z.masked_fill(~counted, -torch.inf).amax(dim=-1, keepdim=True) - low
    flat = (span <= 0) | ~span.isfinite()
    unit = torch.where(flat & z.isfinite(), 0.0, ((z - low) / span).clamp(0.0, 1.0))
    return torch.where(z.isinf(), (z > 0).to(unit.dtype), unit)
