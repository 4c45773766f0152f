"""Which entries are chosen together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kvstrata.core import SpecError


@dataclass(frozen=True, slots=True)
class Token:
    """Single tokens.

    heads="shared": the heads of a layer keep the same tokens. "each": every head keeps its own best `cap` tokens.
    "pooled": the heads of a layer share H * cap places, so they end with different numbers (AdaKV, arXiv:2407.11550),
    but each keeps its own best `safe` part of cap. "global": the heads of all layers share their places, which are
    given out at the end of a forward (KVzip, arXiv:2505.23416).
    """

    heads: Literal["shared", "each", "pooled", "global"] = "shared"
    safe: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        if not 0 <= self.safe <= 1:
            raise SpecError(f"safe={float(self.safe)}: give the part of its budget that each head keeps, 0 to 1")

    @property
    def per_head(self) -> bool:
        """Whether heads of one layer may hold different tokens."""
        return self.heads != "shared"

    @property
    def sums(self) -> bool:
        """Whether only the sum over the heads of a layer is limited."""
        return self.heads in ("pooled", "global")
