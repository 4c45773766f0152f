from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from kvstrata.core import Column, Plan, Tier
from kvstrata.kernels.pages import PAGE
from kvstrata.store import Account, Bytes, LayerStore
from kvstrata.store.arena import Arenas

COLUMNS = [Column("mass", torch.float32), Column("half", torch.float16)]
COLUMN_BYTES = 4 + 4 + 2  # position comes with every store
layouts = pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per-head"])


def open_store(columns=COLUMNS, per_head=False, layer=0, account=None, arenas=None):
    account = account or Account()
    return LayerStore(layer, columns, per_head, account, arenas or Arenas(account), "reference")


def buffers(*stores):
    """Every tensor that the stores hold on to."""
    blocks = [t for arena in stores[0]._arenas for block in arena.blocks for t in block[1:]]
    return blocks + [t for store in stores if store.exact for t in store.exact.columns.data.values()]


def storages(*stores):
    """Bytes of every storage that the stores hold on to."""
    unique = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in buffers(*stores)}
    return sum(storage.nbytes() for storage in unique.values())


def append(store, tokens, heads=2, dim=4, dtype=torch.float32, first=0):
    k = torch.randn(len(tokens), heads, max(tokens), dim).to(dtype)
    store.append(k, k, tokens, [first] * len(tokens), 0)


def keep_share(store, share, seed=0):
    keep = torch.rand(store.valid().shape, generator=torch.Generator().manual_seed(seed)) < share
    return store.apply(Plan(torch.where(keep, int(Tier.EXACT), int(Tier.DROP))))


def keep_last(store, count):
    n = store.longest
    tier = torch.full(store.valid().shape, int(Tier.DROP))
    tier[:, :, n - count :] = int(Tier.EXACT)
    return store.apply(Plan(tier))


class Strict(Account):
    """Notes the largest figures ever set, apart from the account's own peak."""

    def __init__(self):
        super().__init__()
        self.largest = Bytes()

    def set(self, layer, size):
        super().set(layer, size)
        self.largest = self.largest.most(self.now)

    def note_copies(self, nbytes):
        super().note_copies(nbytes)
        self.largest = self.largest.most(Bytes(reserved=self.now.reserved + nbytes))


class Books(RuleBasedStateMachine):
    """Two layers of one account under any sequence of calls: the figures equal a recount."""

    DIM, HEADS = 8, 2

    @initialize(
        per_head=st.booleans(),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        kernels=st.sampled_from(["reference", "native"]),
    )
    def open(self, per_head, dtype, kernels):
        self.account, self.dtype = Strict(), dtype
        arenas = Arenas(self.account)
        self.stores = [LayerStore(layer, COLUMNS, per_head, self.account, arenas, kernels) for layer in range(2)]

    layer = st.integers(0, 1)

    @rule(layer=layer, data=st.data())
    def append(self, layer, data):
        rows = self.stores[layer].batch_size or data.draw(st.integers(1, 3))
        count = st.integers(0, 5) | st.sampled_from([PAGE, 3 * PAGE])
        append(self.stores[layer], [data.draw(count) for _ in range(rows)], self.HEADS, self.DIM, self.dtype)

    @precondition(lambda self: any(not s.is_empty for s in self.stores))
    @rule(share=st.sampled_from([0.0, 0.1, 0.9, 1.0]), seed=st.integers(0, 9))
    def apply(self, share, seed):
        for store in self.stores:
            if not store.is_empty:
                keep_share(store, share, seed)

    @precondition(lambda self: any(not s.is_empty for s in self.stores))
    @rule(rows=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def select_rows(self, rows):
        for store in self.stores:
            if not store.is_empty:
                store.select_rows([row % store.batch_size for row in rows])

    @rule(layer=layer)
    def reset(self, layer):
        self.stores[layer].reset()

    @invariant()
    def the_books_are_right(self):
        total = [0, 0]
        for store in self.stores:
            size = self.account.parts[store.layer]
            segments = [n for row in store.lengths() for n in row]
            entry, columns = 2 * self.DIM * self.dtype.itemsize, COLUMN_BYTES * sum(segments)
            filled = {}  # slots used in every page, however many rows share it
            pages_of, lengths = (store.exact.table.pages, store.exact.table.lengths) if store.exact else ([], [])
            for pages, n in zip(pages_of, lengths, strict=True):
                for place, page in enumerate(pages):
                    filled[page] = max(filled.get(page, 0), min(PAGE, n - place * PAGE))
            assert size.live == entry * sum(filled.values()) + columns
            dense = COLUMN_BYTES * len(segments) * (store.longest + PAGE)  # as long as the longest
            most = PAGE * len(pages_of) * entry + dense - columns
            assert size.live <= size.held <= size.live + most
            total = [n + more for n, more in zip(total, (size.live, size.held), strict=True)]
        assert (self.account.now.live, self.account.now.held) == tuple(total)
        assert self.account.now.held <= self.account.now.reserved == storages(*self.stores)
        assert self.account.peak == self.account.largest


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=12)
TestBooks = Books.TestCase


@layouts
def test_bytes_of_a_token_and_of_an_entry(per_head):
    store = open_store(per_head=per_head)
    assert store.token_bytes == 0
    append(store, [5, 5], heads=3, dim=8, dtype=torch.bfloat16)
    assert store.payload_itemsize == 2
    assert store.token_bytes == 2 * 3 * 8 * 2
    assert store.sizes_of(*store.none_of())["entry_bytes"] == store.token_bytes + COLUMN_BYTES * (3 if per_head else 1)


@layouts
@pytest.mark.parametrize("tokens", [[1000, 1000], [1000, 400]], ids=["even", "ragged"])
def test_dropping_most_frees_the_memory(per_head, tokens):
    account = Account()
    store = open_store(per_head=per_head, account=account)
    append(store, tokens)
    before, full = storages(store), account.now
    keep_last(store, 50)
    assert storages(store) < before / 8
    assert account.now.reserved == storages(store)
    assert account.now.live < full.live / 8


@layouts
def test_reset_frees_everything(per_head):
    account = Account()
    store = open_store(per_head=per_head, account=account)
    append(store, [100, 100])
    watched = weakref.ref(store.exact.table.arena.blocks[0].k)
    store.reset()
    assert watched() is None
    assert storages(store) == 0
    assert account.now == Bytes()


@layouts
def test_growing_counts_the_old_buffers_while_both_exist(per_head):
    account = Account()
    store = open_store(per_head=per_head, account=account)
    append(store, [50])
    before = storages(store)
    append(store, [70], first=50)  # a layout leaves one page of 64 free
    assert storages(store) > before
    assert account.now.reserved == storages(store)
    assert account.peak.reserved >= before + store.exact.table.held_pages() * store.exact.table.arena.page_bytes


class Alive(TorchDispatchMode):
    """Remembers the most bytes that floating tensors made inside held at one time, views counted once."""

    def __init__(self, already):
        super().__init__()
        self.made, self.most, self.copied = [weakref.ref(t) for t in already], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.made.append(weakref.ref(out))
            self.copied += out.nbytes if func is torch.ops.aten.index.Tensor else 0
        alive = [t for t in (made() for made in self.made) if t is not None]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        self.most = max(self.most, sum(sizes.values()))
        return out


def crowded(per_head):
    """A store of 960 entries whose next plan may work in place, with the peak restarted."""
    account = Account()
    store = open_store(per_head=per_head, account=account)
    append(store, [1000], heads=1, dim=32)
    keep_last(store, 960)
    account.restart_peak()
    return store


@layouts
@pytest.mark.parametrize("kept", [920, 450], ids=["in-place", "laid-out-anew"])
def test_reserved_counts_the_copies_that_a_plan_makes(per_head, kept):
    store = crowded(per_head)
    with Alive(buffers(store)) as alive:
        keep_last(store, kept)
    positions = store.exact.columns.data["position"].nbytes  # those laid out anew, which are no floats
    assert alive.most <= store._account.peak.reserved <= 1.01 * (alive.most + positions)


@layouts
def test_reserved_counts_the_copies_that_sorting_makes(per_head):
    store = crowded(per_head)
    keep_last(store, 920)
    store._account.restart_peak()
    with Alive(buffers(store)) as alive:
        store.sort()
    assert storages(store) < alive.most <= store._account.peak.reserved <= 1.01 * alive.most


@layouts
def test_sorting_what_is_in_order_copies_nothing(per_head):
    store = crowded(per_head)
    keep_last(store, 920)
    for copies in (True, False):
        with Alive([]) as alive:
            store.sort()
        assert (alive.copied > 0) == copies


@layouts
@pytest.mark.parametrize("dropped", [1, 40])
def test_a_plan_that_drops_few_copies_as_few(per_head, dropped):
    store = crowded(per_head)
    before = [list(pages) for pages in store.exact.table.pages]
    with Alive([]) as alive:
        keep_last(store, 960 - dropped)
    assert store.exact.table.pages == [
        pages[: len(left)] for pages, left in zip(before, store.exact.table.pages, strict=True)
    ]
    entry = store.sizes_of(*store.none_of())["entry_bytes"]
    assert 0 < alive.copied <= dropped * (entry - 4)  # the position is not a float


def test_layers_add_up_and_replace_their_own_figures():
    account = Account()
    account.set(0, Bytes(1, 2, 3))
    account.set(5, Bytes(10, 20, 30))
    assert account.now == Bytes(11, 22, 33)
    account.set(0, Bytes(4, 4, 4))
    assert account.now == Bytes(14, 24, 34)
    assert account.parts == {0: Bytes(4, 4, 4), 5: Bytes(10, 20, 30)}


def test_peak_keeps_the_largest_of_each_figure():
    account = Account()
    for size in (Bytes(5, 1, 1), Bytes(1, 5, 1), Bytes(1, 1, 5), Bytes()):
        account.set(0, size)
    assert account.now == Bytes()
    assert account.peak == Bytes(5, 5, 5)


def test_restarting_the_peak_forgets_what_was_before():
    account = Account()
    account.set(0, Bytes(9, 9, 9))
    account.set(0, Bytes(2, 3, 4))
    account.restart_peak()
    assert account.peak == account.now == Bytes(2, 3, 4)
    account.set(0, Bytes(3, 3, 4))
    assert account.peak == Bytes(3, 3, 4)
