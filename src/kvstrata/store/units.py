"""A coded tier whose entries come and go in small units: single ones, or windows with grids of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvstrata.core import Tier
from kvstrata.kernels.codec.rotation import Rotary
from kvstrata.kernels.pages import PAGE
from kvstrata.store.account import Account
from kvstrata.store.arena import Arena
from kvstrata.store.coded import CodedTier, Restored, in_order
from kvstrata.store.codes import Codes, Moves
from kvstrata.store.columns import Columns
from kvstrata.store.exact import ExactTier

ACTIVE, DORMANT, GONE = 0, 1, 2


class UnitTier(CodedTier):
    """Units of `codec.unit` entries: active ones, which attention reads, then dormant ones.

    A unit is coded once. When it becomes exact again its codes stay, dormant, and serve when it comes back; they are
    freed when the entries are dropped. Units that move into the place of a freed one take their grid with them, so
    codes never change, but for those of a running grid that grows. A unit of which only a part is dropped is opened:
    what is left of it becomes exact.
    """

    _codes = Codes

    def __init__(self, tier: Tier, arena: Arena, columns: Columns, num_kv_heads: int, rotary: Rotary | None) -> None:
        codec, (rows, heads) = arena.format.codec, columns.shape
        assert codec is not None
        self._codec, self.unit = codec, codec.unit
        self.codes = self._codes(arena, rows * num_kv_heads, num_kv_heads // heads, rotary)
        self.active, self.dormant = [0] * rows * heads, [0] * rows * heads  # units by segment of the columns
        super().__init__(tier, arena, columns, num_kv_heads)

    @property
    def pages(self) -> list[list[int]]:
        """Of every kv segment."""
        return self.codes.pages

    @pages.setter
    def pages(self, pages: list[list[int]]) -> None:
        self.codes.pages = pages

    @property
    def others(self) -> int:
        """Numbers that were infinite or NaN when they were coded."""
        return self.codes.nonfinite

    @property
    def rescales(self) -> int:
        """How often a running grid grew."""
        return self.codes.rescales

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether there are neither active nor dormant units."""
        return not any(self.active) and not any(self.dormant)

    @property
    def width(self) -> int:
        """Slots of the longest segment that attention reads, whole pages."""
        return -(-max(self.active, default=0) * self.unit // PAGE) * PAGE

    @property
    def beside_bytes(self) -> int:
        """Columns and frames."""
        return self.columns.nbytes + self.codes.frame_bytes

    def fills(self) -> list[list[int]]:
        """Active entries of every page."""
        found: list[list[int]] = []
        for units in self.active:
            whole, rest = divmod(units * self.unit, PAGE)
            found += [[PAGE] * whole + [rest] * (rest > 0)] * self._served
        return found

    def used(self) -> dict[int, int]:
        """Slots of active and dormant units of every page."""
        found: dict[int, int] = {}
        for s, pages in enumerate(self.pages):
            slots = self._total(s // self._served) * self.unit
            for i, page in enumerate(pages):
                found[page] = max(found.get(page, 0), min(PAGE, slots - i * PAGE))
        return found

    def live_bytes(self) -> int:
        """Codes and grids of active and dormant units, shared pages once, with frames and dormant units' columns."""
        f, used = self.arena.format, self.used()
        codes = sum(used.values()) // self.unit * f.unit_bytes + self._codec.running * f.grid_bytes * len(used)
        columns = sum(column.element_size() for column in self.columns.data.values())
        return codes + self.beside_bytes - self.columns.nbytes + sum(self.dormant) * self.unit * columns

    def _total(self, segment: int) -> int:
        return self.active[segment] + self.dormant[segment]

    def dormant_at(self, position: Tensor) -> Tensor:
        """[B, 1|H, n] bool: which of these exact entries have codes here."""
        found = torch.zeros(position.shape, dtype=torch.bool, device=position.device)
        for c, slots in self._dormant_positions():
            row, head = divmod(c, position.shape[1])
            found[row, head] = torch.isin(position[row, head], slots)
        return found

    def _dormant_positions(self) -> list[tuple[int, Tensor]]:
        """By column segment that has any, the positions [d, unit] of its dormant units."""
        position = self.columns.data["position"].flatten(0, 1)
        return [
            (c, position[c, self.active[c] * self.unit : self._total(c) * self.unit].unflatten(0, (-1, self.unit)))
            for c, count in enumerate(self.dormant)
            if count
        ]

    # -- change -------------------------------------------------------------------------------------------------

    def _plain(self, segment: int, at: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What was coded, as attention reads it."""
        position = self.columns.data["position"].flatten(0, 1)[segment // self._served, at]
        return self.codes.plain(segment, position, k, v)

    def change(
        self, fate: Tensor, exact: ExactTier, chosen: Tensor, stays: Tensor, account: Account
    ) -> Restored | None:
        """See `CodedTier.change`; entries are coded in whole units, consecutive in order of position."""
        now = self._zone_now()
        zone, leaves = self._zones(now, fate)
        if any(self.dormant):
            chosen = self._wake(zone, exact, chosen, stays)
        if torch.equal(zone, now) and not bool(chosen.any()):
            return None
        order, counts = in_order(exact, chosen)
        if any(count % self.unit for count in counts):
            raise ValueError(f"entries are coded {self.unit} at a time in every row and head, not {max(counts)}")
        restored = self._restored(leaves) if bool(leaves.any()) else None
        most = max(counts, default=0) // self.unit
        units = torch.tensor(counts, device=zone.device)[:, None] // self.unit
        news = torch.where(torch.arange(most, device=zone.device) < units, ACTIVE, GONE)
        self._arrange(torch.cat([zone, news], dim=1), order.flatten(0, 1), exact, account)
        return restored

    def _zone_now(self) -> Tensor:
        """[C, units]: what every unit is."""
        device = self.columns.device
        unit = torch.arange(max(map(self._total, range(len(self.active))), default=0), device=device)
        active, dormant = (torch.tensor(n, device=device)[:, None] for n in (self.active, self.dormant))
        return torch.where(unit < active, ACTIVE, torch.where(unit < active + dormant, DORMANT, GONE))

    def _zones(self, now: Tensor, fate: Tensor) -> tuple[Tensor, Tensor]:
        """What every unit [C, units] will be by the fates of its slots, and which slots [C, width] become exact."""
        zone, slots = now.clone(), fate.flatten(0, 1)
        leaves = torch.zeros_like(slots, dtype=torch.bool)
        most = max(self.active, default=0)
        if not most:
            return zone, leaves
        by_unit = slots[:, : most * self.unit].unflatten(1, (most, self.unit))
        active = zone[:, :most] == ACTIVE
        whole = (by_unit == by_unit[..., :1]).all(dim=-1)
        first = by_unit[..., 0]
        if bool((active[..., None] & (by_unit != Tier.DROP) & (by_unit != Tier.EXACT) & (by_unit != self.tier)).any()):
            raise ValueError(f"entries of the {self.tier.name} tier stay there, become exact or are dropped")
        new = torch.where(first == self.tier, ACTIVE, torch.where(first == Tier.EXACT, DORMANT, GONE))
        zone[:, :most] = torch.where(active, torch.where(whole, new, GONE), zone[:, :most])
        out = active[..., None] & torch.where(whole[..., None], by_unit == Tier.EXACT, by_unit != Tier.DROP)
        leaves[:, : most * self.unit] = out.flatten(1)
        return zone, leaves

    def _wake(self, zone: Tensor, exact: ExactTier, chosen: Tensor, stays: Tensor) -> Tensor:
        """Settle dormant units in `zone`, and return which of the chosen have to be coded: those without codes."""
        position = exact.columns.data["position"][:, :, : exact.width].flatten(0, 1)
        left, kept = chosen.flatten(0, 1).clone(), stays.flatten(0, 1)
        for c, slots in self._dormant_positions():
            back = torch.isin(slots, position[c, left[c]]).all(dim=-1)
            alive = torch.isin(slots, position[c, kept[c]]).all(dim=-1)
            of = zone[c, self.active[c] : self._total(c)]
            of.copy_(torch.where(back, ACTIVE, torch.where(alive, DORMANT, GONE)))
            left[c] &= ~torch.isin(position[c], slots[back])
        return left.view_as(chosen)

    def _restored(self, leaves: Tensor) -> Restored:
        """Copies of the slots [C, width] that become exact."""
        counts = leaves.sum(dim=1)
        parts = [
            self.at(c * self._served + head, leaves[c].nonzero().flatten())
            for c in range(len(leaves))
            for head in range(self._served)
        ]
        k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        width = leaves.shape[1]
        columns = {name: data.flatten(0, 1)[:, :width][leaves] for name, data in self.columns.data.items()}
        return Restored(counts.view(*self.columns.shape).tolist(), k, v, columns)

    def _arrange(self, zone: Tensor, order: Tensor, exact: ExactTier, account: Account) -> None:
        """Let units be what zone [C, old units + new ones] says, moving as few as that needs.

        New units are of the exact slots `order` [C, n], in turn.
        """
        unit, device = self.unit, zone.device
        old = max(map(self._total, range(len(self.active))))
        active, dormant = (zone == ACTIVE).sum(dim=1), (zone == DORMANT).sum(dim=1)
        place = torch.arange(zone.shape[1], device=device)
        wanted = torch.where(place < active[:, None], ACTIVE, DORMANT)
        wanted[place >= (active + dormant)[:, None]] = GONE
        stays = (zone == wanted) & (zone != GONE) & (place < old)
        movers = torch.cat([(zone == kind) & ~stays for kind in (ACTIVE, DORMANT)], dim=1).nonzero()
        free = ((wanted != GONE) & ~stays).nonzero()
        segment, source, target = free[:, 0], movers[:, 1] % max(1, zone.shape[1]), free[:, 1]
        new, inside = source >= old, torch.arange(unit, device=device)
        at = order[segment[new][:, None], (source[new, None] - old) * unit + inside]
        moves = Moves(segment[~new], source[~new] * unit, target[~new] * unit, segment[new], at, target[new] * unit)
        columns = {
            name: (data.flatten(0, 1)[moves.segment[:, None], moves.source[:, None] + inside],
                   exact.columns.data[name].flatten(0, 1)[moves.new_segment[:, None], at])
            for name, data in self.columns.data.items()
        }  # fmt: skip
        self.active, self.dormant = active.tolist(), dormant.tolist()
        slots = [(a + d) * unit for a, d in zip(self.active, self.dormant, strict=True)]
        self.codes.change(moves, [-(-n // PAGE) for n in slots], exact, account)
        self._fit_columns()
        for name, (moved, coded) in columns.items():
            flat = self.columns.data[name].flatten(0, 1)
            flat[moves.segment[:, None], moves.target[:, None] + inside] = moved
            flat[moves.new_segment[:, None], moves.new_target[:, None] + inside] = coded
        self._changed()

    # -- rows ---------------------------------------------------------------------------------------------------

    def select(self, segments: Sequence[int], rows: Tensor) -> None:
        """See `CodedTier.select`."""
        super().select(segments, rows)
        of_columns = [s // self._served for s in segments[:: self._served]]
        self.active = [self.active[c] for c in of_columns]
        self.dormant = [self.dormant[c] for c in of_columns]
        self.codes.frames = self.codes.frames[list(segments)]
        self._fit_columns()

    def free(self) -> None:
        """Give every page back."""
        super().free()
        self.active, self.dormant = [], []


def dormant_entries(exact: ExactTier, tiers: Iterable[CodedTier]) -> Tensor | None:
    """[B, 1|H, n] bool: which exact entries have codes that sleep in one of the tiers, or None where none has."""
    having = [tier for tier in tiers if isinstance(tier, UnitTier) and any(tier.dormant)]
    position = exact.columns.data["position"][:, :, : exact.width]
    return torch.stack([tier.dormant_at(position) for tier in having]).any(dim=0) if having else None
