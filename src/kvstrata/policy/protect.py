"""Entries that stay whatever their score."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvstrata.core import SpecError


@dataclass(frozen=True, slots=True)
class Scaled:
    """A part of the budget, rounded down, and no more than `at_most` tokens: how presets keep a paper's proportions."""

    share: Fraction
    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class Protect:
    """The first `sinks` and the newest `recent` tokens of every row; plain numbers hold whatever the budget is.

    prompt: every token that came in a prompt, too; the budget is then one of what was generated.
    """

    sinks: int | Scaled = 0
    recent: int | Scaled = 0
    prompt: bool = False

    def __post_init__(self) -> None:
        for name, value in (("sinks", self.sinks), ("recent", self.recent)):
            if isinstance(value, int) and value < 0:
                raise SpecError(f"{name}={value}: give 0 or more")

    @property
    def most_sinks(self) -> int:
        """Sinks under the largest budget; 0 where they have no limit."""
        return self.sinks if isinstance(self.sinks, int) else self.sinks.at_most or 0

    def resolve(self, cap: int) -> tuple[int, int]:
        """(sinks, recent) in tokens under a budget of `cap` tokens."""
        return _tokens(self.sinks, cap), _tokens(self.recent, cap)


def _tokens(value: int | Scaled, cap: int) -> int:
    if isinstance(value, int):
        return value
    part = int(cap * value.share)
    return part if value.at_most is None else min(part, value.at_most)


FOUR_SINKS = Scaled(Fraction(1, 4), 4)  # StreamingLLM's four, fewer where the budget is tiny


def half(at_most: int | None = None) -> Scaled:
    """Half of the budget, or fewer."""
    return Scaled(Fraction(1, 2), at_most)
