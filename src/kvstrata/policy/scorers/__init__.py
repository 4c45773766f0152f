"""Scorers: what an entry is worth. Each is a frozen value that says what it needs and is given only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kvstrata.core import Column, Signals
from kvstrata.registry import Registry


class Scorer(Protocol):
    """Ranks the entries of one layer.

    needs: which optional fields of `Signals` it reads, of "mass" and "keys".
    mass_rows: over how many of the newest queries mass is summed; `kernels.attention.ALL_ROWS` for all of them.
    columns: state it keeps per entry; `observe` returns the new values after each forward, also when no plan is due.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Optional signals read."""
        ...

    @property
    def mass_rows(self) -> int:
        """Queries whose mass is summed."""
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
    def mass_rows(self) -> int:
        """Queries whose mass is summed: none."""
        return 0

    @property
    def columns(self) -> tuple[Column, ...]:
        """State per entry: none."""
        return ()

    def observe(self, signals: Signals) -> Mapping[str, Tensor]:
        """Change nothing."""
        return {}


SCORERS: Registry[type] = Registry("scorer")

from kvstrata.policy.scorers import attention, keys, recency  # noqa: E402  (they register themselves above)

__all__ = ["SCORERS", "Scorer", "Stateless", "attention", "keys", "recency"]
