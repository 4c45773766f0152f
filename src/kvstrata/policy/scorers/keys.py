"""Scorers that look at the stored keys alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvstrata.core import Signals
from kvstrata.policy.scorers import SCORERS, Stateless


@dataclass(frozen=True, slots=True)
class _OfKeys(Stateless):
    @property
    def needs(self) -> frozenset[str]:
        """Reads keys."""
        return frozenset({"keys"})


@SCORERS.add("keynorm")
@dataclass(frozen=True, slots=True)
class KeyNorm(_OfKeys):
    """Small keys attract attention, so keep them (arXiv:2406.11430)."""

    def score(self, signals: Signals) -> Tensor:
        """Minus the L2 norm."""
        assert signals.keys is not None
        return -torch.linalg.vector_norm(signals.keys, dim=-1, dtype=torch.float32)


@SCORERS.add("keydiff")
@dataclass(frozen=True, slots=True)
class KeyDiff(_OfKeys):
    """Keys unlike the average key are kept (arXiv:2504.15364)."""

    def score(self, signals: Signals) -> Tensor:
        """Minus the cosine with the mean direction of the keys of the same head."""
        assert signals.keys is not None
        direction = normalize(signals.keys.float(), dim=-1)  # rows past a length are zero and stay zero
        anchor = direction.sum(dim=-2, keepdim=True)
        return -(direction * normalize(anchor, dim=-1)).sum(dim=-1)
