"""How the slots of one layer are laid out: one segment per (row, head), or per row where heads share their tokens.

Everything a layer keeps is flat over slots. A segment owns `capacity` consecutive slots and uses the first `length`,
in ascending order of position. Payload of a row whose heads share their tokens repeats its segment once per head.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

PAGE = 64  # free slots a segment gets when it had to grow, so that appending seldom copies; the most it may have
STEADY = 16  # free slots after a plan: a layer that evicts every few steps needs no more


class Segments:
    """Lengths, capacities and first slots of the segments, in order (row, head)."""

    __slots__ = ("_alike", "capacities", "lengths", "starts", "uniform")

    def __init__(
        self, lengths: list[int], capacities: list[int] | None = None, starts: list[int] | None = None
    ) -> None:
        self.capacities, self.starts = capacities or [], starts or []
        self._alike = len(set(self.capacities)) == 1
        self.resize(lengths)

    def resize(self, lengths: list[int]) -> None:
        """Set the lengths; `uniform` then says whether all are one, in one capacity, so that plain views serve."""
        self.lengths = lengths
        self.uniform = self._alike and len(set(lengths)) == 1

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

    def fits(self, lengths: list[int]) -> bool:
        """Whether these lengths fit where the segments lie, without leaving more than a page free in any."""
        return all(0 <= cap - new <= PAGE for cap, new in zip(self.capacities, lengths, strict=True))

    def has_room(self, lengths: list[int]) -> bool:
        """Whether these (larger) lengths fit where the segments lie."""
        return all(new <= cap for cap, new in zip(self.capacities, lengths, strict=True))

    def starts_on(self, device: torch.device) -> Tensor:
        """First slots as an int64 tensor."""
        return torch.tensor(self.starts, device=device)

    def rows(self, width: int, segment: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the payload [entries * width] and of the columns [entries] for the given slots.

        A segment's payload holds its `width` heads one after the other.
        """
        start, device = self.starts_on(slot.device)[segment], slot.device
        if width == 1:
            return (row := start + slot), row
        heads = torch.tensor(self.capacities, device=device)[segment, None] * torch.arange(width, device=device)
        return ((start * width + slot)[:, None] + heads).flatten(), start + slot
