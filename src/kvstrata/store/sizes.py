"""Bytes of entries before there are any."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kvstrata.kernels.codec import Codec
from kvstrata.kernels.pages import PAGE, Format


def sizes_of(k: Tensor, v: Tensor, column_bytes: int, per_head: bool, codecs: Iterable[Codec]) -> dict[str, int]:
    """The sizes of a `LayerShape` once k and v [B, H, Q, D] are stored, with columns per head or shared."""
    heads, token = k.shape[1], k.shape[1] * (k.shape[-1] + v.shape[-1]) * k.element_size()
    columns = column_bytes * (heads if per_head else 1)
    sizes = {"entry_bytes": token + columns, "token_bytes": token, "unit_bytes": 0, "frame_bytes": 0}
    for codec in codecs:  # one, where they are asked for
        form = Format(codec, k.dtype, k.shape[-1], v.shape[-1])
        shared = -(-form.grid_bytes // PAGE) * codec.running  # of a page's copy of a running grid
        sizes["unit_bytes"] = heads * (form.unit_bytes + shared) + codec.unit * columns
        sizes["frame_bytes"] = heads * (4 * form.frame_numbers + form.grid_bytes * codec.running)
    return sizes
