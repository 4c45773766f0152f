"""Which columns each row was fed, which of them were pads, and which real tokens a later mask hid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.core import InputError


class Fed:
    """The columns fed so far, as runs of forwards with the same shape of padding."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.columns = 0  # per row, pads included
        self.seen: list[int] = []  # real tokens of each row, hidden ones included
        self.runs: list[tuple[int, list[int]]] = []  # (columns, real tokens per row), pads first
        self.hidden_columns: Tensor | None = None  # [B, columns fed by then] bool

    def add(self, columns: int, tokens: list[int]) -> None:
        """Note a forward of `columns`, of which the last tokens[b] of each row were real."""
        self.seen = [old + new for old, new in zip(self.seen or [0] * len(tokens), tokens, strict=True)]
        self.columns += columns
        whole = all(n == columns for n in tokens)
        if whole and self.runs and all(n == self.runs[-1][0] for n in self.runs[-1][1]):
            columns += self.runs[-1][0]
            self.runs[-1] = (columns, [columns] * len(tokens))
        else:
            self.runs.append((columns, tokens))

    @property
    def hidden(self) -> list[int]:
        """How many of each row's real tokens a later mask hid."""
        return [0] * len(self.seen) if self.hidden_columns is None else self.hidden_columns.sum(dim=1).tolist()

    @property
    def real(self) -> list[int]:
        """Real tokens of each row that no mask hid: what budgets count."""
        if self.hidden_columns is None:
            return self.seen
        return [seen - gone for seen, gone in zip(self.seen, self.hidden, strict=True)]

    def hide(self, past: Tensor) -> Tensor | None:
        """Take `past` [B, columns] for what is visible now; return which positions [B, tokens] are not, if any is new.

        Raises `InputError` if it shows what was hidden before.
        """
        runs = [torch.arange(columns) >= columns - torch.tensor(tokens)[:, None] for columns, tokens in self.runs]
        real, past = torch.cat(runs, dim=1), past.cpu()
        hidden = real & ~past
        shown = past & ~real
        if self.hidden_columns is not None:
            shown[:, : self.hidden_columns.shape[1]] |= past[:, : self.hidden_columns.shape[1]] & self.hidden_columns
        if bool(shown.any()):
            raise InputError("attention_mask shows past tokens that it hid before: they are not stored any more")
        if self.hidden_columns is not None and hidden.sum() == self.hidden_columns.sum():
            return None
        self.hidden_columns = hidden
        by_position = torch.zeros(len(hidden), max(self.seen), dtype=torch.bool)
        row, column = hidden.nonzero(as_tuple=True)
        by_position[row, (real.cumsum(dim=1) - 1)[row, column]] = True
        return by_position

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now."""
        self.seen = [self.seen[row] for row in rows]
        self.hidden_columns = None if self.hidden_columns is None else self.hidden_columns[list(rows)]
        self.runs = [(columns, [tokens[row] for row in rows]) for columns, tokens in self.runs]

    def crop(self, count: int) -> None:
        """Forget the newest `count` columns."""
        self.columns = max(0, self.columns - count)
        while self.runs and count > 0:
            columns, tokens = self.runs.pop()
            if columns > count:
                self.runs.append((columns - count, [max(0, n - count) for n in tokens]))
            count -= columns
        self.seen = [sum(tokens[row] for _, tokens in self.runs) for row in range(len(self.seen))]
        if self.hidden_columns is not None:
            self.hidden_columns = self.hidden_columns[:, : self.columns]
