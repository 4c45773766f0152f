"""How the slots of one layer are laid out: one segment per (row, head), or per row where heads share their tokens.

Everything a layer keeps is flat over slots. A segment owns `capacity` consecutive slots and uses the first `length`,
in ascending order of position. Payload of a row whose heads share their tokens repeats its segment once per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

PAGE = 64  # free slots a segment gets when it had to grow, so that appending seldom copies; the most it may have
STEADY = 8  # free slots after a plan: a layer that evicts at every step needs no more


@dataclass(slots=True)
class Segments:
    """Lengths, capacities and first slots of the segments, in order (row, head)."""

    lengths: list[int]
    capacities: list[int] = field(default_factory=list[int])
    starts: list[int] = field(default_factory=list[int])

    @classmethod
    def fit(cls, lengths: list[int], slack: int = PAGE) -> Segments:
        """Lay segments out anew for these lengths, each with `slack` free slots."""
        capacities = [length + slack for length in lengths]
        return cls(lengths, capacities, [0, *accumulate(capacities)][:-1])

    @property
    def slots(self) -> int:
        """Slots of all segments together."""
        return self.starts[-1] + self.capacities[-1] if self.starts else 0

    @property
    def entries(self) -> int:
        """Entries stored in all segments together."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(self.lengths)

    @property
    def uniform(self) -> bool:
        """Whether all segments have one length and one capacity, so that plain views serve."""
        return len(set(self.lengths)) == 1 and len(set(self.capacities)) == 1

    def fits(self, lengths: list[int]) -> bool:
        """Whether these lengths fit where the segments lie, without leaving more than a page free in any."""
        return all(0 <= cap - new <= PAGE for cap, new in zip(self.capacities, lengths, strict=True))

    def has_room(self, lengths: list[int]) -> bool:
        """Whether these (larger) lengths fit where the segments lie."""
        return all(new <= cap for cap, new in zip(self.capacities, lengths, strict=True))

    def starts_on(self, device: torch.device) -> Tensor:
        """First slots as an int64 tensor."""
        return torch.tensor(self.starts, device=device)
