"""Scorers that read attention mass, as the kernel returns it: no attention matrix is ever kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvstrata.core import Column, Signals, SpecError
from kvstrata.kernels.mass import ALL_ROWS, Reduction
from kvstrata.policy.scorers import SCORERS, Stateless

NEGLIGIBLE = 1e-4  # weight under which an old query no longer counts


def _mass(signals: Signals, heads: int) -> Tensor:
    """This forward's mass [B, 1|H, N], averaged over heads where the layer's entries are shared by them."""
    assert signals.mass is not None
    return signals.mass if heads > 1 else signals.mass.mean(dim=1, keepdim=True)


def _added(signals: Signals, name: str, keep: float, gain: float) -> Mapping[str, Tensor]:
    """A column after this forward: keep^queries * column + gain * mass."""
    column = signals.columns[name]
    mass = _mass(signals, column.shape[1])
    if keep != 1.0:
        faded = [keep**queries for queries in signals.queries]
        alike = len(set(faded)) == 1
        column = column * (faded[0] if alike else torch.tensor(faded, device=column.device)[:, None, None])
    return {name: column + (mass if gain == 1.0 else mass * gain)}


@SCORERS.add("accumulated-mass")
@dataclass(frozen=True, slots=True)
class AccumulatedMass(Stateless):
    """Attention received so far from every query (H2O, arXiv:2306.14048, section 4.1), never reset."""

    @property
    def mass(self) -> Reduction:
        """Every query of a forward counts."""
        return Reduction(ALL_ROWS)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The running sum."""
        return (Column("mass", torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Add this forward's mass."""
        return _added(signals, "mass", 1.0, 1.0)

    def score(self, signals: Signals) -> Tensor:
        """The running sum."""
        return signals.columns["mass"]


@SCORERS.add("decayed-mass")
@dataclass(frozen=True, slots=True)
class DecayedMass(Stateless):
    """Moving average of the attention received: ema = decay * ema + (1 - decay) * mass, query by query.

    The state of CONF-KV (arXiv:2605.24786, Algorithm 1). Of a prompt only the last queries that weigh 1e-4 or more
    are looked at, 88 of them for decay 0.9.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise SpecError(f"decay={self.decay}: give a number between 0 and 1")

    @property
    def mass(self) -> Reduction:
        """The newest queries, older ones fading."""
        return Reduction(math.ceil(math.log(NEGLIGIBLE) / math.log(self.decay)), decay=self.decay)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The average."""
        return (Column("ema", torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Fade by the queries of this forward, then add their mass."""
        return _added(signals, "ema", self.decay, 1 - self.decay)

    def score(self, signals: Signals) -> Tensor:
        """The average."""
        return signals.columns["ema"]


@SCORERS.add("persistence")
@dataclass(frozen=True, slots=True)
class Persistence(Stateless):
    """How often an entry got more than an even share of attention (Scissorhands, arXiv:2305.17118, Algorithm 2).

    Exact over the last `history` queries of a forward; what came before fades with the same mean age, so that one
    number per entry is kept instead of `history` bits.
    """

    history: int = 400

    def __post_init__(self) -> None:
        if self.history < 2:
            raise SpecError(f"history={self.history}: give at least two queries")

    @property
    def mass(self) -> Reduction:
        """Counts over the last `history` queries."""
        return Reduction(self.history, counts=True)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The count."""
        return (Column("count", torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Fade, then count this forward's queries."""
        return _added(signals, "count", 1 - 1 / self.history, 1.0)

    def score(self, signals: Signals) -> Tensor:
        """The count."""
        return signals.columns["count"]


@SCORERS.add("window-mass")
@dataclass(frozen=True, slots=True)
class WindowMass(Stateless):
    """Attention from the last `rows` queries of this forward, smoothed over `pool` neighbouring keys.

    rows=1, pool=1 is TOVA's score (arXiv:2401.06104); rows=32, pool=5 is SnapKV's (arXiv:2404.14469, section 4);
    rows=8, pool=7, kind="max" is PyramidKV's (arXiv:2406.02069). Protected entries add nothing to their neighbours.
    """

    rows: int = 32
    pool: int = 1
    kind: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise SpecError(f"rows={self.rows}: the window needs at least one query")
        if self.pool < 1 or self.pool % 2 == 0:
            raise SpecError(f"pool={self.pool} has no middle: give an odd number")

    @property
    def mass(self) -> Reduction:
        """The last `rows` queries."""
        return Reduction(self.rows)

    def score(self, signals: Signals) -> Tensor:
        """Pooled mass; zeros outside a row count as neighbours at both ends, as in the published code."""
        mass = _mass(signals, signals.position.shape[1])
        if self.pool == 1:
            return mass
        order = signals.position.masked_fill(~signals.valid, torch.iinfo(torch.int32).max).argsort(dim=-1)
        candidates = mass.masked_fill(signals.protected, 0.0).gather(-1, order)
        pool = avg_pool1d if self.kind == "mean" else max_pool1d
        pooled = pool(candidates, self.pool, stride=1, padding=self.pool // 2)
        return torch.empty_like(mass).scatter_(-1, order, pooled)
