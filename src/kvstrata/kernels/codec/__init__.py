"""Codecs: how keys and values are written in fewer bits. A codec is a record; what runs it is beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["channel", "token"]


@dataclass(frozen=True, slots=True)
class Codec:
    """Integer codes with a grid: x = zero + scale * code, or scale * code where `symmetric`.

    k_bits and v_bits are 8, 4 or 2. A key's grid is per channel, over `window` consecutive slots of a page; a
    value's is per channel over the page (`v_axis="channel"`) or per token over its channels. Grids of symmetric
    codecs are fp32, others are kept in the cache's dtype, and codes are computed against the grid as kept.
    """

    name: str
    k_bits: int
    v_bits: int
    symmetric: bool
    v_axis: Axis
    window: int = 64


INT8 = Codec("int8", 8, 8, symmetric=True, v_axis="channel")
INT4 = Codec("int4", 4, 4, symmetric=False, v_axis="token")
INT2 = Codec("int2", 2, 2, symmetric=False, v_axis="token")
CODECS = {codec.name: codec for codec in (INT8, INT4, INT2)}

__all__ = ["CODECS", "INT2", "INT4", "INT8", "Axis", "Codec"]
