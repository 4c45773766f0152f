"""Causal attention of new queries over the entries of a layer.

Two contracts. Over plain tensors, for prompts (`reference`, `exact`, `native`):

    attend(q, k, v, *, softmax, reduction, own, kernels) -> Attended

    q [B, H*G, Q, D], k [B, H, N, D] and v [B, H, N, Dv] with N >= Q: the last Q keys are the queries' own, so query i
    sees keys 0 .. N-Q+i; or all that came before and, of the queries' own, those that `own` [B, Q, Q] bool names
    (images, whose tokens see each other). Every row and head given has the same N; nothing is padded. Inputs are not
    modified.

Over pages, for the few queries of a decode step (`native`, `triton`):

    attend_pages(q, tiers, *, softmax, reduction, tokens, new, widths, kernels) -> out, mass

    The last tokens[b] of the Q queries of each row are real; out is zero for the others. tiers[0] is exact and holds
    the queries' own entries as its newest; `new` (k, v) are those, to be appended first. mass [B, H, sum(widths)] has
    the entries of tier i from sum(widths[:i]) on, zeros past a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvstrata.kernels.attention import exact, native, ref
from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.dispatch import KERNELS, Implementation, KernelName
from kvstrata.kernels.mass import Reduction
from kvstrata.kernels.pages import Pages


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What attention returns.

    out [B, H*G, Q, Dv] in the dtype of q. lse [B, H*G, Q] fp32, natural log, attention sinks included; None where it
    is not made on the way, as for single queries without a reduction. mass [B, H, N] fp32: what `reduction` makes of
    the softmax probabilities of the queries that it asks for; None without one.
    """

    out: Tensor
    lse: Tensor | None
    mass: Tensor | None


DENSE: dict[Implementation, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    "reference": ref.attend,
    "exact": exact.attend,
    "native": native.attend,
}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax: Softmax,
    reduction: Reduction | None = None,
    own: Tensor | None = None,
    kernels: Implementation = "reference",
) -> Attended:
    """Attend with the named implementation, or the reference where it has none; see the module docstring."""
    implementation = DENSE.get(kernels, ref.attend)
    return Attended(*implementation(q, k, v, softmax=softmax, reduction=reduction, own=own))


def attend_pages(
    q: Tensor,
    tiers: Sequence[Pages],
    *,
    softmax: Softmax,
    reduction: Reduction | None = None,
    tokens: Sequence[int] | None = None,
    new: tuple[Tensor, Tensor] | None = None,
    widths: Sequence[int],
    kernels: Implementation = "native",
) -> tuple[Tensor, Tensor | None]:
    """Attend over pages with compiled kernels; see the module docstring."""
    if kernels == "triton":
        from kvstrata.kernels.attention import triton

        at = [tier.twin for tier in tiers]
        if new is not None:
            triton.append(tiers[0], *new, tokens=tokens, at=at[0])
        out, _, mass = triton.attend_pages(
            q, tiers, softmax=softmax, tokens=tokens, reduction=reduction, widths=widths, at=at
        )
        return out, mass
    return native.attend_pages(q, tiers, softmax=softmax, reduction=reduction, tokens=tokens, new=new, widths=widths)


__all__ = ["DENSE", "KERNELS", "Attended", "KernelName", "Softmax", "attend", "attend_pages"]
