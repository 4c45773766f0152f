"""Budgets that differ from step to step, by confidence, or from layer to layer, by depth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy.budget import Budget, ByteBudget, Shaped, Share
from kvstrata.policy.confidence import LEAST, MOST, Steady

RATE = Fraction(42, 100)  # share of confident steps that the authors of CONF-KV measured


@dataclass(frozen=True, slots=True)
class ByConfidence:
    """`high` at a step whose confidence is at least tau, else `low`, which is the larger one (CONF-KV, section 3).

    A layer grows by one entry a step up to `low` and is cut to `high` at the first confident step.
    """

    high: Budget
    low: Budget
    tau: float = 0.7
    signal: Literal["raw", "processed"] = "raw"
    rate: Fraction = RATE
    steady: Steady = Steady()

    def __post_init__(self) -> None:
        if not LEAST < self.tau < MOST:
            raise SpecError(f"tau={self.tau}: confidence runs from {LEAST} (every token alike) to {MOST}, so between")
        pairs: list[tuple[int | Fraction, int | Fraction]] = [*zip(self.high.counts, self.low.counts, strict=False)]
        if isinstance(self.high, Share) and isinstance(self.low, Share):
            pairs.append((self.high.fraction, self.low.fraction))
        if isinstance(self.high, ByteBudget) and isinstance(self.low, ByteBudget) and self.high.per == self.low.per:
            pairs.append((self.high.count, self.low.count))
        if any(tight > loose for tight, loose in pairs):
            raise SpecError(
                f"high={self.high} is more than low={self.low}: high is for confident steps, which need fewer tokens"
            )

    even = True
    threshold = None

    @property
    def needs(self) -> frozenset[str]:
        """Logits."""
        return frozenset({"logits" if self.signal == "raw" else "processed-logits"})

    @property
    def steadied(self) -> tuple[float, Steady] | None:
        """tau, and how confidence is steadied before it is compared with that; None where it is not."""
        return None if self.steady == Steady() else (self.tau, self.steady)

    @property
    def counts(self) -> tuple[int, ...]:
        """Both levels."""
        return self.high.counts + self.low.counts

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """One of the levels."""
        level = self.high if confidence >= self.tau else self.low
        return level.limits(seen, confidence, shape)

    def around(self, mean: Budget) -> ByConfidence:
        """Levels with low = 2 high and rate * high + (1 - rate) * low = mean; low is all where that is less."""
        unit = 1 / (2 - self.rate)
        if isinstance(mean, Share) and 2 * unit * mean.fraction > 1:
            tight = Share((mean.fraction - 1 + self.rate) / self.rate)
            return replace(self, high=tight, low=Share(Fraction(1)))
        return replace(self, high=mean.scaled(unit), low=mean.scaled(2 * unit))

    def scaled(self, factor: Fraction) -> ByConfidence:
        """Both levels scaled."""
        return replace(self, high=self.high.scaled(factor), low=self.low.scaled(factor))


@dataclass(frozen=True, slots=True)
class Falling(Shaped):
    """max(at_least, floor(n * beta^(depth / layers))) of what `base` gives the first layer (CONF-KV-L, section 3.4).

    With `mean` the layers share the sum instead: `base` is what they have on average, without a floor.
    """

    base: Budget
    beta: float = 0.5
    at_least: int = 96
    mean: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.beta <= 1:
            raise SpecError(f"beta={self.beta}: give a number above 0 and up to 1")
        if self.at_least < 1:
            raise SpecError(f"at_least={self.at_least}: keep at least one token")

    @property
    def counts(self) -> tuple[int, ...]:
        """The floor, which is the least any layer gets; none where there is no floor."""
        return () if self.mean else tuple(max(self.at_least, int(n * self.beta)) for n in self.base.counts)

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """Less for deeper layers."""
        base, layers = self.base.limits(seen, confidence, shape), shape.num_layers
        if self.mean:
            return tuple(_falling_shares(n, seen, layers, self.beta)[shape.depth] for n in base)
        return tuple(max(self.at_least, int(n * self.beta ** (shape.depth / layers))) for n in base)

    def around(self, mean: Budget) -> Falling:
        """The base around `mean`, which the layers then have on average."""
        return Falling(self.base.around(mean), self.beta, self.at_least, mean=True)

    def scaled(self, factor: Fraction) -> Falling:
        """Everything scaled."""
        return Falling(self.base.scaled(factor), self.beta, max(1, int(self.at_least * factor)), self.mean)


@lru_cache(maxsize=256)
def _falling_shares(mean: int, seen: int, layers: int, beta: float) -> tuple[int, ...]:
    """`mean` tokens a layer in parts that fall by beta over depth; what a layer cannot use goes to the others."""
    if mean >= seen:
        return (mean,) * layers
    weights = [beta ** (depth / layers) for depth in range(layers)]
    full, left = 0, float(mean * layers)  # the first layers are full
    while full < layers and weights[full] * left / sum(weights[full:]) > seen:
        full, left = full + 1, left - seen
    rest = sum(weights[full:])
    return tuple(seen if depth < full else max(1, int(w * left / rest + 1e-9)) for depth, w in enumerate(weights))


@dataclass(frozen=True, slots=True)
class Pyramid(Shaped):
    """What `base` gives is the mean over layers; it falls in a straight line over depth (PyramidKV, section 4.2).

    `own` tokens of it are the same in every layer; of the rest the last layer gets 1/beta of the mean. A row that has
    fewer tokens than the first layer's share is spread as the published code does: the first layer keeps all of it.
    """

    base: Budget
    beta: int = 20
    own: int = 8

    def __post_init__(self) -> None:
        if self.beta < 1 or self.own < 0:
            raise SpecError(f"beta={self.beta}, own={self.own}: give beta of 1 or more and own of 0 or more")

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """Less for deeper layers."""
        return tuple(self._share(n, seen, shape) for n in self.base.limits(seen, confidence, shape))

    def _share(self, mean: int, seen: int, shape: LayerShape) -> int:
        if mean >= seen or shape.num_layers == 1:
            return mean
        own = min(self.own, mean // 2)
        middle = mean - own
        last = Fraction(middle, self.beta)
        first = 2 * middle - last
        if first > seen - own:
            first, last = Fraction(seen - own), Fraction(2 * middle - (seen - own))
        return max(1, own + int(first - (first - last) * shape.depth / (shape.num_layers - 1)))

    def around(self, mean: Budget) -> Pyramid:
        """A pyramid around another mean."""
        return Pyramid(self.base.around(mean), self.beta, self.own)

    def scaled(self, factor: Fraction) -> Pyramid:
        """The mean scaled."""
        return Pyramid(self.base.scaled(factor), self.beta, self.own)
