"""How likely the queries of a repeated context would be to ask for each of its keys, without repeating it.

    echo(q, k, base, *, before, band, softmax, skip, less, kernels) -> Tensor

    q [B, H*G, R, D] are queries of R tokens in a row, k [B, H, S, D] keys of S tokens in a row turned back by
    `band.shift` positions, which is the same as turning the queries forward; query r belongs to key `before` + r.
    Each query sees the keys at offsets band.low .. band.high from its own, as far as there are any, from number `skip`
    on; base [B, H*G, R] fp32 is the log-sum-exp of all else that its softmax runs over.
    -> [B, H*G, S] fp32: the largest log-probability that any query gives each key; -inf where none sees it. Of each
    query's, less [B, H, R] fp32 is taken off first; a query with +inf asks for nothing.

Definition: docs/methods.md, "echo".
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.dispatch import Implementation
from kvstrata.kernels.echo import native, ref
from kvstrata.kernels.echo.ref import WIDEST, Band, Weight

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"reference": ref.echo, "native": native.echo}


def echo(
    q: Tensor,
    k: Tensor,
    base: Tensor,
    *,
    before: int,
    band: Band,
    softmax: Softmax,
    skip: int = 0,
    less: Tensor | None = None,
    kernels: Implementation = "reference",
) -> Tensor:
    """Score with the named implementation, or the reference where it has none; see the module docstring."""
    if less is None:
        less = base.new_zeros(q.shape[0], k.shape[1], q.shape[2])
    if kernels == "triton":
        from kvstrata.kernels.echo import triton

        return triton.echo(q, k, base, less, before=before, band=band, softmax=softmax, skip=skip)
    implementation = IMPLEMENTATIONS.get(kernels, ref.echo)
    return implementation(q, k, base, less, before=before, band=band, softmax=softmax, skip=skip)


__all__ = ["IMPLEMENTATIONS", "WIDEST", "Band", "Weight", "echo"]
