"""The banded repeat by the compiled module."""

from __future__ import annotations

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.codec.rotation import Turn
from kvstrata.kernels.echo.ref import Band


def echo(
    q: Tensor,
    k: Tensor,
    sinks: Tensor,
    lse: Tensor,
    less: Tensor,
    *,
    turn: Turn,
    first: int,
    before: int,
    band: Band,
    softmax: Softmax,
    skip: int,
) -> Tensor:
    """See `kernels.echo`."""
    best = torch.empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
    dispatch.native_module().echo(
        q,
        k,
        sinks,
        lse.contiguous(),
        less.contiguous(),
        turn.cos.float().contiguous(),
        turn.sin.float().contiguous(),
        best,
        softmax.scale,
        neighbours=turn.pairs == "neighbours",
        first=first,
        low=band.low,
        high=band.high,
        before=before,
        skip=skip,
        softcap=softmax.softcap or 0.0,
        threads=dispatch.native_threads(),
    )
    return best
