"""Causal attention of new queries over the entries of a layer.

One contract, several implementations (`reference`, `exact`):

    attend(q, k, v, *, softmax, reduction, own) -> Attended

    q [B, H*G, Q, D], k [B, H, N, D] and v [B, H, N, Dv] with N >= Q: the last Q keys are the queries' own, so query i
    sees keys 0 .. N-Q+i; or all that came before and, of the queries' own, those that `own` [B, Q, Q] bool names
    (images, whose tokens see each other). Every row and head given has the same N; nothing is padded. Inputs are not
    modified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvstrata.kernels.attention import exact, ref
from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.mass import Reduction

KernelName = Literal["reference", "exact"]


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention returns.

    out [B, H*G, Q, Dv] in the dtype of q. lse [B, H*G, R] fp32, natural log, of the last R queries that `reduction`
    asks for, attention sinks included. mass [B, H, N] fp32: what `reduction` makes of the softmax probabilities of
    these queries. lse and mass are None without a reduction.
    """

    out: Tensor
    lse: Tensor | None
    mass: Tensor | None


_IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    "reference": ref.attend,
    "exact": exact.attend,
}
KERNELS = tuple(_IMPLEMENTATIONS)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax: Softmax,
    reduction: Reduction | None = None,
    own: Tensor | None = None,
    kernels: KernelName = "reference",
) -> Attended:
    """Attend with the named implementation; see the module docstring for shapes."""
    return Attended(*_IMPLEMENTATIONS[kernels](q, k, v, softmax=softmax, reduction=reduction, own=own))


__all__ = ["KERNELS", "Attended", "KernelName", "Softmax", "attend"]
