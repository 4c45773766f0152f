"""Every test starts from the same seed, and memory that nobody wrote reads as NaN."""

from __future__ import annotations

import math
import os

# before torch loads OpenMP: threads that spin while they wait make small operators ten times slower on a busy machine
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

from kvstrata.store import LayerStore

settings.register_profile("same-every-time", deadline=None, derandomize=True)
settings.load_profile("same-every-time")

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
    width = 1 if store.per_head else store.num_kv_heads
    segments = store.segments
    for start, cap, n in zip(segments.starts, segments.capacities, segments.lengths, strict=True):
        for head in range(width):
            free = slice(start * width + head * cap + n, start * width + (head + 1) * cap)
            store._k[free].fill_(math.nan)
            store._v[free].fill_(math.nan)
        for flat in store._columns.values():
            absurd = math.nan if flat.is_floating_point() else torch.iinfo(flat.dtype).max
            flat[start + n : start + cap].fill_(absurd)


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
    for name in ("append", "apply", "select_rows"):
        monkeypatch.setattr(LayerStore, name, poisoned(getattr(LayerStore, name)))
