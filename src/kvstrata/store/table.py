"""Which pages each (row, kv head) of a layer has, and how many entries are in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.pages import PAGE, Block, Pages
from kvstrata.store.arena import Arena


def pages_for(entries: int) -> int:
    """Pages that a segment of so many entries has: room for one more at least, so that steady budgets stay in place."""
    return entries // PAGE + 1


class PageTable:
    """Pages and lengths of S segments, in order (row, kv head).

    With `together` the pages of a segment have consecutive numbers in one block, so that plain views of it serve.
    """

    def __init__(self, arena: Arena, lengths: Sequence[int], together: bool) -> None:
        """Take room for these lengths; the entries themselves are the caller's to write."""
        self.arena, self.together = arena, together
        self.lengths = list(lengths)
        taken = arena.take(sum(map(pages_for, lengths)), together)
        self.pages = _dealt(taken, [pages_for(n) for n in lengths])
        self._view: Pages | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_view": None}

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def uniform(self) -> bool:
        """Whether all segments hold as many entries."""
        return len(set(self.lengths)) == 1

    @property
    def longest(self) -> int:
        """Entries of the longest segment."""
        return max(self.lengths, default=0)

    def entries(self) -> int:
        """Entries stored, those of shared pages once."""
        if not self.arena.has_shared:
            return sum(self.lengths)
        filled: dict[int, int] = {}
        for pages, length in zip(self.pages, self.lengths, strict=True):
            for i, page in enumerate(pages):
                filled[page] = max(filled.get(page, 0), min(PAGE, length - i * PAGE))
        return sum(filled.values())

    def held_pages(self) -> int:
        """Pages taken, shared ones once."""
        if not self.arena.has_shared:
            return sum(map(len, self.pages))
        return len({page for pages in self.pages for page in pages})

    # -- what kernels see ---------------------------------------------------------------------------------------

    def view(self) -> Pages:
        """Table and lengths as tensors; valid until pages change, while lengths are followed."""
        if self._view is None:
            width = max(1, max(map(len, self.pages), default=0))
            rows = [pages + [0] * (width - len(pages)) for pages in self.pages]
            table = torch.tensor(rows, dtype=torch.int32, device=self.arena.device).view(len(rows), width)
            lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.arena.device)
            view = Pages(self.arena.format, self._blocks(), table, lengths)
            self._view = dispatch.with_twin(self.arena.kernels, self.arena.native, view)
        return self._view

    def _blocks(self) -> list[Block]:
        """Blocks that hold these pages, and maybe others."""
        if self.together and (runs := [pages for pages in self.pages if pages]):
            block = self.arena.block_of(runs[0][0])
            if all(block.first <= run[0] <= run[-1] < block.first + block.k.shape[0] for run in runs):
                return [block]
        return self.arena.blocks

    def regular(self) -> tuple[Tensor, Tensor] | None:
        """Views k [S, N, D] and v of all segments where their runs of pages stand evenly in one block, else None."""
        starts = [pages[0] for pages in self.pages if pages]
        if not self.together or not starts or len(starts) < len(self.pages):
            return None
        step = starts[1] - starts[0] if len(starts) > 1 else len(self.pages[0])
        if step < max(map(len, self.pages)) or starts != list(range(starts[0], starts[-1] + 1, step)):
            return None
        block = self.arena.block_of(starts[0])
        fits = starts[-1] + -(-self.longest // PAGE) <= block.first + block.k.shape[0]
        return self._run(block, starts[0], len(starts), step, self.longest) if fits else None

    def segment(self, index: int) -> tuple[Tensor, Tensor] | None:
        """Views k [1, n, D] and v of one segment where its pages stand together, else None."""
        if not self.together or not self.pages[index]:
            return None
        first = self.pages[index][0]
        return self._run(self.arena.block_of(first), first, 1, 1, self.lengths[index])

    def _run(self, block: Block, first: int, count: int, step: int, n: int) -> tuple[Tensor, Tensor]:
        """Views [count, n, D]: the first n slots of every `step` pages from page `first` on."""

        def run(t: Tensor) -> Tensor:
            page = PAGE * t.shape[-1]
            return t.as_strided((count, n, t.shape[-1]), (step * page, t.shape[-1], 1), (first - block.first) * page)

        return run(block.k), run(block.v)

    # -- change -------------------------------------------------------------------------------------------------

    def resize(self, lengths: Sequence[int], written: bool = False, keep_pages: bool = False) -> None:
        """Set the lengths and give back the pages that they leave without use; none with `keep_pages`.

        `written` says that the tensor of lengths has them already.
        """
        self.lengths = list(lengths)
        spare: list[int] = []
        if not keep_pages:
            spare = [page for pages, n in zip(self.pages, lengths, strict=True) for page in pages[pages_for(n) :]]
        if spare:
            self.pages = [pages[: pages_for(n)] for pages, n in zip(self.pages, lengths, strict=True)]
            self._view = None
            self.arena.give(spare)
        elif self._view is not None and not written:
            self._view.lengths.copy_(torch.tensor(self.lengths, dtype=torch.int32))

    def grow(self, new: Sequence[int]) -> None:
        """Take the pages that `new` more entries need and make the pages they go to this table's own.

        Only where pages need not stand together. Lengths stay.
        """
        lengths = self.lengths
        if self.arena.has_shared:
            for s, (n, more) in enumerate(zip(lengths, new, strict=True)):
                self.own(s, self._written(s, n, more))
        missing = [max(0, pages_for(n + more) - len(p)) for n, more, p in zip(lengths, new, self.pages, strict=True)]
        if any(missing):
            taken = _dealt(self.arena.take(sum(missing), together=False), missing)
            self.pages = [pages + more for pages, more in zip(self.pages, taken, strict=True)]
            self._view = None

    def has_room(self, new: Sequence[int]) -> bool:
        """Whether `new` more entries can be written where the segments end."""
        shared = self.arena.has_shared
        return all(
            n + more <= len(self.pages[s]) * PAGE
            and not (shared and any(self.arena.is_shared(self.pages[s][i]) for i in self._written(s, n, more)))
            for s, (n, more) in enumerate(zip(self.lengths, new, strict=True))
        )

    def _written(self, segment: int, length: int, more: int) -> range:
        """Places among a segment's pages that `more` entries behind `length` go to."""
        return range(length // PAGE, min(len(self.pages[segment]), -(-(length + more) // PAGE))) if more else range(0)

    def own(self, segment: int, places: Iterable[int]) -> None:
        """Copy those of a segment's pages at `places` that have other users, so that they may be written to."""
        pages, places = self.pages[segment], list(places)
        for place, mine in zip(places, self.arena.own([pages[place] for place in places]), strict=True):
            if mine != pages[place]:
                pages[place], self._view = mine, None

    def select(self, segments: Sequence[int]) -> None:
        """Make segment i what segment segments[i] is now, sharing its pages."""
        before = self.pages
        self.pages = [list(before[s]) for s in segments]
        self.lengths = [self.lengths[s] for s in segments]
        self._view = None
        self.arena.share(page for pages in self.pages for page in pages)
        self.arena.give(page for pages in before for page in pages)

    def share(self) -> None:
        """Count another user for every page: a copy of this table."""
        self.arena.share(page for pages in self.pages for page in pages)

    def free(self) -> None:
        """Give every page back."""
        self.arena.give(page for pages in self.pages for page in pages)
        self.pages, self.lengths, self._view = [], [], None


def _dealt(pages: list[int], counts: Sequence[int]) -> list[list[int]]:
    """Pages handed out in order, counts[i] to the i-th."""
    source = iter(pages)
    return [[next(source) for _ in range(count)] for count in counts]
