"""When a rule acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvstrata.core import SpecError


@dataclass(frozen=True, slots=True)
class OnOverflow:
    """When more is stored than the budget allows, at the end of a forward; then make room for `room` tokens.

    room=1 drops one token a step, as the papers do. A larger room never exceeds the budget either, holds (room-1)/2
    tokens less on average, and plans only at every room-th step. No more than a quarter of a budget makes room.
    """

    room: int = 1

    def __post_init__(self) -> None:
        if self.room < 1:
            raise SpecError(f"room={self.room}: make room for at least one token")

    def target(self, cap: int) -> int:
        """Entries to keep of a budget of `cap` when the rule acts."""
        return max(1, cap + 1 - min(self.room, 1 + cap // 4))

    def due(self, over: bool, since: int | None) -> bool:
        """Whether to act: over tells that a limit is exceeded, since how many tokens came since the rule last acted."""
        return over


@dataclass(frozen=True, slots=True)
class Every:
    """At the end of a prompt, and then whenever `tokens` have come since the last time."""

    tokens: int = 8
    room: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise SpecError(f"every={self.tokens}: give at least one token")

    def target(self, cap: int) -> int:
        """The whole budget."""
        return cap

    def due(self, over: bool, since: int | None) -> bool:
        """Whatever is stored."""
        return since is None or since >= self.tokens
