"""Attention mass per key without an attention matrix: the lse comes first, then column sums over blocks of queries."""

from kvstrata.kernels.mass.future import Future, expected_mass
from kvstrata.kernels.mass.ref import ALL_ROWS, Reduction, column_lse, column_mass, query_blocks

__all__ = ["ALL_ROWS", "Future", "Reduction", "column_lse", "column_mass", "expected_mass", "query_blocks"]
