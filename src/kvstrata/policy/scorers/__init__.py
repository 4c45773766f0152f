"""Scorers: what an entry is worth. Each is a frozen value that says what it needs and is given only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kvstrata.core import Column, Signals
from kvstrata.kernels.echo import Band
from kvstrata.kernels.mass import Summing
from kvstrata.registry import Registry


class Scorer(Protocol):
    """Ranks the entries of one layer.

    needs: which optional fields of `Signals` it reads besides mass ("keys", "values", "added", "caps"), and what of the
    model: "turn" and "rotary" (positions), "outputs" (projections behind attention), "hidden" (states that attention
    gets), "repetition" (of the context).
    mass: how the attention of a forward becomes `Signals.mass`; None where it reads none.
    asks: who asks for an entry in a repetition of the context; the answers come in the column "asked". None: nobody.
    columns: state it keeps per entry; `observe` returns the new values after each forward, also when no plan is due.
    A scorer with columns reads mass in `observe` only, one without in `score`.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals read."""
        ...

    @property
    def mass(self) -> Summing | None:
        """How attention is summed."""
        ...

    @property
    def asks(self) -> Band | None:
        """Who asks for entries."""
        ...

    @property
    def surrogate(self) -> str | None:
        """Whose word it takes: a file of weights, or None."""
        ...

    @property
    def columns(self) -> tuple[Column, ...]:
        """State per entry."""
        ...

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Return the columns [B, 1|H, N] that change because of this forward."""
        ...

    def score(self, signals: Signals) -> Tensor:
        """Return the worth of every entry [B, 1|H, N], higher = keep."""
        ...


class Stateless:
    """Defaults of a scorer that keeps nothing and needs nothing."""

    __slots__ = ()

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals read: none."""
        return frozenset()

    @property
    def mass(self) -> Summing | None:
        """How attention is summed: not at all."""
        return None

    @property
    def asks(self) -> Band | None:
        """Who asks for entries: nobody."""
        return None

    @property
    def surrogate(self) -> str | None:
        """Whose word it takes: nobody's."""
        return None

    @property
    def columns(self) -> tuple[Column, ...]:
        """State per entry: none."""
        return ()

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Change nothing."""
        return {}


SCORERS: Registry[type] = Registry("scorer")

from kvstrata.policy.scorers import attention, combine, keys, learned, outputs, recency, repeat, spread  # noqa: E402  (they register themselves above)

__all__ = [
    "SCORERS",
    "Scorer",
    "Stateless",
    "attention",
    "combine",
    "keys",
    "learned",
    "outputs",
    "recency",
    "repeat",
    "spread",
]
