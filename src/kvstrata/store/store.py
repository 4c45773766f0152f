"""The exact tier of one layer: entries in capacity buffers, appended in place, compacted and freed by plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.core import POSITION, STEP, Column, Plan, Tier
from kvstrata.store.account import Account, Bytes
from kvstrata.store.segments import STEADY, Segments


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A rectangle of rows and heads whose segments have one length, as views: k and v [b, h, n, D]."""

    rows: slice
    heads: slice
    k: Tensor
    v: Tensor


class LayerStore:
    """Entries of one layer: keys, values and columns, per row or (`per_head`) per row and head.

    Appending writes in place. A plan that drops few entries lets the last ones take their places, so slots of a
    segment stand in no particular order and the position column tells. Buffers, one allocation each per layer, are
    laid out anew when a segment is full (then with one page of slack each) or when a plan leaves more than a page
    free; `held` equals `reserved` but for copies in the making. Views and blocks taken before a call that changes the
    store are invalid after it.
    """

    def __init__(self, layer: int, columns: Sequence[Column], per_head: bool, account: Account) -> None:
        self.layer, self.per_head = layer, per_head
        self.columns = (POSITION, *(c for c in columns if c != POSITION))
        self._account = account
        self._reset()

    def _reset(self) -> None:
        self.batch_size = self.num_kv_heads = 0
        self.segments = Segments([])
        self._ordered = True  # whether slots of every segment ascend in position
        self._k = self._v = torch.empty(0)
        self._columns: dict[str, Tensor] = {}
        self._reserved = 0
        self._account.set(self.layer, Bytes())

    def reset(self) -> None:
        """Free everything, as if nothing had been stored."""
        self._reset()

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been appended since the last reset."""
        return self.batch_size == 0

    @property
    def device(self) -> torch.device:
        """Where columns and masks live: with the keys."""
        return self._columns[POSITION.name].device

    @property
    def segment_heads(self) -> int:
        """Segments per row: H where heads hold different tokens, else 1."""
        return self.num_kv_heads if self.per_head else 1

    @property
    def longest(self) -> int:
        """N: entries of the longest segment."""
        return 0 if self.is_empty else self.segments.longest

    def lengths(self) -> list[list[int]]:
        """Entries stored [B][1|H]."""
        heads, flat = self.segment_heads, self.segments.lengths
        return [flat[row * heads : (row + 1) * heads] for row in range(self.batch_size)]

    @property
    def payload_itemsize(self) -> int:
        """Bytes of one number of a key."""
        return self._k.element_size()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value over all heads of the layer, as an uncompressed cache stores them."""
        return 0 if self.is_empty else self.num_kv_heads * _payload_bytes(self._k, self._v)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all heads of the layer, columns included."""
        return self.token_bytes + self._column_bytes * self.segment_heads

    def entry_bytes_of(self, k: Tensor, v: Tensor) -> int:
        """What `entry_bytes` will be once k and v [B, H, Q, D] are stored."""
        heads = k.shape[1]
        return heads * _payload_bytes(k, v) + self._column_bytes * (heads if self.per_head else 1)

    @property
    def _column_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def _settle_account(self, transient: int = 0) -> None:
        per_slot = 0 if self.is_empty else self.entry_bytes // self.segment_heads
        live, held = per_slot * self.segments.entries, per_slot * self.segments.slots
        self._account.set(self.layer, Bytes(live, held, self._reserved + transient))

    # -- reading ------------------------------------------------------------------------------------------------

    def blocks(self, split_rows: bool = False) -> Iterator[Block]:
        """Yield views that cover every segment once, entries in slot order; one block where all lengths agree.

        With `split_rows` rows come apart even then.
        """
        segs, rows, heads = self.segments, self.batch_size, self.num_kv_heads
        if segs.uniform and not split_rows:
            shape, n = (rows, heads, segs.capacities[0]), segs.lengths[0]
            k, v = (t.view(*shape, t.shape[-1])[:, :, :n] for t in (self._k, self._v))
            yield Block(slice(rows), slice(heads), k, v)
            return
        width = self._width
        for index, (start, cap, n) in enumerate(zip(segs.starts, segs.capacities, segs.lengths, strict=True)):
            row, head = divmod(index, self.segment_heads)
            here = slice(start * width, (start + cap) * width)
            k, v = (t[here].view(1, width, cap, t.shape[-1])[:, :, :n] for t in (self._k, self._v))
            yield Block(slice(row, row + 1), slice(head, head + width), k, v)

    def keys(self) -> Tensor:
        """All keys as [B, H, N, D] in slot order; zeros past a segment's length. A view where all lengths agree."""
        if self.segments.uniform:
            return next(self.blocks()).k
        dense = self._k.new_zeros(self.batch_size, self.num_kv_heads, self.longest, self._k.shape[1])
        for block in self.blocks():
            dense[block.rows, block.heads, : block.k.shape[2]] = block.k
        return dense

    def column(self, name: str) -> Tensor:
        """One column as [B, 1|H, N] in slot order; zeros past a segment's length. Not to be written to."""
        shape = (self.batch_size, self.segment_heads, -1)
        flat, segs = self._columns[name], self.segments
        if segs.uniform:
            return flat.view(shape)[:, :, : segs.lengths[0]]
        dense = flat[self._slots().clamp_max(segs.slots - 1)].view(shape)
        return dense.masked_fill_(~self.valid(), 0)

    def set_column(self, name: str, value: Tensor) -> None:
        """Replace a column by value [B, 1|H, N]; what stands past a segment's length is ignored."""
        flat, segs = self._columns[name], self.segments
        if segs.uniform:
            flat.view(value.shape[0], value.shape[1], -1)[:, :, : segs.lengths[0]] = value
            return
        valid = self.valid().flatten(0, 1)
        flat[self._slots()[valid]] = value.flatten(0, 1)[valid].to(flat.dtype)

    def sort(self) -> None:
        """Put the entries of every segment into ascending order of position."""
        if self._ordered or self.is_empty:
            return
        position = self.column("position").masked_fill(~self.valid(), torch.iinfo(torch.int32).max).flatten(0, 1)
        order = position.argsort(dim=-1)
        segment, place = self.valid().flatten(0, 1).nonzero(as_tuple=True)
        at = self.segments.rows(self._width, segment, order[segment, place])
        self._copy(at, self.segments.rows(self._width, segment, place), self._buffers())
        self._ordered = True
        self._settle_account()

    def valid(self) -> Tensor:
        """[B, 1|H, N] bool: which slots of the dense forms hold an entry."""
        if self.segments.uniform:
            whole = torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
            return whole.expand(self.batch_size, self.segment_heads, self.longest)
        lengths = torch.tensor(self.segments.lengths, device=self.device)
        mask = torch.arange(self.longest, device=self.device) < lengths[:, None]
        return mask.view(self.batch_size, self.segment_heads, -1)

    def _slots(self) -> Tensor:
        """Slot number [segments, N] of every dense place; places past a length point at a neighbour's slot."""
        device = self.device
        return self.segments.starts_on(device)[:, None] + torch.arange(self.longest, device=device)

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, tokens: Sequence[int], first: Sequence[int], step: int) -> None:
        """Store the last `tokens[b]` entries of each row of k and v [B, H, Q, D], in place where there is room.

        `first[b]` is the position of the first of them; `step` the number of this forward.
        """
        first_time = self.is_empty
        if first_time:
            self.batch_size, self.num_kv_heads = k.shape[:2]
        new = list(tokens) if self.segment_heads == 1 else [n for n in tokens for _ in range(self.segment_heads)]
        if first_time:
            self._lay_out(Segments.fit(new), k, v)
            self.segments.resize([0] * len(new))
        old = self.segments
        grown = [n + more for n, more in zip(old.lengths, new, strict=True)]
        if not old.has_room(grown):
            self._move(old.lengths, Segments.fit(grown))
        self.segments.resize(grown)
        alike = len(set(tokens)) == 1 and self.segments.uniform
        for block in self.blocks(split_rows=not alike):
            if count := tokens[block.rows.start or 0]:
                part = (block.rows, block.heads, slice(-count, None))
                whole = alike and count == k.shape[2]
                block.k[:, :, -count:] = k if whole else k[part]
                block.v[:, :, -count:] = v if whole else v[part]
        alike = alike and len(set(first)) == 1
        for name, flat in self._columns.items():
            for row, tail in self._tails(flat, tokens, alike):
                if name == POSITION.name and tokens[row] > 1:
                    tail.copy_(torch.arange(first[row], first[row] + tokens[row], device=flat.device))
                else:
                    tail.fill_(first[row] if name == POSITION.name else step if name == STEP.name else 0)
        self._settle_account()

    def _tails(self, flat: Tensor, tokens: Sequence[int], alike: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield (row, view [segments, tokens[row]]) of the newest slots of a column; all rows at once if alike."""
        segs = self.segments
        if alike:
            n = segs.lengths[0]
            yield 0, flat.view(len(segs.lengths), -1)[:, n - tokens[0] : n]
            return
        for index, (start, n) in enumerate(zip(segs.starts, segs.lengths, strict=True)):
            row = index // self.segment_heads
            yield row, flat[None, start + n - tokens[row] : start + n]

    def apply(self, plan: Plan) -> int:
        """Free every entry whose tier is DROP, close the holes and return how many slots of payload were freed.

        The plan's heads axis must be the store's. A plan that drops nothing copies nothing.
        """
        keep = plan.tier != Tier.DROP
        if not self.segments.uniform:
            keep &= self.valid()
        kept: list[int] = keep.sum(dim=-1).flatten().tolist()
        before = self.segments.lengths
        if kept == before:
            return 0
        close = self._fill_holes if self.segments.fits(kept) else self._close_up
        close(keep.flatten(0, 1), kept)
        self._settle_account()
        return sum(before) - sum(kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now; rows may repeat or be left out."""
        heads, old = self.segment_heads, self.segments
        picked = [row * heads + head for row in rows for head in range(heads)]
        source = Segments(
            [old.lengths[i] for i in picked],
            [old.capacities[i] for i in picked],
            [old.starts[i] for i in picked],
        )
        self.batch_size = len(rows)
        self.segments = source
        self._move(source.lengths, Segments.fit(source.lengths))
        self._settle_account()

    # -- layout -------------------------------------------------------------------------------------------------

    def _lay_out(self, segments: Segments, k: Tensor, v: Tensor) -> None:
        """Allocate for `segments`; k and v give head_dim, dtype and device."""
        width, slots = self._width, segments.slots
        self.segments = segments
        self._k = k.new_empty(slots * width, k.shape[-1])
        self._v = v.new_empty(slots * width, v.shape[-1])
        self._columns = {c.name: torch.zeros(slots, dtype=c.dtype, device=k.device) for c in self.columns}
        self._reserved = _nbytes(*self._buffers())

    def _move(self, lengths: list[int], target: Segments) -> None:
        """Copy the first lengths[i] entries of every segment into buffers laid out as `target`."""
        old_k, old_v, old_columns, source = self._k, self._v, self._columns, self.segments
        self._lay_out(target, old_k, old_v)
        width = self._width
        for i, n in enumerate(lengths):
            for head in range(width):
                to = target.starts[i] * width + head * target.capacities[i]
                at = source.starts[i] * width + head * source.capacities[i]
                self._k[to : to + n] = old_k[at : at + n]
                self._v[to : to + n] = old_v[at : at + n]
            for name, flat in self._columns.items():
                flat[target.starts[i] : target.starts[i] + n] = old_columns[name][
                    source.starts[i] : source.starts[i] + n
                ]
        self._settle_account(_nbytes(old_k, old_v, *old_columns.values()))

    def _fill_holes(self, keep: Tensor, kept: list[int]) -> None:
        """Let the last kept entries of every segment take the places of those dropped before them: few are copied."""
        dropped: list[list[int]] = [[] for _ in kept]
        for index, slot in (~keep).nonzero().tolist():
            dropped[index].append(slot)
        at: list[tuple[int, int]] = []  # (segment, slot) of those that move
        to: list[tuple[int, int]] = []
        for index, (gone, end, n) in enumerate(zip(dropped, kept, self.segments.lengths, strict=True)):
            last = [slot for slot in range(end, n) if slot not in gone]
            at += [(index, slot) for slot in last]
            to += [(index, slot) for slot in gone[: len(last)]]
        if at:
            self._copy(self._rows_of(at), self._rows_of(to), self._buffers())
            self._ordered = False
        self.segments.resize(kept)

    def _rows_of(self, slots: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Rows of the payload and of the columns for these (segment, slot); for few of them."""
        starts, caps, width, device = self.segments.starts, self.segments.capacities, self._width, self.device
        payload = [starts[i] * width + head * caps[i] + slot for i, slot in slots for head in range(width)]
        if width == 1:
            return (rows := torch.tensor(payload, device=device)), rows
        return torch.tensor(payload, device=device), torch.tensor([starts[i] + n for i, n in slots], device=device)

    def _close_up(self, keep: Tensor, kept: list[int]) -> None:
        """Copy the kept entries into smaller buffers, in the order they had."""
        source, old, width = self.segments, self._buffers(), self._width
        self._lay_out(Segments.fit(kept, STEADY), self._k, self._v)
        segment, at = keep.nonzero(as_tuple=True)
        place = (keep.cumsum(dim=-1) - 1)[segment, at]
        self._copy(source.rows(width, segment, at), self.segments.rows(width, segment, place), old)

    def _copy(self, at: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor], old: Sequence[Tensor]) -> None:
        """Copy rows `at` of `old` to rows `to` of the present buffers; each names rows of payload and of columns."""
        away = [before for before, now in zip(old, self._buffers(), strict=True) if before is not now]
        gathered = at[0].numel() * max(t[0].nbytes for t in old[:2])  # the largest copy in the making
        self._settle_account(_nbytes(*away) + gathered)
        for index, (before, now) in enumerate(zip(old, self._buffers(), strict=True)):
            column = index > 1  # keys and values come first
            now.index_copy_(0, to[column], before.index_select(0, at[column]))

    def _buffers(self) -> tuple[Tensor, ...]:
        return (self._k, self._v, *self._columns.values())

    @property
    def _width(self) -> int:
        """Heads that one segment serves: payload rows per slot."""
        return 1 if self.per_head else self.num_kv_heads


def _payload_bytes(k: Tensor, v: Tensor) -> int:
    """Bytes of one head's key and value."""
    return (k.shape[-1] + v.shape[-1]) * k.element_size()


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)
