"""Coded tiers under any policy, through the model: bytes, logits, and what happens to rows and rollbacks."""

import copy

import pytest
import torch

import kvstrata

from .runs import kv, prompt, tiny

POLICIES = [
    "full:codec={}",
    "h2o:budget=200,codec={},exact=32",
    "snapkv:budget=60%,codec={}",
    "window:budget=220,codec={}",
]
CODECS = ["int8", "int4", "int2"]


@torch.no_grad()
def run(policy, ids, prompt_tokens, kernels="auto"):
    """Logits of every step after the prompt, and the cache."""
    with kvstrata.compress(tiny(), policy, kernels=kernels) as cache:
        logits = [tiny()(ids[:, :prompt_tokens], **kv(cache)).logits[:, -1]]
        logits += [tiny()(ids[:, i : i + 1], **kv(cache)).logits[:, -1] for i in range(prompt_tokens, ids.shape[1])]
        return torch.stack(logits), cache


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thin(12)
def test_native_kernels_and_torch_agree(policy, codec):
    ids = prompt(330, 2)
    ours, cache = run(policy.format(codec), ids, 300, "native")
    theirs, other = run(policy.format(codec), ids, 300, "reference")
    assert sum(layer.tiers[codec] for layer in cache.report().layers) > 0
    assert cache.nbytes.live == other.nbytes.live
    if policy.startswith(("full", "window")):  # elsewhere rounding may choose another entry
        assert torch.allclose(ours, theirs, atol=2e-2 * theirs.abs().max().item())


def test_eight_bits_change_little_and_save_bytes():
    ids = prompt(380)
    full, plain = run("full", ids, 300)
    coded, cache = run("full:codec=int8", ids, 300)
    assert (coded - full).abs().max() < 0.05 * full.abs().max()
    tiers = cache.report().layers[0].tiers
    assert tiers == {"exact": 188, "int8": 192}
    entry, grids = 2 * 2 * 16, 2 * (16 + 16) * 4  # two heads of 16 numbers; scales of a page
    assert plain.nbytes.live == 3 * 380 * (4 * entry + 4)
    assert cache.nbytes.live == 3 * (188 * (4 * entry + 4) + 192 * (entry + 4) + 3 * grids)
    assert len(cache.entries(0)) == 380


@torch.no_grad()
def test_rows_may_be_repeated_and_dropped_apart():
    ids = prompt(300)
    with kvstrata.compress(tiny(), "h2o:budget=200,codec=int8,exact=32,room=1") as cache:
        tiny()(ids, **kv(cache))
        before = cache.nbytes.held
        cache.batch_repeat_interleave(3)
        assert cache.nbytes.held < 1.2 * before, "copies share pages"
        logits = tiny()(prompt(1).expand(3, 1), **kv(cache)).logits
        assert torch.equal(logits[0], logits[2])
        for seed in range(80):
            tiny()(prompt(1, 3, seed=seed), **kv(cache))
        apart = [cache.entries(1, row) for row in range(3)]
        assert all(len(entries) == 200 for entries in apart)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert [cache.entries(1, row) for row in range(3)] == [apart[2], apart[0], apart[0]]


@torch.no_grad()
def test_a_crop_reaches_into_coded_pages():
    ids = prompt(300)
    with kvstrata.compress(tiny(), "full:codec=int8,exact=16") as cache:
        tiny()(ids, **kv(cache))
        cache.crop(-100)
        assert cache.entries(0) == list(range(200))
        again = copy.deepcopy(cache)
        logits = tiny()(ids[:, 200:201], **kv(cache)).logits
    whole, _ = run("full", ids[:, :201], 200)
    assert (logits[:, -1] - whole[-1]).abs().max() < 0.05 * whole.abs().max()
    assert again.entries(2) == list(range(200))
