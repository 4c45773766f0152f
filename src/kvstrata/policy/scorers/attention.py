"""Scorers that read attention mass, as the kernel returns it: no attention matrix is ever kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

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


def _could_see(signals: Signals) -> Tensor:
    """How many queries of the text could see each entry [B, 1|H, N]."""
    position = signals.position.masked_fill(~signals.valid, -1)
    return position.amax(dim=(1, 2), keepdim=True) + 1 - position


class _Running(Stateless):
    """One number per entry, the score: `keep` of itself at every query, plus `gain` times the mass of a forward."""

    __slots__ = ()
    column: ClassVar[str]

    @property
    def keep(self) -> float:
        """What stays of the number at every query."""
        return 1.0

    @property
    def gain(self) -> float:
        """What mass weighs."""
        return 1.0

    @property
    def columns(self) -> tuple[Column, ...]:
        """The number."""
        return (Column(self.column, torch.float32),)

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Fade by the queries of this forward, then add their mass."""
        number = signals.columns[self.column]
        mass = _mass(signals, number.shape[1])
        if self.keep != 1.0:
            faded = [self.keep**queries for queries in signals.queries]
            alike = len(set(faded)) == 1
            number = number * (faded[0] if alike else torch.tensor(faded, device=number.device)[:, None, None])
        return {self.column: number + (mass if self.gain == 1.0 else mass * self.gain)}

    def score(self, signals: Signals) -> Tensor:
        """The number."""
        return signals.columns[self.column]


@SCORERS.add("accumulated-mass")
@dataclass(frozen=True, slots=True)
class AccumulatedMass(_Running):
    """Attention received so far from every query (H2O, arXiv:2306.14048, section 4.1), never reset.

    decay: what stays of it at every query. per_query: divided by the number of queries that could see the entry, as
    sums favour old ones.
    """

    column = "mass"
    decay: float = 1.0
    per_query: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise SpecError(f"decay={self.decay}: give a number above 0 and up to 1")

    @property
    def mass(self) -> Reduction:
        """Every query of a forward counts."""
        return Reduction(ALL_ROWS, decay=self.decay)

    @property
    def keep(self) -> float:
        """What stays of the sum at every query."""
        return self.decay

    def score(self, signals: Signals) -> Tensor:
        """The sum, or what it is per query."""
        total = signals.columns[self.column]
        if not self.per_query:
            return total
        return total / _could_see(signals)


@SCORERS.add("decayed-mass")
@dataclass(frozen=True, slots=True)
class DecayedMass(_Running):
    """Moving average of the attention received: ema = decay * ema + (1 - decay) * mass, query by query.

    The state of CONF-KV (arXiv:2605.24786, Algorithm 1). Of a prompt only the last queries that weigh 1e-4 or more
    are looked at, 88 of them for decay 0.9. debias: divided by 1 - decay^n for an entry that n queries could see,
    since young ones start from 0.
    """

    column = "ema"
    decay: float = 0.9
    debias: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.decay < 1:
            raise SpecError(f"decay={self.decay}: give a number between 0 and 1")

    @property
    def mass(self) -> Reduction:
        """The newest queries, older ones fading."""
        return Reduction(math.ceil(math.log(NEGLIGIBLE) / math.log(self.decay)), decay=self.decay)

    @property
    def keep(self) -> float:
        """What stays of the average at every query."""
        return self.decay

    @property
    def gain(self) -> float:
        """What a query adds."""
        return 1 - self.decay

    def score(self, signals: Signals) -> Tensor:
        """The average, or what it would be had it not started from 0."""
        average = signals.columns[self.column]
        return average / (1 - self.decay ** _could_see(signals)) if self.debias else average


@SCORERS.add("persistence")
@dataclass(frozen=True, slots=True)
class Persistence(_Running):
    """How often an entry got more than an even share of attention (Scissorhands, arXiv:2305.17118, Algorithm 2).

    Exact over the last `history` queries of a forward; what came before fades with the same mean age, so that one
    number per entry is kept instead of `history` bits.
    """

    column = "count"
    history: int = 400

    def __post_init__(self) -> None:
        if self.history < 2:
            raise SpecError(f"history={self.history}: give at least two queries")

    @property
    def mass(self) -> Reduction:
        """Counts over the last `history` queries."""
        return Reduction(self.history, counts=True)

    @property
    def keep(self) -> float:
        """Counts fade with the mean age that a window of `history` queries has."""
        return 1 - 1 / self.history


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
        check_window(self.rows, self.pool)

    @property
    def mass(self) -> Reduction:
        """The last `rows` queries."""
        return Reduction(self.rows)

    def score(self, signals: Signals) -> Tensor:
        """Pooled mass; zeros outside a row count as neighbours at both ends, as in the published code."""
        return pooled(_mass(signals, signals.position.shape[1]), signals, self.pool, self.kind)


def check_window(rows: int, pool: int) -> None:
    """Raise `SpecError` for a window without queries or a pool without a middle."""
    if rows < 1:
        raise SpecError(f"rows={rows}: the window needs at least one query")
    if pool < 1 or pool % 2 == 0:
        raise SpecError(f"pool={pool} has no middle: give an odd number")


def pooled(mass: Tensor, signals: Signals, pool: int, kind: Literal["mean", "max"] = "mean") -> Tensor:
    """Mass [B, 1|H, N] smoothed over `pool` neighbours in position, to which protected entries and ends add nothing."""
    if pool == 1:
        return mass
    position = signals.position.masked_fill(~signals.valid, torch.iinfo(torch.int32).max)
    order = position.argsort(dim=-1).expand(mass.shape)
    candidates = mass.masked_fill(signals.protected, 0.0).gather(-1, order)
    smooth = avg_pool1d if kind == "mean" else max_pool1d
    return torch.empty_like(mass).scatter_(-1, order, smooth(candidates, pool, stride=1, padding=pool // 2))
