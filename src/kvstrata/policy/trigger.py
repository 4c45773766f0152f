"""When a rule acts."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.core import SpecError


@dataclass(frozen=True, slots=True)
class Every:
    """At the end of every `steps`-th forward of the rule's phase. In prefill a step is a chunk."""

    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise SpecError(f"every={self.steps}: a trigger needs at least one step")

    def fires(self, step: int) -> bool:
        """Whether forward number `step` (from 0) is one of them."""
        return step % self.steps == 0
