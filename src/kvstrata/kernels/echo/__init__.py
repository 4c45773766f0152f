"""How likely the queries of a repeated context would be to ask for each of its keys, without repeating it.

    echo(q, k, sinks, lse, *, turn, first, before, band, softmax, skip, less, kernels) -> Tensor

    q [B, H*G, R, D] are queries of R tokens in a row, the first of them at position `first`, and lse [B, H*G, R] fp32
    is what each saw. k [B, H, S, D] are keys of S tokens in a row; query r belongs to key `before` + r. sinks
    [B, H, s, D], at most MOST_SINKS, are the keys of the first positions. `turn` takes keys back by `band.shift`
    positions, which is the same as turning the queries forward.

    A repeated query sees the turned keys at offsets band.low .. band.high from its own, as far as there are any, from
    number `skip` on; the turned sinks; and what it saw itself, less the sinks among that.
    -> [B, H*G, S] fp32: the largest log-probability that any query gives each key; -inf where none sees it. Of each
    query's, less [B, H, R] fp32 is taken off first; a query with +inf asks for nothing.

Definition: docs/methods.md, "echo".
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvstrata.kernels.attention.ref import Softmax
from kvstrata.kernels.codec.rotation import Turn
from kvstrata.kernels.dispatch import Implementation
from kvstrata.kernels.echo import native, ref
from kvstrata.kernels.echo.ref import MOST_SINKS, WIDEST, Band, Weight

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {"reference": ref.echo, "native": native.echo}


def echo(
    q: Tensor,
    k: Tensor,
    sinks: Tensor,
    lse: Tensor,
    *,
    turn: Turn,
    first: int,
    before: int,
    band: Band,
    softmax: Softmax,
    skip: int = 0,
    less: Tensor | None = None,
    kernels: Implementation = "reference",
) -> Tensor:
    """Score with the named implementation, or the reference where it has none; see the module docstring."""
    if less is None:
        less = lse.new_zeros(q.shape[0], k.shape[1], q.shape[2])
    implementation = IMPLEMENTATIONS.get(kernels, ref.echo)
    if kernels == "triton":
        from kvstrata.kernels.echo import triton

        implementation = triton.echo
    return implementation(
        *(q, k, sinks, lse, less), turn=turn, first=first, before=before, band=band, softmax=softmax, skip=skip
    )


__all__ = ["IMPLEMENTATIONS", "MOST_SINKS", "WIDEST", "Band", "Weight", "echo"]
