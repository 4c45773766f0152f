"""Bytes as promised: counted, bounded and really freed."""

import pytest
import torch
import yaml

import kvstrata
from kvstrata.kernels.pages import PAGE

from .runs import GROW, POOLED, PRESETS, feed, kv, prompt, spec, tiny

LAYERS, HEADS, DIM = 3, 2, 16
PAYLOAD = 2 * HEADS * DIM * 4  # one token, one layer, fp32
# two heads with columns of their own, or one that they share
COLUMNS = {
    **dict.fromkeys(("h2o", "scissorhands", "echo-head"), 2 * (4 + 4)),
    **dict.fromkeys(("keynorm", "keydiff", "snapkv", "pyramidkv"), 2 * 4),
    **dict.fromkeys(("confkv", "confkv-l"), 4 + 4),
    **dict.fromkeys(("cam", "cake"), 2 * (4 + 4)),
    "d2o": 2 * (4 + 4 + 4 + 4),
}


def entry(name):
    return PAYLOAD + COLUMNS.get(name, 4)


def storage_bytes(cache):
    """What torch says the cache's tensors own, each storage once."""
    columns = [t for layer in cache.strata.values() for t in layer.store.exact.columns.data.values()]
    waiting = [t for layer in cache.strata.values() if layer.asking for t in (*layer.asking.queries, *layer.asking.lse)]
    tensors = [*columns, *waiting, *(t for arena in cache.engine.arenas for block in arena.blocks for t in block[1:])]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def first_page(cache):
    """Where the first entries of the first layer lie."""
    table = cache.strata[0].store.exact.table
    block = table.arena.block_of(table.pages[0][0])
    return block.k[table.pages[0][0] - block.first].data_ptr()


@pytest.mark.parametrize("name", PRESETS)
def test_a_budget_in_tokens(name):
    with kvstrata.compress(tiny(), spec(name, 24)) as cache:
        feed(tiny(), prompt(300), cache, (300,))
        assert cache.nbytes.live == LAYERS * 24 * entry(name)
        assert cache.nbytes.held <= LAYERS * (24 + PAGE) * entry(name)
        assert storage_bytes(cache) == cache.nbytes.reserved == cache.nbytes.held


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in GROW])
def test_a_share_follows_the_tokens_seen(name):
    with kvstrata.compress(tiny(), spec(name, "25%")) as cache:
        feed(tiny(), prompt(100), cache, (60,))
        assert len(cache.entries(0)) == 25


UNITS = {
    "sequence": ("30KiB", 30 * 1024 / LAYERS),
    "layer": ("9KiB/layer", 9 * 1024),
    "cache": ("48KiB/cache", 8 * 1024),
}


@pytest.mark.parametrize(("budget", "per_layer"), UNITS.values(), ids=UNITS.keys())
@pytest.mark.parametrize("name", PRESETS)
def test_a_budget_in_bytes_binds_live_bytes(name, budget, per_layer):
    """Two rows; the unit says whose bytes they are."""
    with kvstrata.compress(tiny(), spec(name, budget)) as cache:
        tiny()(prompt(200, 2), **kv(cache))
        for _ in range(5):
            live, fits = cache.nbytes.live, int(per_layer // entry(name))
            assert live == LAYERS * 2 * fits * entry(name)
            if name in GROW:
                break
            tiny()(prompt(1, 2), **kv(cache))


def test_a_budget_per_head_is_met_and_freed():
    model = tiny()
    with kvstrata.compress(model, "keynorm:budget=40/8") as cache:
        feed(model, prompt(300, 2), cache, (300,))
        assert cache.report().layers[1].stored == [[40, 8], [40, 8]]
        assert cache.nbytes.live == LAYERS * 2 * (40 + 8) * (2 * DIM * 4 + 4)
        assert storage_bytes(cache) <= LAYERS * 2 * (40 + 8 + 2 * PAGE) * (2 * DIM * 4 + 4)
        assert storage_bytes(cache) < 0.5 * 300 * 2 * LAYERS * PAYLOAD


def test_pooled_heads_share_the_budget_and_free_the_rest(tmp_path):
    path = tmp_path / "pooled.yaml"
    path.write_text(yaml.safe_dump(POOLED))
    model = tiny()
    with kvstrata.compress(model, path) as cache:
        feed(model, prompt(300), cache, (290,))
        lengths = [row[0] for row in (layer.stored for layer in cache.report().layers)]
        assert all(sum(pair) == 24 for pair in lengths)
        assert any(a != b for a, b in lengths)
        assert cache.nbytes.live == LAYERS * 24 * (2 * DIM * 4 + 4)


def test_rows_of_a_padded_batch_are_charged_for_their_own_tokens():
    ids, mask = prompt(200, 2), torch.ones(2, 200, dtype=torch.long)
    mask[0, :190] = 0
    with kvstrata.compress(tiny(), "full") as cache:
        tiny()(ids, attention_mask=mask, **kv(cache))
        assert cache.nbytes.live == LAYERS * 210 * entry("full")
        assert storage_bytes(cache) <= LAYERS * (210 + 2 * PAGE) * entry("full")


def test_the_peak_includes_the_prompt_of_one_layer_but_not_of_all():
    with kvstrata.compress(tiny(), "h2o:budget=20") as cache:
        tiny()(prompt(2000), **kv(cache))
        peak = cache.account.peak
    assert peak.live >= 2000 * entry("h2o")
    assert peak.live <= (2000 + 2 * 20) * entry("h2o")


def test_appending_does_not_copy_the_cache():
    model = tiny()
    with kvstrata.compress(model, "full") as cache:
        model(prompt(500), **kv(cache))
        pointers = set()
        for step in range(100):
            model(prompt(1, seed=step), **kv(cache))
            pointers.add(first_page(cache))
    assert len(pointers) <= 2 + 100 // PAGE


@pytest.mark.parametrize("name", ["h2o", "streaming", "tova"])
def test_a_steady_budget_moves_entries_in_place(name):
    model = tiny()
    with kvstrata.compress(model, spec(name, 256)) as cache:
        model(prompt(500), **kv(cache))
        before = first_page(cache)
        for step in range(150):
            model(prompt(1, seed=step), **kv(cache))
        assert first_page(cache) == before


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operator produced."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("chunks", [(4096,), (2048, 2048)], ids=["one-shot", "chunks"])
@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "tova", "keydiff"])
def test_no_matrix_of_queries_by_keys_is_ever_made(name, chunks):
    model, ids = tiny(), prompt(4096)
    with kvstrata.compress(model, spec(name, "50%")) as cache, Largest() as largest:
        feed(model, ids, cache, chunks)
    assert largest.numel <= 1 << 22 < 4096 * 4096
