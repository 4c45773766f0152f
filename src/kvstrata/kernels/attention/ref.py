"""Reference attention in torch: no copy of the keys, the group folded into the query length, blocks of queries.

A block bounds memory: nothing larger than BLOCK_ELEMENTS scores exists at a time, whatever the prompt length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels.mass import column_mass, query_blocks

FOLD_FROM = 8  # rows x heads from which folding pays in fp32 too: with fewer, one task per query head balances better

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mass_rows: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (out, lse, mass) as `kernels.attention` words it."""
    if q.shape[2] == 1:
        return _decode(q, k, v, scale=scale, mass=mass_rows > 0)
    out, lse = _causal(q, k, v, scale=scale)
    if not mass_rows:
        return out, None, None
    lse = lse[:, :, -mass_rows:]
    return out, lse, column_mass(q[:, :, -mass_rows:], k, lse, scale=scale)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mass: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    heads = k.shape[1]
    folded = q.view(q.shape[0], heads, -1, q.shape[-1])  # [B, H, G, D]: one pass over the keys serves the group
    if not mass and q.device.type == "cpu":
        if q.dtype == torch.float32 and k.shape[0] * heads < FOLD_FROM:
            return _flash_cpu(q, k, v, 0.0, False, scale=scale)[0], None, None
        return _flash_cpu(folded, k, v, 0.0, False, scale=scale)[0].reshape(q.shape), None, None
    scores = torch.matmul(folded.float() * scale, k.float().transpose(-1, -2))  # [B, H, G, N]
    lse = scores.logsumexp(dim=-1, keepdim=True)
    p = scores.sub_(lse).exp_()
    out = torch.matmul(p, v.float()).to(q.dtype).view(q.shape)
    return out, lse.view(q.shape[:3]), p.mean(dim=2)


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    on_cpu = q.device.type == "cpu"
    if past == 0 and on_cpu:
        out, lse = _flash_cpu(q, k, v, 0.0, True, scale=scale)
        return out, lse
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    width = k.shape[2] if on_cpu else q.shape[0] * q.shape[1] * k.shape[2]  # flash holds the mask only, no scores
    for start, stop in query_blocks(queries, width):
        seen = past + stop
        mask = _mask(start, stop, past, q.device)
        block = (q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen])
        if on_cpu:
            part, part_lse = _flash_cpu(*block, 0.0, False, attn_mask=mask, scale=scale)
        else:
            part, part_lse = _plain(*block, mask, scale=scale)
        out[:, :, start:stop], lse[:, :, start:stop] = part, part_lse
    return out, lse


def _mask(start: int, stop: int, past: int, device: torch.device) -> Tensor:
    """Additive causal mask [stop - start, past + stop] of queries start..stop over the keys they may see."""
    row = torch.arange(past + start, past + stop, device=device)[:, None]
    hidden = torch.arange(past + stop, device=device)[None] > row
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of one block in fp32, for devices without an operator that also returns the lse."""
    batch, heads, dim = k.shape[0], k.shape[1], q.shape[-1]
    grouped = q.view(batch, heads, -1, q.shape[2], dim).float() * scale  # [B, H, G, Q, D]
    scores = torch.matmul(grouped, k.float()[:, :, None].transpose(-1, -2)) + mask
    lse = scores.logsumexp(dim=-1)
    out = torch.matmul((scores - lse[..., None]).exp(), v.float()[:, :, None])
    return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:3])
