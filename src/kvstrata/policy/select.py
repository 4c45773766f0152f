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
    if not u.numel():
        return valid.clone()
    u = u.double().nan_to_num_(nan=NAN, posinf=INFINITY, neginf=-INFINITY)
    u = u.masked_fill_(protected, torch.inf)
    count = torch.maximum(cap, protected.sum(dim=-1)).clamp_min_(1)  # [B, H]
    excess = valid.sum(dim=-1) - count
    if int(excess.max()) <= 1:  # the usual decode step: one goes, and nothing need be sorted
        u = u.masked_fill_(~valid, torch.inf)
        worst = u == u.amin(dim=-1, keepdim=True)
        oldest = position.masked_fill(~worst, torch.iinfo(position.dtype).max).argmin(dim=-1, keepdim=True)
        return torch.ones_like(valid).scatter_(-1, oldest, (excess < 1)[..., None]) & valid
    u = u.masked_fill_(~valid, -torch.inf)
    worst = _largest(u, count.clamp_max_(u.shape[-1]))
    better, level = u > worst, (u == worst) & valid
    free = count - better.sum(dim=-1)
    if bool((level.sum(dim=-1) <= free).all()):
        return better | level
    order = position.masked_fill(~level, torch.iinfo(position.dtype).min).argsort(dim=-1, descending=True, stable=True)
    newest = torch.arange(u.shape[-1], device=u.device) < free[..., None]
    return better | torch.zeros_like(valid).scatter_(-1, order, newest) & level


def _largest(u: Tensor, number: Tensor) -> Tensor:
    """Of each u [B, H, U] the `number`-th largest, number [B, H] from 1 -> [B, H, 1]."""
    fewest, most = map(int, number.aminmax())
    if fewest == most:
        return u.kthvalue(u.shape[-1] - most + 1, dim=-1, keepdim=True).values
    return u.sort(dim=-1, descending=True).values.gather(-1, number[..., None] - 1)
