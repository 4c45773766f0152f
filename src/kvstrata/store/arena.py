"""Memory of one format on one device, in blocks of pages that all layers of a cache share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstrata.kernels import dispatch
from kvstrata.kernels.dispatch import Implementation
from kvstrata.kernels.pages import Block, Format, block_of, read_pages, write_pages
from kvstrata.store.account import Account, Bytes

GROWTH = 16  # a block made for few pages has a sixteenth of what there is, so that blocks stay few


class Arena:
    """Pages by number: taken, shared, given back. A block that nobody uses goes back to the system at once.

    Forks of a cache share one, and may run in threads of their own.
    """

    def __init__(
        self, format: Format, device: torch.device, account: Account, kernels: Implementation = "reference"
    ) -> None:
        self.format, self.device = format, device
        self.kernels: Implementation = kernels
        self.blocks: list[Block] = []  # ascending
        self.native: Any = dispatch.native_arena(kernels, format)
        self.page_bytes = format.page_bytes  # kept, since every step asks for it
        self._accounts = [account]
        self._taken: list[bytearray] = []  # of every block: 1 where a page is in use
        self._extra: Counter[int] = Counter()  # users beyond the first of a page that has several
        self._pages = 0
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "native": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied arena has a native twin of its own."""
        self.__dict__.update(state)
        self._lock = threading.RLock()
        self.native = dispatch.native_arena(self.kernels, self.format)
        for block in self.blocks:
            self._tell_native(block)

    def join(self, account: Account) -> None:
        """Tell these books too."""
        self._accounts.append(account)
        self._settle_account()

    def leave(self, account: Account) -> None:
        """Tell these books no longer."""
        self._accounts = [other for other in self._accounts if other is not account]

    @property
    def has_shared(self) -> bool:
        """Whether any page has several users."""
        return bool(self._extra)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several users, so that writing to it needs a copy first."""
        return page in self._extra

    def take(self, count: int, together: bool) -> list[int]:
        """Take pages, with consecutive numbers in one block where that needs no new block, or always if `together`."""
        with self._lock:
            if count == 0:
                return []
            for block, taken in zip(self.blocks, self._taken, strict=True):
                if (start := taken.find(bytes(count))) >= 0:
                    return self._mark(block, taken, range(start, start + count))
            found: list[int] = []
            if not together:
                for block, taken in zip(self.blocks, self._taken, strict=True):
                    free = [i for i, used in enumerate(taken) if not used][: count - len(found)]
                    found += self._mark(block, taken, free)
            if missing := count - len(found):
                found += self._mark(*self._new_block(max(missing, self._pages // GROWTH)), range(missing))
            return found

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to every page."""
        with self._lock:
            self._extra.update(pages)

    def give(self, pages: Iterable[int]) -> None:
        """Let go of pages; those without users are free, and blocks without any go."""
        with self._lock:
            for page in pages:
                if page in self._extra:
                    self._extra[page] -= 1
                    if not self._extra[page]:
                        del self._extra[page]
                    continue
                number = self._number(page)
                self._taken[number][page - self.blocks[number].first] = 0
            for number in reversed(range(len(self.blocks))):
                if not any(self._taken[number]):
                    gone = self.blocks.pop(number)
                    del self._taken[number]
                    self._pages -= gone.k.shape[0]
                    if self.native is not None:
                        self.native.remove(gone.first)
            self._settle_account()

    def read(self, pages: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """What these pages hold: k [n, ...], v and grid, as a `Block` has them. Not to be written to."""
        with self._lock:
            if pages:
                return read_pages(self.blocks, pages)
            f = self.format
            shapes = [(f.k_shape, f.payload_dtype), (f.v_shape, f.payload_dtype), ((f.grid_numbers,), f.grid_dtype)]
            k, v, grid = (torch.empty(0, *shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
            return k, v, grid

    def write(self, pages: Sequence[int], k: Tensor, v: Tensor, grid: Tensor) -> None:
        """Fill these pages with what `read` gives."""
        with self._lock:
            write_pages(self.blocks, pages, k, v, grid)

    def own(self, pages: Sequence[int]) -> list[int]:
        """The same pages for one user alone: copies in place of shared ones, which are let go of."""
        with self._lock:
            found = list(pages)
            shared = [i for i, page in enumerate(pages) if self.is_shared(page)]
            for i, mine in zip(shared, self.take(len(shared), together=False), strict=True):
                self.write([mine], *self.read([pages[i]]))
                self.give([pages[i]])
                found[i] = mine
            return found

    def _mark(self, block: Block, taken: bytearray, places: Iterable[int]) -> list[int]:
        pages: list[int] = []
        for place in places:
            taken[place] = 1
            pages.append(block.first + place)
        return pages

    def block_of(self, page: int) -> Block:
        """The block that a page lies in."""
        return block_of(self.blocks, page)

    def _number(self, page: int) -> int:
        """Which block a page lies in."""
        return next(i for i, b in enumerate(self.blocks) if b.first <= page < b.first + b.k.shape[0])

    def _new_block(self, pages: int) -> tuple[Block, bytearray]:
        number, first = 0, 0  # the lowest page numbers that no block has
        while number < len(self.blocks) and self.blocks[number].first - first < pages:
            first = self.blocks[number].first + self.blocks[number].k.shape[0]
            number += 1
        f = self.format
        block = Block(
            first,
            torch.empty(pages, *f.k_shape, dtype=f.payload_dtype, device=self.device),
            torch.empty(pages, *f.v_shape, dtype=f.payload_dtype, device=self.device),
            torch.empty(pages, f.grid_numbers, dtype=f.grid_dtype, device=self.device),
        )
        self.blocks.insert(number, block)
        self._taken.insert(number, bytearray(pages))
        self._pages += pages
        self._tell_native(block)
        self._settle_account()
        return block, self._taken[number]

    def _tell_native(self, block: Block) -> None:
        if self.native is not None:
            self.native.add(*block)

    def _settle_account(self) -> None:
        for account in self._accounts:
            account.set(self, Bytes(reserved=self._pages * self.page_bytes))


class Arenas:
    """The arenas of one cache, one for each format and device, made when first asked for."""

    def __init__(self, account: Account) -> None:
        self._accounts = [account]
        self.shared = False  # whether several caches ever lived here
        self._made: dict[tuple[Format, torch.device, Implementation], Arena] = {}

    def __iter__(self) -> Iterator[Arena]:
        return iter(self._made.values())

    def join(self, account: Account) -> None:
        """Let another cache live here too, whose books are told of every change."""
        self.shared = True
        self._accounts.append(account)
        for arena in self._made.values():
            arena.join(account)

    def leave(self, account: Account) -> None:
        """Forget the books of a cache that is gone; those of the last one stay."""
        if len(self._accounts) > 1:
            self._accounts = [other for other in self._accounts if other is not account]
            for arena in self._made.values():
                arena.leave(account)

    def get(self, format: Format, device: torch.device, kernels: Implementation) -> Arena:
        """The arena for pages of this format that these kernels work on."""
        key = (format, device, kernels)
        if key not in self._made:
            self._made[key] = Arena(format, device, self._accounts[0], kernels)
            for account in self._accounts[1:]:
                self._made[key].join(account)
        return self._made[key]
