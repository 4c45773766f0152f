"""Attention mass per key without an attention matrix: the lse comes first, then column sums over blocks of queries."""

from kvstrata.kernels.mass.future import Future, expected_mass
from kvstrata.kernels.mass.moments import NUMBERS, Moments, column_moments
from kvstrata.kernels.mass.ref import ALL_ROWS, Reduction, column_lse, column_mass, query_blocks

Summing = Reduction | Moments | Future  # how the attention of queries becomes a number or some per key

__all__ = [
    "ALL_ROWS",
    "NUMBERS",
    "Future",
    "Moments",
    "Reduction",
    "Summing",
    "column_lse",
    "column_mass",
    "column_moments",
    "expected_mass",
    "query_blocks",
]
