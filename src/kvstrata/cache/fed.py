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
        self._runs: list[tuple[int, list[int]]] = []  # (columns, real tokens per row), pads first
        self._hidden: Tensor | None = None  # [B, columns fed by then] bool

    def add(self, columns: int, tokens: list[int]) -> None:
        """Note a forward of `columns`, of which the last tokens[b] of each row were real."""
        self.seen = [old + new for old, new in zip(self.seen or [0] * len(tokens), tokens, strict=True)]
        self.columns += columns
        whole = all(n == columns for n in tokens)
        if whole and self._runs and all(n == self._runs[-1][0] for n in self._runs[-1][1]):
            columns += self._runs[-1][0]
            self._runs[-1] = (columns, [columns] * len(tokens))
        else:
            self._runs.append((columns, tokens))

    @property
    def hidden(self) -> list[int]:
        """How many of each row's real tokens a later mask hid."""
        return [0] * len(self.seen) if self._hidden is None else self._hidden.sum(dim=1).tolist()

    @property
    def real(self) -> list[int]:
        """Real tokens of each row that no mask hid: what budgets count."""
        if self._hidden is None:
            return self.seen
        return [seen - gone for seen, gone in zip(self.seen, self.hidden, strict=True)]

    def hide(self, past: Tensor) -> Tensor | None:
        """Take `past` [B, columns] for what is visible now; return which positions [B, tokens] are not, if any is new.

        Raises `InputError` if it shows what was hidden before.
        """
        runs = [torch.arange(columns) >= columns - torch.tensor(tokens)[:, None] for columns, tokens in self._runs]
        real, past = torch.cat(runs, dim=1), past.cpu()
        hidden = real & ~past
        shown = past & ~real
        if self._hidden is not None:
            shown[:, : self._hidden.shape[1]] |= past[:, : self._hidden.shape[1]] & self._hidden
        if bool(shown.any()):
            raise InputError("attention_mask shows past tokens that it hid before: they are not stored any more")
        if self._hidden is not None and hidden.sum() == self._hidden.sum():
            return None
        self._hidden = hidden
        by_position = torch.zeros(len(hidden), max(self.seen), dtype=torch.bool)
        row, column = hidden.nonzero(as_tuple=True)
        by_position[row, (real.cumsum(dim=1) - 1)[row, column]] = True
        return by_position

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now."""
        self.seen = [self.seen[row] for row in rows]
        self._hidden = None if self._hidden is None else self._hidden[list(rows)]
        self._runs = [(columns, [tokens[row] for row in rows]) for columns, tokens in self._runs]

    def crop(self, count: int) -> None:
        """Forget the newest `count` columns."""
        self.columns = max(0, self.columns - count)
        while self._runs and count > 0:
            columns, tokens = self._runs.pop()
            if columns > count:
                self._runs.append((columns - count, [max(0, n - count) for n in tokens]))
            count -= columns
        self.seen = [sum(tokens[row] for _, tokens in self._runs) for row in range(len(self.seen))]
        if self._hidden is not None:
            self._hidden = self._hidden[:, : self.columns]
