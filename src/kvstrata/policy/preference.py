"""Budgets that layers divide by what their attention over the prompt looked like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvstrata.core import Column, LayerShape, Signals, SpecError
from kvstrata.kernels.mass import Moments, Summing
from kvstrata.kernels.mass.moments import ENTROPY, VARIANCE
from kvstrata.policy.budget import Budget, HeadTokens, Shaped

SHARE = Column("share", torch.float32)  # 1 + a row's share of the layer, the same in all its entries; 0 while unknown


ROUNDING = 1e-3  # of an entry: shares are kept in fp32, and must give back the whole numbers they came from


class Preference(Protocol):
    """What the layers of a cache divide a budget by."""

    def measure(self, signals: Signals) -> Tensor:
        """One number per row [B] of a layer, from what its rule's scorer reads."""
        ...

    def weights(self, measures: Sequence[float]) -> list[float]:
        """What each layer's share is in proportion to; none is below 0."""
        ...

    def fits(self, mass: Summing | None, columns: Sequence[Column]) -> bool:
        """Whether a scorer that reads and keeps these gives what is measured."""
        ...


@dataclass(frozen=True, slots=True)
class BySpread:
    """Entropy^(1/tau1) * variance^(1/tau2) of the attention of a window (CAKE, arXiv:2503.12491, section 4.1).

    Both are sums over what stands before the newest `rows` tokens, for a scorer that reads `Moments`.
    """

    rows: int = 32
    tau1: float = 1.6
    tau2: float = 0.6

    def __post_init__(self) -> None:
        if self.tau1 <= 0 or self.tau2 <= 0:
            raise SpecError(f"tau1={self.tau1}, tau2={self.tau2}: give numbers above 0")

    def measure(self, signals: Signals) -> Tensor:
        """The product, [B] fp64."""
        assert signals.mass is not None
        position = signals.position.masked_fill(~signals.valid, -1)
        newest = pad(position.flatten(1), (0, 1), value=-1).amax(dim=1)[:, None, None]  # also where nothing is stored
        before = signals.valid & (position <= newest - self.rows)
        sums = (signals.mass.double() * before[..., None]).sum(dim=(1, 2))
        return sums[:, ENTROPY] ** (1 / self.tau1) * sums[:, VARIANCE] ** (1 / self.tau2)

    def weights(self, measures: Sequence[float]) -> list[float]:
        """The products themselves."""
        return list(measures)

    def fits(self, mass: Summing | None, columns: Sequence[Column]) -> bool:
        """It needs moments."""
        return isinstance(mass, Moments)


@dataclass(frozen=True, slots=True)
class ByDensity:
    """e^(-alpha * v), v the variance of what keys received over its mean over layers (after D2O, arXiv:2406.13035).

    Even attention gets more. For a scorer that keeps sums of attention in the column "mass".
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.alpha < 0:
            raise SpecError(f"alpha={self.alpha}: give 0 (all layers alike) or more")

    def measure(self, signals: Signals) -> Tensor:
        """Variance over entries of the attention that they received per query, mean over heads, [B] fp64."""
        mass = signals.columns["mass"].double().masked_fill(~signals.valid, 0.0)
        count = signals.valid.sum(dim=-1).clamp_min(1)
        mass = mass / mass.sum(dim=-1, keepdim=True)
        return ((mass**2).sum(dim=-1) / count - 1.0 / count.double() ** 2).mean(dim=1)

    def weights(self, measures: Sequence[float]) -> list[float]:
        """Between 0 and 1."""
        mean = sum(measures) / len(measures)
        return [math.exp(-self.alpha * v / mean) if mean > 0 else 1.0 for v in measures]

    def fits(self, mass: Summing | None, columns: Sequence[Column]) -> bool:
        """It needs sums of attention."""
        return any(column.name == "mass" for column in columns)


@dataclass(frozen=True, slots=True)
class ByPreference(Shaped):
    """What `base` gives is the mean over layers; each has `own` tokens of it, and of the rest what its prompt earned.

    Shares are set at the end of a prompt, when all layers have attended, by the rules that have a `preference`; later
    budgets follow them. Until then, and for a prompt that fits, every layer has the mean.
    """

    base: Budget
    preference: Preference | None = None
    own: int = 32

    def __post_init__(self) -> None:
        if self.own < 0:
            raise SpecError(f"own={self.own}: give 0 or more")
        if isinstance(self.base, HeadTokens):
            raise SpecError(f"budget={self.base}: layers divide one number for all heads, so give one")

    def check(self, mass: Summing | None, columns: Sequence[Column]) -> None:
        """Raise `SpecError` where a scorer that reads and keeps these does not tell what to divide by."""
        if self.preference and not self.preference.fits(mass, columns):
            raise SpecError(f"{type(self.preference).__name__} cannot be measured by this scorer: leave it out")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """The mean."""
        return self.base.limits(seen, confidence, shape)

    def around(self, mean: Budget) -> ByPreference:
        """The same shares of another mean."""
        return replace(self, base=self.base.around(mean))

    def scaled(self, factor: Fraction) -> ByPreference:
        """The mean scaled."""
        return replace(self, base=self.base.scaled(factor))

    def shared(self, mean: int, share: float) -> int:
        """What a layer may keep where the mean is `mean`."""
        own = self._own(mean)
        return max(1, own + int(share * (mean - own) + ROUNDING))

    def shares(self, measures: Sequence[float], mean: int, seen: int) -> list[float]:
        """Shares of layers by their measures, 1 on average; none gets more than the `seen` tokens that there are."""
        assert self.preference is not None
        own = self._own(mean)
        if seen <= mean or mean == own:
            return [1.0] * len(measures)
        counts = divided(self.preference.weights(measures), (mean - own) * len(measures), seen - own)
        return [count / (mean - own) for count in counts]

    def _own(self, mean: int) -> int:
        return min(self.own, mean // 2)


def carried(signals: Signals) -> dict[str, Tensor]:
    """The column of a layer's shares, new entries included, as those that have them now may go."""
    column = signals.columns[SHARE.name]
    share = column.masked_fill(~signals.valid, 0.0).amax(dim=(1, 2), keepdim=True)
    return {SHARE.name: share.expand(column.shape)}


def divided(weights: Sequence[float], total: int, most: int) -> list[int]:
    """`total` in proportion to weights, rounded down, none above `most`; what is left goes to all with room evenly.

    As CAKE's published code does it; where nothing has weight all are alike.
    """
    layers, whole = len(weights), sum(weights)
    if not 0 < whole < math.inf:
        weights, whole = [1.0] * layers, float(layers)
    counts = [int(total * w / whole) for w in weights]
    over = sum(max(0, n - most) for n in counts)
    counts = _spread([min(n, most) for n in counts], over, most)
    while left := min(total, layers * most) - sum(counts):
        counts = _spread(counts, left, most)
    return counts


def _spread(counts: list[int], more: int, most: int) -> list[int]:
    """`more` given evenly to those below `most`, one each to the first of them for what does not divide."""
    free = [i for i, n in enumerate(counts) if n < most]
    if not free:
        return counts
    each, rest = divmod(more, len(free))
    extra = {i: each + (place < rest) for place, i in enumerate(free)}
    return [min(most, n + extra.get(i, 0)) for i, n in enumerate(counts)]
