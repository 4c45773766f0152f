"""Which tier a kept entry goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from kvstrata.core import Signals, SpecError, Tier
from kvstrata.kernels.codec import INT2, INT4, INT8, INT8_RUNNING, K2V2, K4V2, ROT4, Codec, KeySpace

CodecName = Literal["int8", "int8-running", "int4", "int2", "rot4", "k4v2", "k2v2"]
CODECS: Mapping[str, tuple[Tier, Codec]] = {
    "int8": (Tier.INT8, INT8),
    "int8-running": (Tier.INT8, INT8_RUNNING),
    "int4": (Tier.INT4, INT4),
    "int2": (Tier.INT2, INT2),
    "rot4": (Tier.INT4, ROT4),
    "k4v2": (Tier.INT4, K4V2),
    "k2v2": (Tier.INT2, K2V2),
}
GROUPED = ("int4", "int2")  # whose keys have a grid per channel and group


@dataclass(frozen=True, slots=True)
class Coding:
    """A codec as a policy asks for it: `group` entries share a grid of keys, which are coded after or before rotary."""

    codec: CodecName = "int8"
    group: int = 64
    key_space: KeySpace = "post"
    ledger: bool = False  # whether entries may become exact again, their codes kept
    corrected: bool = False  # whether attention takes off what rounded keys gain on average

    def __post_init__(self) -> None:
        if self.group not in (4, 8, 16, 32, 64):
            raise SpecError(f"group={self.group}: give 4, 8, 16, 32 or 64 entries")
        if self.group != 64 and self.codec not in GROUPED:
            raise SpecError(f"group={self.group} is for {' and '.join(GROUPED)}: leave it out with codec={self.codec}")
        if self.key_space == "pre" and self.codec.startswith("int8"):
            raise SpecError(f"key_space=pre is for 4 and 2 bits: leave it out with codec={self.codec}")
        if self.corrected and not CODECS[self.codec][1].rotated:
            raise SpecError(f"corrected={self.corrected} is for rot4, k4v2 and k2v2: leave it out with {self.codec}")

    @property
    def tier(self) -> Tier:
        """Where entries so coded live."""
        return CODECS[self.codec][0]

    @property
    def record(self) -> Codec:
        """What the kernels know it by."""
        return _record(self)


@cache  # every step of every layer asks
def _record(coding: Coding) -> Codec:
    codec = CODECS[coding.codec][1]
    if coding == Coding(coding.codec):
        return codec
    return replace(
        codec,
        name=f"{codec.name}-{coding.group}-{coding.key_space}{'-corrected' * coding.corrected}",
        window=coding.group,
        key_space=coding.key_space,
        ledger=coding.ledger,
        corrected=coding.corrected,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Bytes that the entries of a layer may take, and what they take; all of the layer's heads together."""

    total: Tensor  # [B, 1|H] float64
    entry: int  # an exact entry, columns included
    unit: int  # entries that are coded together, columns included
    origin: int  # tokens before the first window, however many of them are protected
    sinks: Tensor  # [B, 1|H] protected first tokens
    recent: Tensor  # [B, 1|H] protected newest ones


class Tiering(Protocol):
    """What becomes of entries. `coding` is None where all that stay are exact."""

    @property
    def coding(self) -> Coding | None:
        """How entries are coded."""
        ...

    @property
    def ranks(self) -> bool:
        """Whether it decides by scores itself what is dropped (`route`), instead of taking what was selected."""
        ...

    @property
    def reserve(self) -> int:
        """Tokens outside the ranking that are kept beside the protected ones."""
        ...

    def uncoded(self) -> Tiering:
        """The same without any codes, for layers whose keys would not survive them."""
        ...

    def due(self, exact: Sequence[Sequence[int]], position: Tensor) -> bool:
        """Whether entries would change tiers, were nothing dropped.

        exact [B][1|H] counts the exact ones; position [B, 1|H, n] is theirs, anything below 0 where none is.
        """
        ...

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """keep [B, 1|H, N] bool -> tier [B, 1|H, N] uint8."""
        ...

    def route(self, z: Tensor, signals: Signals, room: Room) -> Tensor:
        """Scores z [B, 1|H, N] -> tier [B, 1|H, N] uint8."""
        ...


@dataclass(frozen=True, slots=True)
class Native:
    """Everything that is kept stays exact."""

    ranks = False
    coding = None
    reserve = 0

    def uncoded(self) -> Native:
        """Itself."""
        return self

    def due(self, exact: Sequence[Sequence[int]], position: Tensor) -> bool:
        """Never."""
        return False

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """Where it is, or dropped."""
        return keep.to(torch.uint8) * (int(Tier.EXACT) if signals.tier is None else signals.tier)

    def route(self, z: Tensor, signals: Signals, room: Room) -> Tensor:
        """Not its way."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ByAge:
    """The newest `exact` tokens stay exact; older entries are coded, the oldest first, and stay so.

    `at_once` are coded together, or a whole group where that is more. by="position" counts tokens of the text, "rank"
    those that are still stored.
    """

    coding: Coding = Coding()
    exact: int = 128
    at_once: int = 1
    by: Literal["position", "rank"] = "position"
    ranks = False
    reserve = 0

    def __post_init__(self) -> None:
        if self.exact < 0:
            raise SpecError(f"exact={self.exact}: give 0 or more")
        if self.at_once < 1:
            raise SpecError(f"at_once={self.at_once}: give 1 or more")

    def uncoded(self) -> Native:
        """Everything exact."""
        return Native()

    @property
    def step(self) -> int:
        """Entries that are coded together."""
        unit = self.coding.record.unit
        return -(-self.at_once // unit) * unit

    def due(self, exact: Sequence[Sequence[int]], position: Tensor) -> bool:
        """Whether some row and head has enough older entries, whichever they are."""
        step = self.step
        if self.by == "rank":
            return any(count >= self.exact + step for row in exact for count in row)
        if all(count < step for row in exact for count in row):
            return False
        newest = position.amax(dim=(1, 2), keepdim=True)
        old = (position >= 0) & (position <= newest - self.exact)
        return bool((old.sum(dim=-1) >= step).any())

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """Older entries in whole steps."""
        now = torch.full_like(keep, int(Tier.EXACT), dtype=torch.uint8) if signals.tier is None else signals.tier
        old = keep & signals.valid & (now == Tier.EXACT) & self._old(keep, signals)
        count = old.sum(dim=-1, keepdim=True) // self.step * self.step
        rank = signals.position.masked_fill(~old, torch.iinfo(torch.int32).max).argsort(dim=-1).argsort(dim=-1)
        return torch.where(rank < count, int(self.coding.tier), now) * keep

    def _old(self, keep: Tensor, signals: Signals) -> Tensor:
        """Which entries [B, 1|H, N] are beyond the newest `exact`."""
        if self.by == "rank":
            position = signals.position.masked_fill(~(keep & signals.valid), -1)
            return position.argsort(dim=-1, descending=True).argsort(dim=-1) >= self.exact
        newest = signals.position.masked_fill(~signals.valid, -1).amax(dim=(1, 2), keepdim=True)
        return signals.position <= newest - self.exact

    def route(self, z: Tensor, signals: Signals, room: Room) -> Tensor:
        """Not its way."""
        raise NotImplementedError
