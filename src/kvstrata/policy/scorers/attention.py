"""Scorers that read attention mass, as the kernel returns it: no attention matrix is ever kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvstrata.core import Column, Signals, SpecError
from kvstrata.policy.scorers import SCORERS, Stateless

ALL_ROWS = -1  # every query of a forward


def _mass(signals: Signals, heads: int) -> Tensor:
    """This forward's mass [B, 1|H, N], averaged over heads where the layer's entries are shared by them."""
    assert signals.mass is not None
    return signals.mass if heads > 1 else signals.mass.mean(dim=1, keepdim=True)


@SCORERS.add("accumulated-mass")
@dataclass(frozen=True, slots=True)
class AccumulatedMass(Stateless):
    """Attention received so far from every query (H2O, arXiv:2306.14048, section 4.1), never reset."""

    @property
    def needs(self) -> frozenset[str]:
        """Reads the mass of every query."""
        return frozenset({"mass"})

    @property
    def mass_rows(self) -> int:
        """Every query of a forward counts."""
        return ALL_ROWS

    @property
    def columns(self) -> tuple[Column, ...]:
        """The running sum."""
        return (Column("mass", torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Add this forward's mass."""
        column = signals.columns["mass"]
        return {"mass": column + _mass(signals, column.shape[1])}

    def score(self, signals: Signals) -> Tensor:
        """The running sum."""
        return signals.columns["mass"]


@SCORERS.add("window-mass")
@dataclass(frozen=True, slots=True)
class WindowMass(Stateless):
    """Attention from the last `rows` queries of this forward, smoothed over `pool` neighbouring keys.

    rows=1, pool=1 is TOVA's score (arXiv:2401.06104); rows=32, pool=5 is SnapKV's (arXiv:2404.14469, section 4).
    Protected entries add nothing to their neighbours.
    """

    rows: int = 32
    pool: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise SpecError(f"rows={self.rows}: the window needs at least one query")
        if self.pool < 1 or self.pool % 2 == 0:
            raise SpecError(f"pool={self.pool} has no middle: give an odd number")

    @property
    def needs(self) -> frozenset[str]:
        """Reads mass."""
        return frozenset({"mass"})

    @property
    def mass_rows(self) -> int:
        """The last `rows` queries."""
        return self.rows

    def score(self, signals: Signals) -> Tensor:
        """Pooled mass; zeros outside a row count as neighbours at both ends, as in the published code."""
        mass = _mass(signals, signals.position.shape[1])
        if self.pool == 1:
            return mass
        order = signals.position.masked_fill(~signals.valid, torch.iinfo(torch.int32).max).argsort(dim=-1)
        candidates = mass.masked_fill(signals.protected, 0.0).gather(-1, order)
        pooled = avg_pool1d(candidates, self.pool, stride=1, padding=self.pool // 2)
        return torch.empty_like(mass).scatter_(-1, order, pooled)
