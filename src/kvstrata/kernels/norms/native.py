"""Norms by the compiled module: products are squared and summed where they arise, and never stored."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels import dispatch


def output_norms(outputs: Tensor, v: Tensor) -> Tensor:
    """See `kernels.norms`."""
    norms = torch.empty(*v.shape[:2], outputs.shape[0] // v.shape[1], v.shape[2], dtype=torch.float32)
    if not norms.numel():
        return norms
    dispatch.native_module().output_norms(outputs.contiguous(), v, norms, threads=dispatch.native_threads())
    return norms
