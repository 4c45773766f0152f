"""The codes of a tier's units: which pages they lie in, and what writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstrata.kernels import entries
from kvstrata.kernels.codec import packing, units
from kvstrata.kernels.codec.rotation import Rotary, hadamard
from kvstrata.kernels.pages import PAGE
from kvstrata.store.account import Account
from kvstrata.store.arena import Arena
from kvstrata.store.exact import ExactTier


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What goes where in the segments of the columns: units by their first slot, and exact entries to be coded."""

    segment: Tensor  # [M]
    source: Tensor  # [M] slot
    target: Tensor  # [M] slot
    new_segment: Tensor  # [n]
    at: Tensor  # [n, unit] exact slots
    new_target: Tensor  # [n] slot


class Codes:
    """Pages of units of S kv segments in order (row, kv head), `served` of which hold the same tokens.

    What all pages of a segment share, a running grid or the mean key that rotated codecs take off, is its frame.
    """

    def __init__(self, arena: Arena, segments: int, served: int, rotary: Rotary | None) -> None:
        assert arena.format.codec is not None
        self.arena, self.served, self._rotary, self._codec = arena, served, rotary, arena.format.codec
        self.pages: list[list[int]] = [[] for _ in range(segments)]
        numbers = arena.format.frame_numbers
        self.frames = torch.full((segments, numbers), torch.nan, device=arena.device)  # NaN: none yet
        self.rescales = self.nonfinite = 0

    @property
    def frame_bytes(self) -> int:
        """Bytes of frames."""
        return self.frames.nbytes

    def change(self, moves: Moves, wanted: Sequence[int], exact: ExactTier, account: Account) -> None:
        """Move and code, until every segment of the columns has `wanted` pages, those beyond given back."""
        arena, served, f = self.arena, self.served, self.arena.format
        each = [n for n in wanted for _ in range(served)]
        self._resize([max(n, len(pages)) for n, pages in zip(each, self.pages, strict=True)])
        if arena.has_shared:
            touched = torch.cat([moves.segment, moves.new_segment]).unique().tolist()
            self._own([c * served + head for c in touched for head in range(served)])
        width = max(1, max(map(len, self.pages), default=0))
        rows = [pages + [-1] * (width - len(pages)) for pages in self.pages]
        table = torch.tensor(rows, dtype=torch.int32, device=arena.device)
        old = self._each_head(moves.segment, moves.source, moves.target)
        fresh = packing.Packed(*arena.read([]), 0)
        if self._codec.running:
            units.move_units(f, list(arena.blocks), table, old, fresh, arena.native)
            if len(moves.new_segment):
                new = self._each_head(moves.new_segment, moves.at[:, 0], moves.new_target)
                view = exact.table.view()
                done = units.code_units(f, list(arena.blocks), view, table, new, self.frames, arena.native)
                self.rescales, self.nonfinite = self.rescales + done[0], self.nonfinite + done[1]
        else:
            if len(moves.new_segment):
                fresh = self._pack(moves, exact, account)
                new = self._each_head(moves.new_segment, moves.new_target, moves.new_target)
                new[:, 1] = width * PAGE + torch.arange(len(new), device=table.device) * self._codec.unit
                old = torch.cat([old, new])
            units.move_units(f, list(arena.blocks), table, old, fresh, arena.native)
        self._resize(each)

    def _each_head(self, segment: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """(kv segment, source, target) [n * served, 3] int32 of moves in the segments of the columns."""
        heads = torch.arange(self.served, device=segment.device)
        every = (segment[:, None] * self.served + heads).flatten()
        return torch.stack([every, *(x.repeat_interleave(self.served) for x in (source, target))], dim=1).int()

    def _pack(self, moves: Moves, exact: ExactTier, account: Account) -> packing.Packed:
        """Pages of codes of the new units, one after the other, every unit in all its heads."""
        f, unit, served = self.arena.format, self._codec.unit, self.served
        heads = torch.arange(served, device=moves.at.device)
        segment = (moves.new_segment[:, None] * served + heads).flatten().repeat_interleave(unit)
        at = moves.at.repeat_interleave(served, dim=0).flatten()
        k, v = entries.gather(exact.table.view(), segment, at)
        self.nonfinite += k.numel() + v.numel() - int(k.isfinite().sum() + v.isfinite().sum())
        if not self._codec.plain:
            position = exact.columns.data["position"].flatten(0, 1)[segment // served, at]
            k, v = self._turned(segment, k.float(), v.float(), position)
        account.note_copies(k.nbytes + v.nbytes)
        k, v = (packing.in_pages(x, unit) for x in (k, v))
        return packing.pack(f, k.contiguous(), v.contiguous(), self.arena.native)

    def _turned(self, segment: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """What is coded of keys and values [n, D] of kv segments."""
        if self._codec.key_space == "pre":
            assert self._rotary is not None
            k = self._rotary.off(k, position)
        if not self._codec.rotated:
            return k, v
        for s in segment.unique().tolist():
            if self.frames[s].isnan().any():
                self.frames[s] = k[segment == s].mean(dim=0).nan_to_num()
        return hadamard(k - self.frames[segment]), hadamard(v)

    def plain(self, segment: int, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `_turned`, for the entries of one kv segment."""
        if self._codec.rotated:
            k, v = hadamard(k) + self.frames[segment], hadamard(v)
        if self._codec.key_space == "pre":
            assert self._rotary is not None
            k = self._rotary.on(k, position)
        return k, v

    # -- pages --------------------------------------------------------------------------------------------------

    def _resize(self, wanted: Sequence[int]) -> None:
        """Give every kv segment so many pages."""
        missing = [max(0, n - len(pages)) for pages, n in zip(self.pages, wanted, strict=True)]
        if any(missing):
            taken = iter(self.arena.take(sum(missing), together=False))
            for pages, more in zip(self.pages, missing, strict=True):
                pages += [next(taken) for _ in range(more)]
        spare = [page for pages, n in zip(self.pages, wanted, strict=True) for page in pages[n:]]
        if spare:
            self.pages = [pages[:n] for pages, n in zip(self.pages, wanted, strict=True)]
            self.arena.give(spare)

    def _own(self, segments: Sequence[int]) -> None:
        """Copy those pages of these kv segments that have other users, so that they may be written to."""
        for s in segments:
            self.pages[s] = self.arena.own(self.pages[s])
