"""Attention through torch's own sdpa with the very arguments that transformers passes to it.

For proving that a full budget changes nothing, bit for bit. A chunk after stored entries builds its whole mask here
(chunk x keys), as transformers does; mass is computed beside it. Where sdpa cannot compute a model's attention
(soft-capping, sinks) the reference does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvstrata.kernels.attention import ref
from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.mass import Reduction, column_lse, column_mass


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, softmax: Softmax, reduction: Reduction | None, own: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (out, lse, mass) as `kernels.attention` words it."""
    if softmax.softcap is not None or softmax.sinks is not None:
        return ref.attend(q, k, v, softmax=softmax, reduction=reduction, own=own)
    queries, past, group, scale = q.shape[2], k.shape[2] - q.shape[2], q.shape[1] // k.shape[1], softmax.scale
    if own is None and (past == 0 or queries == 1):
        out = scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=group > 1)
    else:
        mask = torch.ones(queries, past + queries, dtype=torch.bool, device=q.device).tril_(past)[None]
        if own is not None:
            mask = torch.cat([mask[..., :past].expand(q.shape[0], -1, -1), own], dim=-1)
        repeated = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = scaled_dot_product_attention(q, *repeated, attn_mask=mask[:, None], scale=scale)
    if reduction is None:
        return out, None, None
    rows = reduction.last(queries)
    tail, seen = q[:, :, -rows:], None if own is None else own[:, -rows:]
    lse = column_lse(tail, k, scale=scale, own=seen)
    return out, None, column_mass(tail, k, lse, scale=scale, reduction=reduction, own=seen)
