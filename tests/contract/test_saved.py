"""Forks and files: a copy goes on as the original would, shares memory until it is written; nothing is half-read."""

import copy
import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvstrata
from kvstrata.core import InputError
from kvstrata.hf.files import NUMBERS

from .runs import kv, prompt, spec, tiny

CODED = (
    "qevict:budget=30%,recent=8,window=4",
    "qevict:budget=30%,recent=8,heads=each,code=k2v2",
    "confkv:high=40,low=80,recent=4,tau=0.31,window=8,band=0.01,dwell=2",
    "full:codec=int8,exact=16",
    "full:codec=int4,group=8,key_space=pre,exact=16",
    "h2o:budget=60%,codec=k4v2,exact=8",
    "cam:budget=50%",
    "d2o:budget=50%",
    "cake:budget=50%",
)
POLICIES = [*(spec(name, "50%") for name in ("full", "h2o", "snapkv", "keydiff", "confkv")), *CODED]


@torch.no_grad()
def feed(cache, ids, start, stop):
    steps = [tiny()(ids[:, i : i + 1], **kv(cache)).logits[:, -1] for i in range(start, stop)]
    return torch.stack(steps)


def state(cache):
    return [(layer.entries(row), layer.store.tiers()) for layer in cache.strata.values() for row in range(2)]


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thin(2)
def test_a_saved_cache_goes_on_where_it_was(policy, tmp_path):
    ids = prompt(150, 2)
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(ids[:, :120], **kv(cache))
        feed(cache, ids, 120, 130)
        cache.save(tmp_path / "saved")
        before, held = state(cache), cache.nbytes.live
        expected = feed(cache, ids, 130, 150)
        with kvstrata.compress(tiny(), policy) as other:
            other.load(tmp_path / "saved")
            assert state(other) == before
            assert other.nbytes.live == held
            assert torch.allclose(feed(other, ids, 130, 150), expected, atol=1e-5)
            assert state(other) == state(cache)
            assert other.report().layers[0].evicted == cache.report().layers[0].evicted


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thin(2)
def test_a_fork_shares_memory_and_goes_its_own_way(policy):
    ids, other_ids = prompt(150, 2), prompt(150, 2, seed=9)
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(ids[:, :120], **kv(cache))
        feed(cache, ids, 120, 130)
        plain = copy.deepcopy(cache)  # with memory of its own
        arenas = [b for arena in cache.engine.arenas for b in arena.blocks]
        fork = cache.fork()
        assert [b for arena in cache.engine.arenas for b in arena.blocks] == arenas, "nothing was copied"
        assert state(fork) == state(cache)
        there = feed(fork, other_ids, 130, 150)
        here = feed(cache, ids, 130, 150)
        assert not torch.allclose(there, here, atol=1e-3)
        again = plain.fork()
        assert torch.equal(feed(plain, ids, 130, 150), here)
        assert torch.equal(feed(again, other_ids, 130, 150), there)
        assert state(again) == state(fork)
        reserved = cache.nbytes.reserved
        del fork
        gc.collect()
        assert cache.nbytes.reserved <= reserved
        cache.reset()
        assert not any(arena.blocks for arena in cache.engine.arenas), "pages of a fork that is gone are free"


@torch.no_grad()
def test_a_fork_learns_of_logits_and_closes_with_its_block():
    ids = prompt(60)
    with kvstrata.compress(tiny(), "confkv:high=8,low=16,recent=2,tau=0.31") as cache:
        tiny()(ids[:, :40], **kv(cache))
        fork = cache.fork()
        feed(fork, ids, 40, 60)
        assert fork.confidence is not None
        assert fork.report().layers[0].no_logits == 0
    with pytest.raises(kvstrata.core.KvstrataError, match="block has ended"):
        tiny()(ids[:, :1], **kv(fork))


@torch.no_grad()
@pytest.mark.parametrize("policy", ["h2o:budget=40", "full:codec=int8,exact=16"])
def test_forks_may_run_in_threads(policy):
    """Forks share pages until they write; each must go on as it would alone."""
    model, ids = tiny(), prompt(240)
    more = [prompt(60, seed=seed) for seed in range(4)]
    with kvstrata.compress(model, policy) as cache:
        model(ids[:, :200], **kv(cache))

        def go(fork, tokens):
            with torch.no_grad():
                parts = [model(tokens[:, i : i + 1], **kv(fork)).logits for i in range(tokens.shape[1])]
            return torch.cat(parts, dim=1)

        alone = [go(cache.fork(), tokens) for tokens in more]
        forks = [cache.fork() for _ in more]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with ThreadPoolExecutor(len(more)) as pool:
                together = list(pool.map(go, forks, more))
        finally:
            sys.setswitchinterval(before)
        for one, other in zip(alone, together, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@torch.no_grad()
def test_what_cannot_be_saved_or_loaded_is_refused_and_changes_nothing(tmp_path):
    ids = prompt(60)
    with kvstrata.compress(tiny(), "h2o:budget=50%") as cache:
        tiny()(ids, **kv(cache))
        folder = cache.save(tmp_path / "saved")
        with pytest.raises(InputError, match="only an empty cache"):
            cache.load(folder)
        cache.activate_past_recording()
        tiny()(ids[:, :3], **kv(cache))
        with pytest.raises(InputError, match="waits"):
            cache.save(tmp_path / "other")
        assert not (tmp_path / "other").exists()
    with kvstrata.compress(tiny(), "h2o:budget=40%") as cache, pytest.raises(InputError, match="another policy"):
        cache.load(folder)
    with kvstrata.compress(tiny("qwen2"), "h2o:budget=50%") as cache, pytest.raises(InputError, match="another model"):
        cache.load(folder)
    half = tiny(dtype=torch.bfloat16)
    with kvstrata.compress(half, "h2o:budget=50%") as cache, pytest.raises(InputError, match="another model"):
        cache.load(folder)
    with kvstrata.compress(tiny(), "h2o:budget=50%") as cache:
        with pytest.raises(InputError, match="no saved cache"):
            cache.load(tmp_path / "nowhere")
        [tensors] = folder.glob("*.safetensors")
        whole = tensors.read_bytes()
        tensors.write_bytes(whole[:-9])
        with pytest.raises(InputError, match="save it again"):
            cache.load(folder)
        tensors.write_bytes(whole)
        numbers = json.loads((folder / NUMBERS).read_text())
        (folder / NUMBERS).write_text(json.dumps({**numbers, "format": 99}))
        with pytest.raises(InputError, match="format 99"):
            cache.load(folder)
        del (broken := json.loads(json.dumps(numbers)))["layers"]["2"]["store"]["counts"]
        (folder / NUMBERS).write_text(json.dumps(broken))
        with pytest.raises(InputError, match="damaged"):
            cache.load(folder)
        assert cache.get_seq_length() == 0
        (folder / NUMBERS).write_text(json.dumps(numbers)[:-20])
        with pytest.raises(InputError, match="no saved cache"):
            cache.load(folder)
        assert cache.get_seq_length() == 0
        (folder / NUMBERS).write_text(json.dumps(numbers))
        cache.load(folder)
        assert cache.get_seq_length() == 60
