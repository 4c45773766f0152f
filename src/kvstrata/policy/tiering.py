"""Which tier a kept entry goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import Tier


@dataclass(frozen=True, slots=True)
class Native:
    """Everything that is kept stays exact."""

    def assign(self, keep: Tensor) -> Tensor:
        """keep [B, 1|H, N] bool -> tier [B, 1|H, N] uint8."""
        return keep.to(torch.uint8) * int(Tier.EXACT)
