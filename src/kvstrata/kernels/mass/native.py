"""Column sums by the compiled module, which keeps scores in registers; `own` masks stay with the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.mass import ref
from kvstrata.kernels.mass.ref import SUM, Reduction


def column_mass(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    reduction: Reduction = SUM,
    softcap: float | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """See `kernels.mass.ref`."""
    if own is not None or not k.shape[2] or not q.shape[2]:
        return ref.column_mass(q, k, lse, scale=scale, reduction=reduction, softcap=softcap, own=own)
    mass = torch.empty(k.shape[:3], dtype=torch.float32)
    options = {"softcap": softcap or 0.0, "decay": reduction.decay, "counts": reduction.counts}
    threads = dispatch.native_threads()
    dispatch.native_module().column_mass(q, k, lse.contiguous(), mass, scale, **options, threads=threads)
    return mass


def column_lse(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """See `kernels.mass.ref`."""
    if own is not None or not k.shape[2] or not q.shape[2]:
        return ref.column_lse(q, k, scale=scale, softcap=softcap, sinks=sinks, own=own)
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    sinks = None if sinks is None else sinks.float()
    threads = dispatch.native_threads()
    dispatch.native_module().column_lse(q, k, lse, scale, softcap=softcap or 0.0, sinks=sinks, threads=threads)
    return lse
