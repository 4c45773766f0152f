"""The exact tier of one layer: entries in the cache's dtype, appended in place and moved when others are dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvstrata.kernels import entries
from kvstrata.kernels.pages import PAGE
from kvstrata.store.account import Account
from kvstrata.store.arena import Arena
from kvstrata.store.columns import Columns
from kvstrata.store.table import PageTable, pages_for

MOVE_BELOW = 0.75  # of the entries stored: a plan that keeps fewer copies them, so that whole blocks come free
Given = Mapping[str, Tensor]
NONE_GIVEN: Given = {}
Unwritten = tuple[Tensor, Tensor, Sequence[int]]  # k, v and tokens as `stage` got them


class ExactTier:
    """Pages of S segments in order (row, kv head), and the columns of what is in them.

    Where heads share their tokens one segment of the columns [B, 1, room] serves all H of a row, else each its own.
    """

    def __init__(self, arena: Arena, columns: Columns, heads: int, together: bool, account: Account) -> None:
        rows, segments = columns.shape
        self.columns, self.heads, self._served = columns, heads, heads // segments
        self.table = PageTable(arena, [0] * rows * heads, together)
        self.unwritten: Unwritten | None = None
        self._account = account
        self._ordered = True  # whether slots of every segment ascend in position

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Entries of the longest segment."""
        return self.table.longest

    def live_bytes(self) -> int:
        """Keys and values of the entries; shared pages once."""
        return self.table.entries() * self.table.arena.page_bytes // PAGE

    def held_bytes(self) -> int:
        """Pages, shared ones once, and columns."""
        return self.table.held_pages() * self.table.arena.page_bytes + self.columns.nbytes

    @property
    def beside_bytes(self) -> int:
        """Bytes beside the pages: columns."""
        return self.columns.nbytes

    def lengths(self) -> list[list[int]]:
        """Entries [B][1|H]."""
        step, flat = self._served, self.table.lengths
        return [flat[at : at + self.heads : step] for at in range(0, len(flat), self.heads)]

    def valid(self) -> Tensor:
        """[B, 1|H, width] bool: which slots hold an entry."""
        shape = (*self.columns.shape, self.width)
        if self.table.uniform:
            return torch.ones(1, 1, 1, dtype=torch.bool, device=self.columns.device).expand(shape)
        lengths = torch.tensor(self.lengths(), device=self.columns.device)
        return torch.arange(self.width, device=lengths.device) < lengths[..., None]

    # -- appending ----------------------------------------------------------------------------------------------

    def stage(
        self, k: Tensor, v: Tensor, tokens: Sequence[int], first: Sequence[int], step: int, more: Given = NONE_GIVEN
    ) -> None:
        """Make room for the last tokens[b] entries of each row, count them and begin their columns.

        Their keys and values are `unwritten` until `write`, or until attention writes them on its way.
        """
        self._make_room([n for n in tokens for _ in range(self.heads)])
        self.columns.begin(self.lengths(), tokens, first, step)
        for name, values in more.items():
            self.columns.put_newest(name, self.lengths(), tokens, values)
        self.unwritten = (k, v, tokens)

    def _make_room(self, new: Sequence[int]) -> None:
        """Count new[s] more entries for every segment, with pages for them."""
        table = self.table
        grown = [n + more for n, more in zip(table.lengths, new, strict=True)]
        if not table.has_room(new):
            if table.together:
                roomy = PageTable(table.arena, grown, together=True)
                roomy.resize(table.lengths, keep_pages=True)
                self._move_to(roomy)
            else:
                table.grow(new)
        self.table.view()  # whose lengths are those before
        self.table.resize(grown, written=True, keep_pages=True)
        self._fit_columns()

    def restore(self, counts: Sequence[Sequence[int]], k: Tensor, v: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Store entries that were coded: counts [B][1|H], k [n, D] and v of all segments, and their columns."""
        new = [n for row in counts for n in row for _ in range(self._served)]
        self._make_room(new)
        table = self.table  # which may be another now
        padded_k, padded_v = (x.new_zeros(len(new), 1, max(new), x.shape[-1]) for x in (k, v))
        last = torch.arange(max(new), device=k.device) >= max(new) - torch.tensor(new, device=k.device)[:, None]
        padded_k[:, 0][last], padded_v[:, 0][last] = k, v
        entries.append(table.view(), padded_k, padded_v, new)
        end = torch.tensor(self.lengths(), device=self.columns.device)[..., None]
        slot = torch.arange(self.columns.room, device=end.device)
        places = (slot < end) & (slot >= end - torch.tensor(counts, device=end.device)[..., None])
        for name, values in columns.items():
            self.columns.data[name][places] = values
        table.resize(table.lengths, keep_pages=True)
        self._ordered = False

    def write(self, k: Tensor, v: Tensor, tokens: Sequence[int]) -> None:
        """Write the keys and values that `stage` was given."""
        table, n, new = self.table, self.width, tokens[0]
        views = table.regular() if table.uniform and len(set(tokens)) == 1 else None
        if views is None:
            entries.append(table.view(), k, v, tokens)
            return
        for view, fresh in zip(views, (k, v), strict=True):
            view.unflatten(0, k.shape[:2])[:, :, n - new : n] = fresh[:, :, fresh.shape[2] - new :]
        table.resize(table.lengths, keep_pages=True)

    def _fit_columns(self) -> None:
        """Give columns the room that pages have."""
        room = pages_for(self.width) * PAGE
        if self.columns.room != room:
            old = self.columns.largest
            self.columns.resize(room)
            self._account.note_copies(old)

    # -- dropping and moving ------------------------------------------------------------------------------------

    def drop(self, keep: Tensor) -> None:
        """Drop every entry whose keep [B, 1|H, width] is False and close the holes; nothing is copied if none is."""
        if not self.table.uniform:
            keep = keep & self.valid()
        counts: list[list[int]] = keep.sum(dim=-1).tolist()
        if counts == self.lengths():
            return
        kept = [n for row in counts for n in row for _ in range(self._served)]
        table = self.table
        if sum(kept) < MOVE_BELOW * sum(table.lengths):
            order = keep.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : max(kept)]
            self._move_to(PageTable(table.arena, kept, table.together), order)
        else:
            self._fill_holes(keep, counts)
            table.resize(kept)
            self._fit_columns()

    def _fill_holes(self, keep: Tensor, counts: list[list[int]]) -> None:
        """Let the last kept entries of every segment take the places of those dropped before them: few are copied."""
        slot = torch.arange(keep.shape[-1], device=keep.device)
        end = torch.tensor(counts, device=keep.device)[..., None]
        holes, last = (~keep & (slot < end)).nonzero(), (keep & (slot >= end)).nonzero()  # as many in every segment
        if not len(holes):
            return
        self.columns.move(last.unbind(1), holes.unbind(1))
        segment, at, to = self.by_segment(holes, last[:, 2])
        if self.table.arena.has_shared:
            for s, place in zip(segment.tolist(), (to // PAGE).tolist(), strict=True):
                self.table.own(s, [place])
        self._move(self.table, self.table, segment, at, to)
        self._ordered = False

    def by_segment(self, places: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(segment, other, slot) for every kv head of `places` [n, (row, 1|head, slot)], of which other[n] is told."""
        row, head, slot = places.unbind(1)
        if self._served == 1:
            return row * self.heads + head, other, slot
        heads = torch.arange(self.heads, device=places.device)
        segment = (row[:, None] * self.heads + heads).flatten()
        return segment, other.repeat_interleave(self.heads), slot.repeat_interleave(self.heads)

    def _move_to(self, target: PageTable, order: Tensor | None = None) -> None:
        """Copy entries into pages of their own: slot order[b, 1|h, j] to j, or all as they stand."""
        table, width = self.table, target.longest
        end = torch.tensor(target.lengths[:: self._served], device=self.columns.device)
        slot = torch.arange(width, device=end.device)
        places = (slot < end.view(*self.columns.shape, 1)).nonzero()
        at = places[:, 2] if order is None else order[places.unbind(1)]
        self._move(table, target, *self.by_segment(places, at))
        self.table = target
        table.free()
        if order is not None:
            old = self.columns.largest
            self.columns.gather(order[:, :, :width], pages_for(width) * PAGE)
            self._account.note_copies(2 * old)  # gathered first

    def _move(self, source: PageTable, target: PageTable, segment: Tensor, at: Tensor, to: Tensor) -> None:
        """Copy keys and values from slot to slot."""
        if len(to):
            if source.arena.native is None:
                f = source.arena.format
                self._account.note_copies(len(to) * max(f.k_dim, f.v_dim) * f.dtype.itemsize)  # gathered first
            entries.move(source.view(), target.view(), segment, at, to)

    def sort(self) -> None:
        """Put the entries of every segment into ascending order of position."""
        if not self._ordered:
            table = self.table
            position = self.columns.data["position"][:, :, : self.width]
            order = position.masked_fill(~self.valid(), torch.iinfo(torch.int32).max).argsort(dim=-1)
            self._move_to(PageTable(table.arena, table.lengths, table.together), order)
            self._ordered = True

    def select_rows(self, rows: Sequence[int], picked: Tensor) -> None:
        """Make row i a copy of what is row `rows[i]` now; copies share their pages. `picked` is rows as a tensor."""
        self.table.select([row * self.heads + head for row in rows for head in range(self.heads)])
        self.columns.select_rows(picked)
        self._fit_columns()

    def unshare(self) -> None:
        """Give every row pages of its own."""
        if self.table.arena.has_shared:
            self._move_to(PageTable(self.table.arena, self.table.lengths, self.table.together))
