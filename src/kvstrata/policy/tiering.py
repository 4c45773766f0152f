"""Which tier a kept entry goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvstrata.core import Signals, SpecError, Tier

CodecName = Literal["int8", "int4", "int2"]
AT_ONCE = 64  # entries that are coded together: a page


@dataclass(frozen=True, slots=True)
class Native:
    """Everything that is kept stays exact."""

    def due(self, exact: Sequence[Sequence[int]]) -> bool:
        """Whether entries would change tiers, were nothing dropped; exact [B][1|H] counts the exact ones."""
        return False

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """keep [B, 1|H, N] bool -> tier [B, 1|H, N] uint8."""
        return keep.to(torch.uint8) * int(Tier.EXACT)


@dataclass(frozen=True, slots=True)
class ByAge:
    """The newest `exact` tokens stay exact; older entries are coded, the oldest 64 at a time, and stay so."""

    codec: CodecName = "int8"
    exact: int = 128

    def __post_init__(self) -> None:
        if self.exact < 0:
            raise SpecError(f"exact={self.exact}: give 0 or more")

    def due(self, exact: Sequence[Sequence[int]]) -> bool:
        """Whether some row and head has enough older entries for a page, whichever they are."""
        return any(count >= self.exact + AT_ONCE for row in exact for count in row)

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """keep [B, 1|H, N] bool -> tier [B, 1|H, N] uint8."""
        now = torch.full_like(keep, int(Tier.EXACT), dtype=torch.uint8) if signals.tier is None else signals.tier
        newest = signals.position.masked_fill(~signals.valid, -1).amax(dim=(1, 2), keepdim=True)
        old = keep & signals.valid & (now == Tier.EXACT) & (signals.position <= newest - self.exact)
        count = old.sum(dim=-1, keepdim=True) // AT_ONCE * AT_ONCE
        rank = signals.position.masked_fill(~old, torch.iinfo(torch.int32).max).argsort(dim=-1).argsort(dim=-1)
        return torch.where(rank < count, int(Tier[self.codec.upper()]), now) * keep
