"""The one selector: which units stay."""

from __future__ import annotations

import torch
from torch import Tensor

NAN, INFINITY = -1e300, 1e200  # in float64: NaN under every number, infinities beyond every float32


def select(u: Tensor, position: Tensor, cap: Tensor, protected: Tensor, valid: Tensor, pooled: bool = False) -> Tensor:
    """Keep the `cap` best units of each row and head, or (`pooled`) of each row over all its heads.

    Protected units always stay, even beyond `cap`; NaN ranks below every number; ties go to the later position; at
    least one valid unit of every row and head is kept.

    u [B, H, U] float · position [B, H, U] int · cap [B, 1|H] int64, per head also when pooled
    protected, valid [B, H, U] bool -> keep [B, H, U] bool
    """
    if pooled:
        protected = select(u, position, torch.ones_like(cap), protected, valid)  # no head ends empty
        total = cap.expand(u.shape[:2]).sum(dim=1, keepdim=True)
        flat = [t.flatten(1)[:, None] for t in (u, position, protected, valid)]
        return select(flat[0], flat[1], total, flat[2], flat[3]).view(u.shape)
    u = u.double().nan_to_num_(nan=NAN, posinf=INFINITY, neginf=-INFINITY)
    u = u.masked_fill_(protected, torch.inf)
    count = torch.maximum(cap, protected.sum(dim=-1)).clamp_min_(1)  # [B, H]
    excess = valid.sum(dim=-1) - count
    if excess.numel() and int(excess.max()) <= 1:  # the usual decode step: one goes, and nothing need be sorted
        u = u.masked_fill_(~valid, torch.inf)
        worst = u == u.amin(dim=-1, keepdim=True)
        oldest = position.masked_fill(~worst, torch.iinfo(position.dtype).max).argmin(dim=-1, keepdim=True)
        return torch.ones_like(valid).scatter_(-1, oldest, (excess < 1)[..., None]) & valid
    u = u.masked_fill_(~valid, -torch.inf)
    newest = position.argsort(dim=-1, descending=True, stable=True)
    order = newest.gather(-1, u.gather(-1, newest).argsort(dim=-1, descending=True, stable=True))
    first = torch.arange(u.shape[-1], device=u.device) < count[..., None]
    return torch.zeros_like(valid).scatter_(-1, order, first) & valid
