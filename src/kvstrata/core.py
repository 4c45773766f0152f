"""Words and value types that every other module shares.

Letters used for shapes everywhere in this package:

B rows of the batch · L layers · H key-value heads · G query heads per key-value head · D head_dim
T tokens of the prompt · Q queries of this forward · N entries of a layer now stored
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")


class KvstrataError(Exception):
    """Base of every error this package raises on purpose."""


class SpecError(KvstrataError, ValueError):
    """A policy, budget or option that cannot work as written; the message names the fix."""


class InputError(KvstrataError, ValueError):
    """Tokens or a mask that the cache cannot accept; nothing was stored."""


class UnsupportedModelError(KvstrataError):
    """A model, or a feature of its attention, that kvstrata refuses to run wrongly."""


class Tier(IntEnum):
    """Where an entry lives after a plan, in order of precision."""

    DROP = 0
    INT2 = 1
    INT4 = 2
    INT8 = 3
    EXACT = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A number kept beside every stored entry, moved and freed with it. New entries start at zero."""

    name: str
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one entry's number."""
        return self.dtype.itemsize


POSITION = Column("position", torch.int32)  # index among the row's real tokens; never renumbered
PROMPT = Column("prompt", torch.uint8)  # 1 for entries that a prompt wrote, where a policy keeps these apart
STEP = Column("step", torch.int32)  # number of the forward that wrote the entry


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a budget needs to know of a layer to say how many entries it may keep."""

    layer: int  # number of the layer in the model
    depth: int  # its place among the compressed layers
    num_layers: int  # compressed layers of the model
    num_kv_heads: int
    entry_bytes: int  # one stored entry over all key-value heads of one layer, columns included
    batch_size: int
    token_bytes: int = 0  # key and value of one token over all heads, as an uncompressed cache stores them
    unit_bytes: int = 0  # entries that are coded together, over all heads, columns included
    frame_bytes: int = 0  # what the coded entries of one row share beside that


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """What one layer may show a policy after attention. Entries stand in no particular order; `position` tells.

    The heads axis of `position`, `valid`, `protected` and of every column is 1 where all heads of the layer hold
    the same tokens, else H. Slots past a row's length are not `valid` and hold no meaning.
    """

    layer: int
    step: int
    position: Tensor  # [B, 1|H, N] int32
    valid: Tensor  # [B, 1|H, N] bool
    protected: Tensor  # [B, 1|H, N] bool; kept whatever the score says
    columns: Mapping[str, Tensor]  # each [B, 1|H, N]
    queries: tuple[int, ...]  # [B] real tokens of each row in this forward
    mass: Tensor | None = None  # [B, H, N] fp32: attention of this forward, as the scorer reduces it; moments [..., 4]
    keys: Tensor | None = None  # [B, H, N, D]
    values: Tensor | None = None  # [B, H, N, Dv]
    added: Tensor | None = None  # [B, H, N] fp32: norm of what the output projection makes of a value, group mean
    caps: Tensor | None = None  # [B, 1|H] int64: entries that may stay
    tier: Tensor | None = None  # [B, 1|H, N] uint8, values of `Tier`; None where all are exact
    dormant: Tensor | None = None  # [B, 1|H, N] bool: exact entries that have codes already; None where none has


@dataclass(frozen=True, slots=True, eq=False)
class Merges:
    """Entries that are added to others which stay: tensors [M] with one number for each such pair.

    value[target] = own * value[target] + sum of weight * value[source] over the pairs of a target, by the values of
    before. `own` is 1, or with `mean` what the weights leave of 1. Targets are exact; sources may be coded.
    """

    row: Tensor  # int64, like the following
    head: Tensor  # of the plan's 1|H; where heads share their tokens a pair holds for all of them
    source: Tensor  # slot in the dense forms
    target: Tensor
    weight: Tensor  # fp32
    mean: bool = False
    keys: bool = False  # whether keys are merged as values are


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Which tier every entry of a layer goes to. Only the store acts on it: first merges, then columns, then tiers."""

    tier: Tensor  # [B, 1|H, N], values of `Tier`
    nan_scores: Tensor | int = 0  # scores that were NaN, as a 0-dim tensor
    merges: Merges | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # new values [B, 1|H, N]
