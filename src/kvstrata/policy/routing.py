"""Windows of tokens routed by rank between exact, coded and dropped, under a budget in bytes (QEvict)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from kvstrata.core import Signals, SpecError, Tier
from kvstrata.policy.tiering import Coding, Room


class _Windows(NamedTuple):
    """The windows of every row and head [B, 1|H, W]: what each is and holds."""

    of: Tensor  # [B, 1|H, N] number of the window of every entry; that of entries outside is W - 1 and means nothing
    inside: Tensor  # [B, 1|H, N] bool: entries of windows that may be routed
    score: Tensor
    stored: Tensor  # entries
    coded: Tensor  # bool: has codes, whether attention reads them or not
    exact: Tensor  # bool: is exact now


@dataclass(frozen=True, slots=True)
class Recoverable:
    """Windows of `window` tokens: the best exact, the next coded, the others dropped, `split` of the bytes for coded.

    A window is coded once, and may come back: exact again it keeps its codes, which are charged too. Sinks, the
    newest tokens and windows that are not complete stay exact outside the ranking. `split` 0 drops what does not stay
    exact.

    margin: a coded window takes the place of an exact one only if its score is so much higher (0.1: a tenth).
    admit: a window that leaves the newest tokens is coded before it has to compete.
    every: tokens between two routings, for which room is kept.
    """

    coding: Coding = Coding("int2", 8, ledger=True)
    split: Fraction = Fraction(1, 2)
    window: int = 8
    every: int = 8
    margin: float = 0.0
    admit: bool = False
    ranks = True

    def __post_init__(self) -> None:
        if not self.coding.ledger:
            raise SpecError("what is routed needs a ledger: give coding with ledger=True")
        if not 0 <= self.split <= 1:
            raise SpecError(f"split={float(self.split)}: give a share between 0 and 1")
        if self.window < 1 or self.window % self.coding.record.unit:
            raise SpecError(
                f"window={self.window}: {self.coding.codec} codes {self.coding.record.unit} tokens together, so give "
                "a multiple of that"
            )
        if self.margin < 0:
            raise SpecError(f"margin={self.margin}: give 0 or more")

    def uncoded(self) -> Recoverable:
        """Exact or dropped."""
        return replace(self, split=Fraction(0))

    @property
    def reserve(self) -> int:
        """Tokens that may come before the next routing, and those of a window that is not complete."""
        return self.every + self.window - 1

    def due(self, exact: Sequence[Sequence[int]], position: Tensor) -> bool:
        """Never by itself: the trigger says when."""
        return False

    def assign(self, keep: Tensor, signals: Signals) -> Tensor:
        """Not its way."""
        raise NotImplementedError

    def route(self, z: Tensor, signals: Signals, room: Room) -> Tensor:
        """Rank windows by summed score, newer ones first among equals, and fill the bytes that there are."""
        found = self._windows(z, signals, room)
        width = found.score.shape[-1]
        alive = found.stored > 0
        lead = torch.where(found.exact, 1 + self.margin, 1.0)
        score = torch.where(alive, (found.score * lead).nan_to_num(nan=-torch.inf), -torch.inf)
        newest = score.flip(-1).argsort(dim=-1, descending=True, stable=True)  # of equals the later first
        order = width - 1 - newest
        fp, coded = self.window * room.entry, self.window // self.coding.record.unit * room.unit
        unrouted = (room.origin - room.sinks).clamp_min(0)  # first tokens that are neither protected nor in a window
        fixed = signals.protected.sum(dim=-1) + unrouted + self.reserve
        left = (room.total - fixed * room.entry).clamp_min(0)[..., None]  # bytes for windows [B, 1|H, 1]
        each = torch.where(found.coded, fp + coded, fp) * alive
        cost = each.gather(-1, order).cumsum(dim=-1)
        rank = torch.arange(width, device=z.device)
        split = float(self.split)
        fits = cost[..., -1:] <= left  # everything, so that nothing need be coded
        stays = ((rank < (left * (1 - split) / fp).floor()) & (cost <= left) | fits) & alive.gather(-1, order)
        spent = torch.where(stays, cost, 0.0).amax(dim=-1, keepdim=True)
        places = torch.minimum((left * split / coded).floor(), ((left - spent) / coded).floor()).clamp_min(0)
        after = rank - stays.sum(dim=-1, keepdim=True)
        near = (after >= 0) & (after < places) & alive.gather(-1, order)
        names = torch.where(stays, int(Tier.EXACT), torch.where(near, int(self.coding.tier), int(Tier.DROP)))
        tier = torch.zeros_like(names).scatter_(-1, order, names)
        whole = found.stored == self.window
        tier = torch.where((tier == self.coding.tier) & ~whole, int(Tier.DROP), tier)
        if self.admit:
            tier = self._admitted(tier, found, places)
        by_entry = tier.gather(-1, found.of)
        return torch.where(found.inside, by_entry, int(Tier.EXACT)).to(torch.uint8) * signals.valid

    def _windows(self, z: Tensor, signals: Signals, room: Room) -> _Windows:
        position, valid = signals.position.long(), signals.valid
        seen = position.masked_fill(~valid, -1).amax(dim=(1, 2), keepdim=True) + 1
        recent = room.recent[..., None]
        middle = valid & ~signals.protected & (position >= room.origin)
        of = ((position - room.origin) // self.window).clamp_min(0)
        width = int(of.masked_fill(~middle, -1).amax()) + 2 if of.numel() else 1
        of = of.masked_fill(~middle, width - 1)

        def summed(x: Tensor) -> Tensor:
            return torch.zeros(*of.shape[:2], width, dtype=x.dtype, device=x.device).scatter_add_(-1, of, x)

        end = room.origin + (torch.arange(width, device=of.device) + 1) * self.window
        routable = (end <= seen - recent).expand(*of.shape[:2], width).clone()
        routable[..., -1] = False
        inside = middle & routable.gather(-1, of)
        coded = torch.zeros_like(inside) if signals.tier is None else inside & (signals.tier != Tier.EXACT)
        asleep = torch.zeros_like(inside) if signals.dormant is None else inside & signals.dormant
        count, is_coded = summed(inside.long()), summed(coded.long()) > 0
        score = summed(torch.where(inside, z.expand(of.shape), 0.0).float())
        has_codes = is_coded | (summed(asleep.long()) > 0)
        return _Windows(of, inside, score, count, has_codes, (count > 0) & ~is_coded)

    def _admitted(self, tier: Tensor, found: _Windows, places: Tensor) -> Tensor:
        """Windows that just left the newest tokens take coded places from the others, as many as there are."""
        width = tier.shape[-1]
        rank = torch.arange(width, device=tier.device)
        routable = found.stored > 0
        last = torch.where(routable, rank, -1).amax(dim=-1, keepdim=True)
        new = routable & (rank > last - max(1, self.every // self.window)) & (tier == Tier.DROP)
        new &= (found.stored == self.window) & found.exact & ~found.coded
        wanted = torch.minimum(new.sum(dim=-1, keepdim=True), places.long())
        new &= new.long().flip(-1).cumsum(dim=-1).flip(-1) <= wanted
        mine = (tier == self.coding.tier).long()
        free = places.long() - mine.sum(dim=-1, keepdim=True)
        lost = (new.sum(dim=-1, keepdim=True) - free).clamp_min(0)
        score = torch.where(mine.bool(), found.score, torch.inf)
        worst = score.argsort(dim=-1).argsort(dim=-1) < lost
        tier = torch.where(worst & mine.bool(), int(Tier.DROP), tier)
        return torch.where(new, int(self.coding.tier), tier)
