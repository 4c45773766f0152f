"""Which entries are chosen together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Token:
    """Single tokens.

    heads="shared": the heads of a layer keep the same tokens. "each": every head keeps its own best `cap` tokens.
    "pooled": the heads of a layer share H * cap places, so they end with different numbers (AdaKV, arXiv:2407.11550,
    without its safeguard). "global": the heads of all layers share their places, which are given out at the end of a
    forward (KVzip, arXiv:2505.23416).
    """

    heads: Literal["shared", "each", "pooled", "global"] = "shared"

    @property
    def per_head(self) -> bool:
        """Whether heads of one layer may hold different tokens."""
        return self.heads != "shared"

    @property
    def sums(self) -> bool:
        """Whether only the sum over the heads of a layer is limited."""
        return self.heads in ("pooled", "global")
