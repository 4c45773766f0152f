"""Norms of what an attention layer's output projection makes of values, in the small form that only norms need.

output_norms(outputs, v, kernels) -> Tensor [B, H, G, S] fp32

outputs [H*G, D, D] fp32 are such that the norm of v @ outputs[g] is that of what query head g's part of the output
projection makes of a value v, [B, H, S, D] all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvstrata.kernels.dispatch import Implementation
from kvstrata.kernels.norms import native, ref

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reference": ref.output_norms,
    "native": native.output_norms,
}


def output_norms(outputs: Tensor, v: Tensor, kernels: Implementation = "reference") -> Tensor:
    """Norms by the named implementation, or the reference where it has none; see the module docstring."""
    return IMPLEMENTATIONS.get(kernels, ref.output_norms)(outputs, v)


__all__ = ["IMPLEMENTATIONS", "output_norms"]
