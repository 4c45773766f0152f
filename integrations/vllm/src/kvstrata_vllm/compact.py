"""Shortening a block table to the blocks that are kept, on the device.

Attention does not look at the order of keys (positions are in them already), only the newest tokens must stand last for
causality. So the kept blocks move to the front of each row and the length shrinks by a block for each one that is gone.
New tokens go where vLLM says: the slot mapping is not touched.

Letters: R rows of the batch · M blocks that a table has room for · S slots, one for each request that a worker knows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """The rows of one group in one step, after what is gone was taken out."""

    table: Tensor  # [R, M] int32: physical blocks, the kept ones first and in order
    lengths: Tensor  # [R] int32: tokens in the kept blocks
    order: Tensor  # [R, M] int64: the logical number of each of them
    slots: Tensor  # [R] int64


def find_slots(slot_mapping: Tensor, query_start: Tensor, slot_of_block: Tensor, block_size: int) -> Tensor:
    """The slot [R] of every row, told by the physical block that its last token goes to; 0 for rows nobody announced.

    slot_mapping [tokens] int64 · query_start [R+1] int32 · slot_of_block [blocks] int64
    """
    last = (query_start[1:] - 1).clamp_min(0).long()
    blocks = slot_mapping[last].div(block_size, rounding_mode="floor").clamp_min(0)
    return slot_of_block[blocks.long()]


def compact(table: Tensor, lengths: Tensor, slots: Tensor, keep: Tensor, block_size: int) -> Rows:
    """Take the blocks that are gone out of every row.

    table [R, M] int32 · lengths [R] int32 · slots [R] int64 · keep [S, M] bool
    """
    there = torch.arange(table.shape[1], device=table.device) < _blocks(lengths, block_size)[:, None]
    gone = there & ~keep[slots]
    order = (gone | ~there).to(torch.uint8).argsort(dim=1, stable=True)
    shorter = lengths - gone.sum(dim=1, dtype=lengths.dtype) * block_size
    return Rows(table.gather(1, order), shorter, order, slots)


def _blocks(lengths: Tensor, block_size: int) -> Tensor:
    return (lengths + block_size - 1).div(block_size, rounding_mode="floor")
