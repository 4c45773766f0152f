"""Reference attention in torch: no copy of the keys, the group folded into the query length, blocks of queries.

A block bounds memory: nothing larger than BLOCK_ELEMENTS scores exists at a time, whatever the prompt length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels.mass import Reduction, column_mass, query_blocks
from kvstrata.kernels.mass.ref import block_scores

FOLD_FROM = 8  # rows x heads from which folding pays in fp32 too: with fewer, one task per query head balances better

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """How a model turns q . k into attention.

    scale multiplies. softcap c then gives c * tanh(x / c) (Gemma 2). sinks [H*G] are one more score per query head
    that takes probability and gives no value (gpt-oss); not to be confused with the first tokens that policies keep.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax: Softmax,
    reduction: Reduction | None,
    own: Tensor | None = None,
    column_mass: Callable[..., Tensor] = column_mass,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (out, lse, mass) as `kernels.attention` words it; `column_mass` sums what a prompt's keys received."""
    flash = q.device.type == "cpu" and softmax.softcap is None and k.shape[-1] == v.shape[-1] and own is None
    if q.shape[2] == 1 and own is None:
        return _decode(q, k, v, softmax, reduction, flash)
    out, lse = _causal(q, k, v, softmax, flash, own)
    if softmax.sinks is not None:
        out, lse = _with_sinks(out, lse, softmax.sinks)
    if reduction is None:
        return out, lse, None
    rows = reduction.last(q.shape[2])
    mass = column_mass(
        q[:, :, -rows:],
        k,
        lse[:, :, -rows:],
        scale=softmax.scale,
        reduction=reduction,
        softcap=softmax.softcap,
        own=None if own is None else own[:, -rows:],
    )
    return out, lse, mass


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let the sinks [H*G] take their probability from out [B, H*G, Q, Dv] and lse [B, H*G, Q]."""
    whole = torch.logaddexp(lse, sinks.float()[:, None])
    return (out * (lse - whole).exp_()[..., None]).to(out.dtype), whole


def _decode(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, reduction: Reduction | None, flash: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    heads = k.shape[1]
    folded = q.view(q.shape[0], heads, -1, q.shape[-1])  # [B, H, G, D]: one pass over the keys serves the group
    if reduction is None and flash:
        apart = q.dtype == torch.float32 and k.shape[0] * heads < FOLD_FROM
        out, lse = _flash_cpu(q if apart else folded, k, v, 0.0, False, scale=softmax.scale)
        out = out.reshape(q.shape)
        if softmax.sinks is not None:
            out = _with_sinks(out, lse.reshape(q.shape[:3]), softmax.sinks)[0]
        return out, None, None
    scores = torch.matmul(folded.float() * softmax.scale, k.float().transpose(-1, -2))  # [B, H, G, N]
    if softmax.softcap is not None:
        scores = scores.div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    lse = scores.logsumexp(dim=-1, keepdim=True)
    if softmax.sinks is not None:
        lse = torch.logaddexp(lse, softmax.sinks.float().view(heads, -1, 1))
    p = scores.sub_(lse).exp_()
    out = torch.matmul(p, v.float()).to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
    if reduction is None:
        return out, None, None
    mass = p.mean(dim=2)
    return out, lse.reshape(q.shape[:3]), (mass * k.shape[2] > 1.0).float() if reduction.counts else mass


def _causal(
    q: Tensor, k: Tensor, v: Tensor, softmax: Softmax, flash: bool, own: Tensor | None
) -> tuple[Tensor, Tensor]:
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    if past == 0 and flash:
        out, lse = _flash_cpu(q, k, v, 0.0, True, scale=softmax.scale)
        return out, lse
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    width = k.shape[2] if flash else q.shape[0] * q.shape[1] * k.shape[2]  # flash holds the mask only, no scores
    for start, stop in query_blocks(queries, width):
        seen = past + stop if own is None else k.shape[2]
        block = (q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen])
        if flash:
            mask = _mask(start, stop, past, q.device)
            part, part_lse = _flash_cpu(*block, 0.0, False, attn_mask=mask, scale=softmax.scale)
        else:
            part, part_lse = _plain(*block, past + start, softmax, None if own is None else own[:, start:stop])
        out[:, :, start:stop], lse[:, :, start:stop] = part, part_lse
    return out, lse


def _mask(start: int, stop: int, past: int, device: torch.device) -> Tensor:
    """Additive causal mask [stop - start, past + stop] of queries start..stop over the keys they may see."""
    row = torch.arange(past + start, past + stop, device=device)[:, None]
    hidden = torch.arange(past + stop, device=device)[None] > row
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _plain(
    q: Tensor, k: Tensor, v: Tensor, first: int, softmax: Softmax, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one block in fp32, where no operator does it and also returns the lse."""
    scores = block_scores(q, k, first, softmax.scale, softmax.softcap, own)  # [B, H, G, Q, N]
    lse = scores.logsumexp(dim=-1)
    out = torch.matmul((scores - lse[..., None]).exp(), v.float()[:, :, None])
    return out.reshape(*q.shape[:3], -1).to(q.dtype), lse.reshape(q.shape[:3])
