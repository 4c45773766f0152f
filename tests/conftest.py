"""Every test starts from the same seed, and memory that nobody wrote reads as NaN."""

from __future__ import annotations

import math
import os
import zlib

# before torch loads OpenMP: threads that spin while they wait make small operators ten times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# before transformers: names of models that are not there fail at once, without asking anybody
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import Phase, settings

from kvstrata.kernels.pages import PAGE
from kvstrata.store import LayerStore
from kvstrata.store.arena import Arena
from kvstrata.store.units import UnitTier

settings.register_profile("same-every-time", deadline=None, derandomize=True)
settings.register_profile("first-failure", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("same-every-time")  # --hypothesis-profile=first-failure does not spend minutes on shrinking

# by patching the few calls that make such memory: a dispatch mode would slow every operator of every test
UNINITIALISED = [
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided")),
]


def poisoned_empty(make):
    def call(*args, **kwargs):
        with torch.no_grad():
            out = make(*args, **kwargs)
            return out.fill_(math.nan) if out.is_floating_point() else out

    return call


def poison_free_slots(store):
    """Overwrite every slot past a segment's length: NaN in floats, an absurd number in integers."""
    if store.exact is None:
        return
    table = store.exact.table
    filled: dict[int, int] = {}
    for pages, length in zip(table.pages, table.lengths, strict=True):
        for place, page in enumerate(pages):
            filled[page] = max(filled.get(page, 0), length - place * PAGE, 0)
    poison(table.arena, filled)
    poison_columns(store.exact.columns, store.exact.valid())
    for tier in store.coded.values():
        poison(tier.arena, tier.used())
        valid = tier.valid()
        if isinstance(tier, UnitTier):  # whose dormant units stand behind the active ones
            slots = [(a + d) * tier.arena.format.codec.unit for a, d in zip(tier.active, tier.dormant, strict=True)]
            valid = torch.arange(tier.columns.room) < torch.tensor(slots).view(*tier.columns.shape, 1)
        poison_columns(tier.columns, valid)


def poison_columns(columns, valid):
    for flat in columns.data.values():
        absurd = math.nan if flat.is_floating_point() else torch.iinfo(flat.dtype).max
        flat[:, :, : valid.shape[2]].masked_fill_(~valid, absurd)
        flat[:, :, valid.shape[2] :] = absurd


def poison(arena, filled):
    """Overwrite slots filled[page] and later of these pages, or what belongs to them in a coded page's grid."""
    for block in arena.blocks:
        for page in range(block.first, block.first + block.k.shape[0]):
            n = filled.get(page, PAGE)
            if n < PAGE and arena.format.codec is None:
                for payload in (block.k, block.v):
                    payload[page - block.first, n:].fill_(math.nan)
            elif n < PAGE and not arena.format.codec.symmetric:
                if arena.format.codec.k_axis == "token":
                    block.grid[page - block.first, : -2 * PAGE].view(2, PAGE)[:, n:] = math.nan
                block.grid[page - block.first, -2 * PAGE :].view(2, PAGE)[:, n:] = math.nan
            elif n == 0:
                block.grid[page - block.first].fill_(math.nan)


def poisoned_give(give):
    def call(self, pages):
        pages = list(pages)
        give(self, pages)
        taken = {b.first + i for b, used in zip(self.blocks, self._taken, strict=True) for i, u in enumerate(used) if u}
        poison(self, {page: 0 for page in pages if page not in taken})

    return call


def poisoned(method):
    def call(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        poison_free_slots(self)
        return result

    return call


@pytest.fixture(autouse=True)
def same_start_for_every_test():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    for owner, name in UNINITIALISED:
        monkeypatch.setattr(owner, name, poisoned_empty(getattr(owner, name)))
    for name in ("stage", "apply", "select_rows"):
        monkeypatch.setattr(LayerStore, name, poisoned(getattr(LayerStore, name)))
    monkeypatch.setattr(Arena, "give", poisoned_give(Arena.give))


SELDOM = ("[d2o", "-d2o", "[cake", "-cake")  # as they stand in the names of cases


def pytest_collection_modifyitems(items):
    """Of a test marked thin(n) about one case in n runs with the others, always the same; the rest are slow ones.

    So are two in three of the contract's cases for presets whose parts have tests of their own.
    """
    for item in items:
        mark, number = item.get_closest_marker("thin"), zlib.crc32(item.name.encode())
        seldom = "contract" in item.path.parts and any(name in item.name for name in SELDOM)
        if (mark and number % mark.args[0]) or (seldom and number % 3):
            item.add_marker(pytest.mark.slow)
