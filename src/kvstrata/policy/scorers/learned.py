"""Scorers whose numbers come from outside a layer: a surrogate on hidden states, or a pass that repeats the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Column, Signals
from kvstrata.policy.scorers import SCORERS, Stateless

WORTH = Column("worth", torch.float32)  # what the surrogate says, written with the entry
REPEATED = Column("repeated", torch.float32)  # what the repetition gave it; 0 while nobody asked
REPEATED_PLUS = Column("repeated+", torch.float32)


@SCORERS.add("surrogate")
@dataclass(frozen=True, slots=True)
class Surrogate(Stateless):
    """What a small model says of each token's hidden state (KVzap, arXiv:2601.07891): ln of KVzip+'s score.

    file: a folder with weights in the published format, a hub id, or the name of one that is shipped.
    """

    file: str = "linear"

    @property
    def needs(self) -> frozenset[str]:
        """Hidden states, as attention gets them."""
        return frozenset({"hidden"})

    @property
    def surrogate(self) -> str | None:
        """Which."""
        return self.file

    @property
    def columns(self) -> tuple[Column, ...]:
        """Its scores."""
        return (WORTH,)

    def score(self, signals: Signals) -> Tensor:
        """What it said when the entry came."""
        return signals.columns[WORTH.name]


@SCORERS.add("repetition")
@dataclass(frozen=True, slots=True)
class Repetition(Stateless):
    """The most attention that an entry gets while the model repeats the context (KVzip, arXiv:2505.23416).

    plus: times the norm of what the output projection makes of the value, over that of the query's hidden state
    (KVzip+, arXiv:2601.07891, section 3). Entries that came after the repetition stay.
    """

    plus: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """A repetition."""
        return frozenset({"repetition", "outputs", "hidden"}) if self.plus else frozenset({"repetition"})

    @property
    def columns(self) -> tuple[Column, ...]:
        """What it gave."""
        return (REPEATED_PLUS if self.plus else REPEATED,)

    def score(self, signals: Signals) -> Tensor:
        """Its logarithm; infinite where nobody asked."""
        (column,) = self.columns
        found = signals.columns[column.name]
        return torch.where(found == 0, torch.inf, found.log())
