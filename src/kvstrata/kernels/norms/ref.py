"""Reference in torch: one matrix product for all heads that share values."""

from __future__ import annotations

import torch
from torch import Tensor

TOGETHER = 1 << 22  # numbers of products at once, which bounds memory


def output_norms(outputs: Tensor, v: Tensor) -> Tensor:
    """See `kernels.norms`."""
    turn = outputs.unflatten(0, (v.shape[1], -1)).transpose(1, 2).flatten(2)  # [H, D, G*D]
    size = max(1, TOGETHER // (v.shape[0] * turn[:, 0].numel()))
    parts = ((s.float() @ turn).unflatten(-1, (-1, v.shape[-1])) for s in v.split(size, dim=2))  # [B, H, s, G, D]
    norms = [torch.linalg.vector_norm(part, dim=-1).transpose(2, 3) for part in parts]
    return torch.cat(norms, dim=-1)
