"""Attention mass per key without an attention matrix: the lse comes first, then column sums over blocks of queries."""

from kvstrata.kernels.mass.moments import Moments, column_moments
from kvstrata.kernels.mass.ref import ALL_ROWS, Reduction, column_lse, column_mass, query_blocks

__all__ = ["ALL_ROWS", "Moments", "Reduction", "column_lse", "column_mass", "column_moments", "query_blocks"]
