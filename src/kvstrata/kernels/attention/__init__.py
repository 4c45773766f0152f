"""Causal attention of new queries over the entries of a layer.

One contract, several implementations (`reference`, `exact`):

    attend(q, k, v, *, scale, mass_rows) -> Attended

    q [B, H*G, Q, D], k and v [B, H, N, D] with N >= Q: the last Q keys are the queries' own, so query i sees keys
    0 .. N-Q+i. Every row and head given has the same N; nothing is padded. Inputs are not modified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvstrata.kernels.attention import exact, ref

KernelName = Literal["reference", "exact"]


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention returns.

    out [B, H*G, Q, D] in the dtype of q. lse [B, H*G, R] fp32, natural log, of the last R = `mass_rows` queries.
    mass [B, H, N] fp32: softmax probability received by each key, summed over those queries and averaged over the G
    query heads of its group. lse and mass are None where `mass_rows` was 0.
    """

    out: Tensor
    lse: Tensor | None
    mass: Tensor | None


ALL_ROWS = -1  # as `mass_rows`: every query of this forward

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    "reference": ref.attend,
    "exact": exact.attend,
}
KERNELS = tuple(_IMPLEMENTATIONS)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, mass_rows: int = 0, kernels: KernelName = "reference"
) -> Attended:
    """Attend with the named implementation; see the module docstring for shapes."""
    rows = q.shape[2] if mass_rows == ALL_ROWS else min(mass_rows, q.shape[2])
    return Attended(*_IMPLEMENTATIONS[kernels](q, k, v, scale=scale, mass_rows=rows))
