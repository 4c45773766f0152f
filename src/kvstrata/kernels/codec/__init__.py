"""Codecs: how keys and values are written in fewer bits. A codec is a record; what runs it is beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["channel", "token"]
KeySpace = Literal["post", "pre"]


@dataclass(frozen=True, slots=True)
class Codec:
    """Integer codes with a grid: x = zero + scale * code, or scale * code where `symmetric`.

    k_bits and v_bits are 8, 4 or 2. A key's grid is per channel, over `window` consecutive slots of a page, or per
    token over its channels (`k_axis="token"`); a value's is per channel over the page (`v_axis="channel"`) or per token
    over its channels. Grids of symmetric codecs are fp32, others are kept in the cache's dtype, and codes are computed
    against the grid as kept.

    running: one grid for all pages of a row and head; it grows when an entry does not fit, and codes are rounded anew.
    rotated: the mean key of a row and head is taken off, and keys and values are turned by a Hadamard matrix.
    key_space: "pre" codes keys before rotary positions. ledger: entries may become exact again, and keep their codes.
    corrected: attention takes off what rounded keys gain on average; for grids of keys per token alone.
    """

    name: str
    k_bits: int
    v_bits: int
    symmetric: bool
    v_axis: Axis
    window: int = 64
    k_axis: Axis = "channel"
    running: bool = False
    rotated: bool = False
    key_space: KeySpace = "post"
    ledger: bool = False
    corrected: bool = False

    @property
    def unit(self) -> int:
        """Entries that share a grid of their own, so that they are coded, moved and freed together."""
        return 1 if self.running or self.k_axis == "token" else self.window

    @property
    def by_page(self) -> bool:
        """Whether whole pages are coded once under a grid of their own, inside which entries may be dropped."""
        return self.unit == 64 and self.plain and not self.ledger

    @property
    def plain(self) -> bool:
        """Whether compiled kernels know it: codes and grids alone give the keys as attention reads them."""
        return self.k_axis == "channel" and self.window >= 8 and not self.rotated and self.key_space == "post"


INT8 = Codec("int8", 8, 8, symmetric=True, v_axis="channel")
INT8_RUNNING = replace(INT8, name="int8-running", running=True)
INT4 = Codec("int4", 4, 4, symmetric=False, v_axis="token")
INT2 = Codec("int2", 2, 2, symmetric=False, v_axis="token")
ROT4 = Codec("rot4", 4, 4, symmetric=False, v_axis="token", k_axis="token", rotated=True)
K4V2 = replace(ROT4, name="k4v2", v_bits=2)
K2V2 = replace(ROT4, name="k2v2", k_bits=2, v_bits=2)
CODECS = {codec.name: codec for codec in (INT8, INT4, INT2)}

__all__ = [
    "CODECS",
    "INT2",
    "INT4",
    "INT8",
    "INT8_RUNNING",
    "K2V2",
    "K4V2",
    "ROT4",
    "Axis",
    "Codec",
    "KeySpace",
]
