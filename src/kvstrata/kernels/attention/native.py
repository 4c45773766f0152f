"""Attention of a few queries over pages, by the compiled module: one pass over the keys for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.attention import ref
from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.mass.native import column_mass
from kvstrata.kernels.pages import Pages

attend = partial(ref.attend, column_mass=column_mass)  # prompts: torch's flash operator is hard to beat


def attend_pages(
    q: Tensor,
    tiers: Sequence[Pages],
    *,
    softmax: Softmax,
    reduction: Reduction | None,
    tokens: Sequence[int] | None,
    new: tuple[Tensor, Tensor] | None,
    widths: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Return out and mass as `kernels.attention` words it."""
    batch, query_heads, queries = q.shape[:3]
    out = torch.empty(batch, queries, query_heads, tiers[0].format.v_dim, dtype=q.dtype).transpose(1, 2)
    weights: list[float] = []
    mass, offsets = None, [sum(widths[:i]) for i in range(len(widths))]
    if reduction is not None:
        heads = len(tiers[0].lengths) // batch
        mass = torch.empty(batch, heads, sum(widths), dtype=torch.float32)
        weights = [reduction.decay**age for age in range(reduction.last(queries))]
    k, v = new or (None, None)
    dispatch.native_module().attend(
        q,
        [tier.twin for tier in tiers],
        out,
        softmax.scale,
        new_k=k,
        new_v=v,
        tokens=None if tokens is None else torch.tensor(tokens, dtype=torch.int32),
        softcap=softmax.softcap or 0.0,
        sinks=None if softmax.sinks is None else softmax.sinks.float(),
        weights=weights,
        counts=reduction is not None and reduction.counts,
        mass=mass,
        offsets=offsets,
        threads=dispatch.native_threads(),
    )
    return out, mass
