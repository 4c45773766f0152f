"""Budgets that differ from head to head as a calibration measured it (`kvstrata calibrate heads`)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy.budget import Budget, Shaped

FORMAT = 1  # of the files
Kept = tuple[tuple[float, ...], ...]  # [L][H], layers counted over the compressed ones


@dataclass(frozen=True, slots=True, eq=False)  # so that looking one up in a cache takes no time
class Shares:
    """What each head kept of a text at some shares kept over all heads, lowest first, and of which model."""

    model: str  # its fingerprint; "" where that is not known
    levels: tuple[tuple[float, Kept], ...]
    file: Path | None = field(default=None, repr=False)  # that they were read from

    def __post_init__(self) -> None:
        sizes = {tuple(map(len, kept)) for _, kept in self.levels}
        if len(sizes) != 1 or len(set(*sizes)) != 1:
            raise SpecError("shares of heads: every level needs the same layers, and every layer as many heads")
        if any(not 0 < share <= 1 for _, kept in self.levels for layer in kept for share in layer):
            raise SpecError("shares of heads lie above 0 and up to 1")

    def at(self, share: float) -> Kept:
        """What heads keep where all together keep `share`: in a straight line between two levels, else the nearest."""
        first, last = self.levels[0], self.levels[-1]
        for low, high in pairwise(self.levels):
            if low[0] <= share <= high[0]:
                part = (share - low[0]) / (high[0] - low[0])
                pairs = zip(low[1], high[1], strict=True)
                return tuple(tuple(a + part * (b - a) for a, b in zip(*pair, strict=True)) for pair in pairs)
        return first[1] if share < first[0] else last[1]


def read_shares(path: Path) -> Shares:
    """Read a file that `kvstrata calibrate heads` wrote. Raises `SpecError`."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise SpecError(f"{path} is of format {data['format']}, not {FORMAT}: make it again with this version")
        levels = sorted((float(share), level["kept"]) for share, level in data["levels"].items())
        found = tuple((share, tuple(tuple(map(float, layer)) for layer in kept)) for share, kept in levels)
        return Shares(str(data["model"]), found, path)
    except FileNotFoundError as error:
        raise SpecError(f"no file of heads' shares at {path}: make one with kvstrata calibrate heads") from error
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise SpecError(f"{path}: {error}") from error
        raise SpecError(f"{path} is no file of kvstrata calibrate heads ({error!r})") from error


@dataclass(frozen=True, slots=True)
class ByHead(Shaped):
    """What `base` gives every head, given to all of them together and shared out as `shares` says."""

    base: Budget
    shares: Shares

    def limits(self, seen: int, confidence: float, shape: LayerShape) -> tuple[int, ...]:
        """One number per head. Raises `SpecError` for a model with other layers or heads."""
        (mean,) = self.base.limits(seen, confidence, shape)
        layers, heads = len(self.shares.levels[0][1]), len(self.shares.levels[0][1][0])
        if (layers, heads) != (shape.num_layers, shape.num_kv_heads):
            raise SpecError(
                f"heads= is for {layers} layers of {heads} key-value heads, but this model compresses "
                f"{shape.num_layers} of {shape.num_kv_heads}: calibrate it with this one"
            )
        return shared_out(self.shares, min(mean, seen), seen)[shape.depth]

    def around(self, mean: Budget) -> ByHead:
        """The same shares of another mean."""
        return ByHead(self.base.around(mean.base if isinstance(mean, ByHead) else mean), self.shares)

    def scaled(self, factor: Fraction) -> ByHead:
        """The mean scaled."""
        return ByHead(self.base.scaled(factor), self.shares)


@lru_cache(maxsize=256)
def shared_out(shares: Shares, mean: int, seen: int) -> tuple[tuple[int, ...], ...]:
    """Entries of each layer and head, `mean` on average, none more than `seen` or less than one.

    Proportional to the shares as far as that goes; what rounding leaves goes to the largest remainders.
    """
    if seen < 1:
        return tuple((1,) * len(layer) for layer in shares.levels[0][1])
    kept = shares.at(mean / seen)
    flat = [share for layer in kept for share in layer]
    total = mean * len(flat)
    low, high = 0.0, seen / min(flat)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_bounded(middle * s, seen) for s in flat) < total else (low, middle)
    ideal = [_bounded(high * s, seen) for s in flat]
    counts = [int(n) for n in ideal]
    order = sorted(range(len(flat)), key=lambda i: (counts[i] - ideal[i], i))
    for i in order[: max(0, total - sum(counts))]:
        counts[i] += counts[i] < seen
    heads = len(kept[0])
    return tuple(tuple(counts[i : i + heads]) for i in range(0, len(counts), heads))


def _bounded(n: float, most: int) -> float:
    return min(max(n, 1.0), float(most))
