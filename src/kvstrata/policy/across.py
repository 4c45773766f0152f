"""One choice over the layers of a cache: which of all their entries are worth most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstrata.core import Signals
from kvstrata.policy.select import select


def select_across(
    scores: Sequence[Tensor], signals: Sequence[Signals], limits: Sequence[list[tuple[int, ...]]]
) -> list[Tensor]:
    """Keep the best entries of each row over all layers and heads, as many as the limits of all heads allow together.

    scores [B, H, N] of each layer, whose N may differ. -> keep [B, H, N] bool of each. Every head keeps at least one
    entry; protected ones stay.
    """
    rows, device = scores[0].shape[0], scores[0].device
    total = torch.zeros(rows, 1, dtype=torch.long, device=device)
    parts: list[list[Tensor]] = []
    for z, seen, caps in zip(scores, signals, limits, strict=True):
        shape = seen.position.shape
        one = torch.ones(rows, 1, dtype=torch.long, device=z.device)
        protected, valid = seen.protected.expand(shape), seen.valid.expand(shape)
        protected = select(z.expand(shape), seen.position, one, protected, valid)  # no head ends empty
        total += torch.tensor(caps, device=device).expand(rows, shape[1]).sum(dim=1, keepdim=True)
        parts.append([t.flatten(1)[:, None].to(device) for t in (z.expand(shape), seen.position, protected, valid)])
    z, position, protected, valid = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    flat = select(z, position, total, protected, valid).flatten(1).split([p[0].shape[2] for p in parts], dim=1)
    return [keep.view(seen.position.shape).to(seen.position.device) for keep, seen in zip(flat, signals, strict=True)]
