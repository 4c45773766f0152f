"""Numbers kept beside entries, one tensor per column over (row, 1|head, slot)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.core import POSITION, STEP, Column


class Columns:
    """Columns [B, 1|H, room] of the entries of one tier. What stands past a length holds no meaning."""

    def __init__(self, columns: Sequence[Column], rows: int, heads: int, device: torch.device) -> None:
        self.data = {c.name: torch.zeros(rows, heads, 0, dtype=c.dtype, device=device) for c in columns}

    @property
    def shape(self) -> tuple[int, int]:
        """(B, 1|H)."""
        rows, heads, _ = self.data[POSITION.name].shape
        return rows, heads

    @property
    def device(self) -> torch.device:
        """Where they live."""
        return self.data[POSITION.name].device

    @property
    def room(self) -> int:
        """Slots that every row and head has."""
        return self.data[POSITION.name].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(column.numel() * column.element_size() for column in self.data.values())

    @property
    def largest(self) -> int:
        """Bytes of the largest: columns are laid out anew one after the other."""
        return max(column.numel() * column.element_size() for column in self.data.values())

    def resize(self, room: int) -> None:
        """Give every row and head so many slots; what was in the first ones stays."""
        for name, old in self.data.items():
            self.data[name] = new = old.new_zeros(*old.shape[:2], room)
            kept = min(room, old.shape[2])
            new[:, :, :kept] = old[:, :, :kept]

    def begin(self, lengths: Sequence[Sequence[int]], tokens: Sequence[int], first: Sequence[int], step: int) -> None:
        """Fill the newest tokens[b] places of every segment, whose lengths [B][1|H] count them already."""
        alike = len({*zip(map(tuple, lengths), tokens, first, strict=True)}) == 1
        for row in range(1 if alike else len(lengths)):
            rows = slice(None) if alike else slice(row, row + 1)
            same = len(set(lengths[row])) == 1
            for head in range(1 if same else len(lengths[row])):
                heads, end = slice(None) if same else slice(head, head + 1), lengths[row][head]
                for name, column in self.data.items():
                    tail = column[rows, heads, end - tokens[row] : end]
                    if name == POSITION.name and tokens[row] > 1:
                        tail.copy_(torch.arange(first[row], first[row] + tokens[row], device=tail.device))
                    else:
                        tail.fill_(first[row] if name == POSITION.name else step if name == STEP.name else 0)

    def put_newest(self, name: str, lengths: Sequence[Sequence[int]], tokens: Sequence[int], values: Tensor) -> None:
        """Write the last tokens[b] of values [B, H, Q] to each segment's newest places; means where heads share."""
        column = self.data[name]
        if column.shape[1] < values.shape[1]:  # heads that keep the same tokens
            values = values.mean(dim=1, keepdim=True)
        for row, new in enumerate(tokens):
            for head, end in enumerate(lengths[row]):
                column[row, head, end - new : end] = values[row, head, values.shape[2] - new :]

    def move(self, at: tuple[Tensor, ...], to: tuple[Tensor, ...], source: Columns | None = None) -> None:
        """Copy places at (row, 1|head, slot) of `source`, or of these columns, to places `to`."""
        for name, column in self.data.items():
            column[to] = (source or self).data[name][at]

    def gather(self, order: Tensor, room: int) -> None:
        """Make slot j what slot order[b, h, j] was, in `room` slots."""
        for name, old in self.data.items():
            self.data[name] = new = old.new_zeros(*old.shape[:2], room)
            new[:, :, : order.shape[2]] = old.gather(2, order)

    def select_rows(self, rows: Tensor) -> None:
        """Make row i a copy of what is row rows[i] now."""
        self.data = {name: column[rows] for name, column in self.data.items()}
