"""Coded tiers of one layer: what they share, and the one whose pages have one grid each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstrata.core import Tier
from kvstrata.kernels import dispatch, entries
from kvstrata.kernels.codec import packing
from kvstrata.kernels.pages import PAGE, Pages
from kvstrata.store.account import Account
from kvstrata.store.arena import Arena
from kvstrata.store.columns import Columns
from kvstrata.store.exact import ExactTier
from kvstrata.store.table import PageTable

SHUFFLED = 64  # pages that are read and written together


class Restored(NamedTuple):
    """Entries that leave a coded tier as exact copies of their codes.

    counts [B][1|H]; k [n, D] and v of all segments in order (row, kv head); columns {name: [n']} of (row, 1|head).
    """

    counts: list[list[int]]
    k: Tensor
    v: Tensor
    columns: dict[str, Tensor]


class CodedTier:
    """Pages under one codec for S segments in order (row, kv head); slot t of a segment lies in page t // 64.

    Subclasses say which entries share a grid, and so how they come and go.
    """

    def __init__(self, tier: Tier, arena: Arena, columns: Columns, num_kv_heads: int) -> None:
        rows, heads = columns.shape
        self.tier, self.arena, self.columns = tier, arena, columns
        self._served = num_kv_heads // heads  # kv heads that one segment of the columns serves
        self.pages = [list[int]() for _ in range(rows * num_kv_heads)]
        self._changed()

    def _changed(self) -> None:
        """Forget what was made for kernels and masks."""
        self._view: Pages | None = None
        self._valid: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None}

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored."""
        return not any(self.pages)

    @property
    def width(self) -> int:
        """Slots of the longest segment, whole pages."""
        raise NotImplementedError

    def fills(self) -> list[list[int]]:
        """Entries of every page that attention reads, by kv segment."""
        raise NotImplementedError

    def used(self) -> dict[int, int]:
        """Slots in use of every page, its first ones; pages that rows share stand once."""
        raise NotImplementedError

    def live_bytes(self) -> int:
        """Codes of the entries and their grids; shared pages once."""
        raise NotImplementedError

    @property
    def others(self) -> int:
        """Numbers that were infinite or NaN when they were coded."""
        raise NotImplementedError

    @property
    def corrected(self) -> bool:
        """Whether attention takes off what rounding adds to scores."""
        codec = self.arena.format.codec
        return codec is not None and codec.corrected

    def lengths(self) -> list[int]:
        """Entries of every kv segment."""
        return [sum(fills) for fills in self.fills()]

    @property
    def beside_bytes(self) -> int:
        """Bytes beside the pages: columns, and what a segment's pages share."""
        return self.columns.nbytes

    def held_bytes(self) -> int:
        """Pages, shared ones once, and what is beside them."""
        return len({page for pages in self.pages for page in pages}) * self.arena.page_bytes + self.beside_bytes

    # -- reading ------------------------------------------------------------------------------------------------

    def valid(self) -> Tensor:
        """[B, 1|H, width] bool: which slots hold an entry. Not to be written to."""
        if self._valid is None:
            fills = self._fill_tensor()[:: self._served].view(*self.columns.shape, -1, 1)
            self._valid = (torch.arange(PAGE, device=fills.device) < fills).flatten(2)
        return self._valid

    def view(self) -> Pages:
        """What kernels see; valid until something changes."""
        if self._view is None:
            width, fills = self.width // PAGE, self.fills()
            used = [pages[: len(fill)] for pages, fill in zip(self.pages, fills, strict=True)]
            rows = [pages + [0] * (width - len(pages)) for pages in used]
            device = self.arena.device
            table = torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), width)
            lengths = torch.tensor([len(p) * PAGE for p in used], dtype=torch.int32, device=device)
            view = Pages(self.arena.format, self.arena.blocks, table, lengths, fills=self._fill_tensor())
            self._view = dispatch.with_twin(self.arena.kernels, self.arena.native, view)
        return self._view

    def _fill_tensor(self) -> Tensor:
        width, every = self.width // PAGE, self.fills()
        rows = [fills + [0] * (width - len(fills)) for fills in every]
        return torch.tensor(rows, dtype=torch.int32, device=self.columns.device).view(len(rows), width)

    def decoded(self, segment: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [n, D] and values of one segment's entries as their codes give them, and their slots [n]."""
        slots = [i * PAGE + j for i, n in enumerate(self.fills()[segment]) for j in range(n)]
        at = torch.tensor(slots, dtype=torch.long, device=self.arena.device)
        return *self.at(segment, at), at

    def at(self, segment: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, D] and values of the slots `at` of a kv segment, in the cache's dtype."""
        f, pages = self.arena.format, self.pages[segment]
        last = int(at[-1]) // PAGE + 1 if len(at) else 0
        k, v = packing.unpack(f, *self.arena.read(pages[:last]), native=self.arena.native)
        k, v = self._plain(segment, at, k.flatten(0, 1)[at], v.flatten(0, 1)[at])
        return k.to(f.dtype), v.to(f.dtype)

    def _plain(self, segment: int, at: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What was coded, as attention reads it: k and v [n, D] fp32 of the slots `at`."""
        return k, v

    def noise(self, segment: int, at: Tensor) -> Tensor:
        """Variance [n] of rounding in a channel of the keys at `at`, where attention takes off what it adds; else 0."""
        if not self.corrected:
            return torch.zeros(len(at), device=at.device)
        return packing.key_noise(self.arena.format, self.arena.read(self.pages[segment])[2]).flatten()[at]

    # -- change -------------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Count another user for every page: a copy of this tier."""
        self.arena.share(page for pages in self.pages for page in pages)

    def unshare(self) -> None:
        """Give every kv segment pages of its own."""
        self.pages = [self.arena.own(pages) for pages in self.pages]
        self._changed()

    def change(
        self, fate: Tensor, exact: ExactTier, chosen: Tensor, stays: Tensor, account: Account
    ) -> Restored | None:
        """Give every slot its fate [B, 1|H, width], a `Tier`, and code the chosen exact entries [B, 1|H, n].

        `stays` [B, 1|H, n] are the exact entries that will be so after the plan. Those chosen are still to be dropped
        there, and what is returned is to be stored there. Raises `ValueError` where a tier cannot do it.
        """
        raise NotImplementedError

    def select(self, segments: Sequence[int], rows: Tensor) -> None:
        """Make segment i what segment segments[i] is now, sharing its pages; `rows` are the rows of that."""
        before = self.pages
        self.pages = [list(before[s]) for s in segments]
        self.arena.share(page for pages in self.pages for page in pages)
        self.arena.give(page for pages in before for page in pages)
        self.columns.select_rows(rows)
        self._changed()

    def free(self) -> None:
        """Give every page back."""
        self.arena.give(page for pages in self.pages for page in pages)
        self.pages = []
        self._changed()

    def _fit_columns(self) -> None:
        room = max(map(len, self.pages), default=0) * PAGE
        if self.columns.room != room:
            self.columns.resize(room)


def in_order(exact: ExactTier, chosen: Tensor) -> tuple[Tensor, list[int]]:
    """Slots of the chosen exact entries [B, 1|H, n] by position, those first, and how many each (row, 1|head) has."""
    position = exact.columns.data["position"][:, :, : exact.width]
    order = position.masked_fill(~chosen, torch.iinfo(torch.int32).max).argsort(dim=-1)
    return order, chosen.sum(dim=-1).flatten().tolist()


class PageTier(CodedTier):
    """Whole pages with one grid each, coded once.

    When some entries of a page are dropped the others move together inside it, since its grid is its own, and a page
    without any is given back.
    """

    def __init__(self, tier: Tier, arena: Arena, columns: Columns, num_kv_heads: int) -> None:
        super().__init__(tier, arena, columns, num_kv_heads)
        self._fills: list[list[int]] = [[] for _ in self.pages]
        self._others = 0

    @property
    def width(self) -> int:
        """Slots of the longest segment, those of dropped entries included."""
        return self.columns.room

    def fills(self) -> list[list[int]]:
        """Entries of every page."""
        return self._fills

    @property
    def others(self) -> int:
        """Numbers that were infinite or NaN when they were coded."""
        return self._others

    def used(self) -> dict[int, int]:
        """Entries of every page."""
        found: dict[int, int] = {}
        for pages, fills in zip(self.pages, self._fills, strict=True):
            found.update(zip(pages, fills, strict=True))
        return found

    def live_bytes(self) -> int:
        """Codes of the entries, and grids; shared pages once."""
        f, used = self.arena.format, self.used()
        return f.grid_bytes * len(used) + sum(used.values()) * f.entry_bytes

    def change(
        self, fate: Tensor, exact: ExactTier, chosen: Tensor, stays: Tensor, account: Account
    ) -> Restored | None:
        """See `CodedTier.change`; entries are coded 64 at a time, and never become exact again."""
        keep = fate != Tier.DROP
        if bool((self.valid() & keep & (fate != self.tier)).any()):
            raise ValueError(f"entries of the {self.tier.name} tier stay there or are dropped")
        if not bool((keep | ~self.valid()).all()):
            self._drop(keep)
        if bool(chosen.any()):
            self._take(exact, chosen, account)
        return None

    def _take(self, exact: ExactTier, chosen: Tensor, account: Account) -> None:
        """Code the chosen exact entries [B, 1|H, n], by position 64 to a page; they are still to be dropped there.

        Raises `ValueError` unless every segment gives whole pages.
        """
        order, counts = in_order(exact, chosen)
        if any(count % PAGE for count in counts):
            raise ValueError(f"entries are coded {PAGE} at a time in every row and head, not {max(counts)}")
        end = torch.tensor(counts, device=order.device).view(*chosen.shape[:2], 1)
        places = (torch.arange(exact.width, device=order.device) < end).nonzero()
        at = order[places.unbind(1)]
        segment, at_each, _ = exact.by_segment(places, at)
        by_segment = segment.argsort(stable=True)
        packed = self._pack(exact.table, segment[by_segment], at_each[by_segment], account)
        base = torch.tensor([len(pages) * PAGE for pages in self.pages[:: self._served]], device=order.device)
        self._add(packed, [count // PAGE for count in counts for _ in range(self._served)])
        row, head, slot = places.unbind(1)
        new = slot + base.view(*chosen.shape[:2])[row, head]
        self.columns.move((row, head, at), (row, head, new), exact.columns)

    def _pack(self, source: PageTable, segment: Tensor, at: Tensor, account: Account) -> packing.Packed:
        """Pages of codes of the entries at slots `at` of these segments, 64 by 64."""
        k, v = entries.gather(source.view(), segment, at)
        account.note_copies(k.nbytes + v.nbytes)
        whole = (-1, PAGE)
        return packing.pack(self.arena.format, k.unflatten(0, whole), v.unflatten(0, whole), self.arena.native)

    def _add(self, packed: packing.Packed, counts: Sequence[int]) -> None:
        """Store coded pages, counts[s] of them for segment s in order, with room for their columns."""
        taken = self.arena.take(sum(counts), together=False)
        self._write(taken, packed)
        source = iter(taken)
        for pages, fills, count in zip(self.pages, self._fills, counts, strict=True):
            pages += [next(source) for _ in range(count)]
            fills += [PAGE] * count
        self._others += packed.nonfinite
        self._changed()
        self._fit_columns()

    def _write(self, pages: Sequence[int], packed: packing.Packed) -> None:
        self.arena.write(pages, packed.k, packed.v, packed.grid)

    def _drop(self, keep: Tensor) -> None:
        """Drop every entry whose keep [B, 1|H, width] is False."""
        keep = keep & self.valid()
        by_page = keep.unflatten(2, (-1, PAGE))  # [B, 1|H, P, 64]
        inside = (~by_page).to(torch.uint8).argsort(dim=-1, stable=True)  # survivors first
        left = by_page.sum(dim=-1)
        outside = (left == 0).to(torch.uint8).argsort(dim=-1, stable=True)  # pages with survivors first
        fills: list[list[int]] = left.flatten(0, 1).repeat_interleave(self._served, dim=0).tolist()
        touched = [
            (s, place)
            for s, (before, after) in enumerate(zip(self._fills, fills, strict=True))
            for place, fill in enumerate(before)
            if 0 < after[place] < fill
        ]
        if touched:
            served = [s // self._served for s, _ in touched]
            self._shuffle(touched, inside.flatten(0, 1)[served, [place for _, place in touched]])
        for s, (pages, after) in enumerate(zip(self.pages, fills, strict=True)):
            stays = [place for place in range(len(pages)) if after[place]]
            self.arena.give(page for place, page in enumerate(pages) if not after[place])
            self.pages[s], self._fills[s] = [pages[i] for i in stays], [after[i] for i in stays]
        self._changed()
        slots = outside[..., None] * PAGE + inside.gather(2, outside[..., None].expand(-1, -1, -1, PAGE))
        room = max(map(len, self.pages), default=0) * PAGE
        self.columns.gather(slots.flatten(2)[:, :, :room], room)

    def _shuffle(self, places: Sequence[tuple[int, int]], order: Tensor) -> None:
        """Let slot j of page i of `places`, (segment, place), be what its slot order[i, j] was."""
        for first in range(0, len(places), SHUFFLED):  # so that copies stay small
            part = places[first : first + SHUFFLED]
            pages = self.arena.own([self.pages[s][place] for s, place in part])
            slots = order[first : first + SHUFFLED]
            self.arena.write(pages, *packing.reorder(self.arena.format, *self.arena.read(pages), slots))
            for (s, place), page in zip(part, pages, strict=True):
                self.pages[s][place] = page

    def refill(self, fills: Sequence[Sequence[int]]) -> None:
        """Set the entries of pages that were put here."""
        self._fills = [list(row) for row in fills]
        self._changed()

    def select(self, segments: Sequence[int], rows: Tensor) -> None:
        """See `CodedTier.select`."""
        super().select(segments, rows)
        self._fills = [list(self._fills[s]) for s in segments]
        self._fit_columns()

    def free(self) -> None:
        """Give every page back."""
        super().free()
        self._fills = []
