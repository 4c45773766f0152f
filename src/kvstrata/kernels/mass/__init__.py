"""Attention mass per key without an attention matrix: the lse comes first, then column sums over blocks of queries."""

from kvstrata.kernels.mass.ref import column_lse, column_mass, query_blocks

__all__ = ["column_lse", "column_mass", "query_blocks"]
