"""The one selector: which units stay."""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min


def select(u: Tensor, cap: Tensor, protected: Tensor, valid: Tensor, pooled: bool = False) -> Tensor:
    """Keep the `cap` best units of each row and head, or (`pooled`) of each row over all its heads.

    Protected units always stay, even beyond `cap`; NaN ranks below every number; ties go to the later unit; at least
    one valid unit is kept. Units stand in ascending order of position.

    u [B, H, U] fp32 · cap [B, 1|H] int64, per head also when pooled · protected, valid [B, H, U] bool
    -> keep [B, H, U] bool
    """
    if pooled:
        protected = select(u, torch.ones_like(cap), protected, valid)  # no head ends empty
        total = cap.expand(u.shape[:2]).sum(dim=1, keepdim=True)
        flat = [t.transpose(1, 2).flatten(1)[:, None] for t in (u, protected, valid)]  # position-major: ties stay fair
        keep = select(flat[0], total, flat[1], flat[2])
        return keep.view(u.shape[0], u.shape[2], u.shape[1]).transpose(1, 2)
    u = u.nan_to_num(nan=LOWEST, posinf=-LOWEST, neginf=LOWEST)
    u = u.masked_fill(protected, torch.inf).masked_fill_(~valid, -torch.inf)
    count = torch.maximum(cap, protected.sum(dim=-1)).clamp_min(1)  # [B, H]
    order = u.flip(-1).argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(u.shape[-1], device=u.device) < count[..., None]
    keep = torch.zeros_like(valid).scatter_(-1, order, first).flip(-1)
    return keep & valid
