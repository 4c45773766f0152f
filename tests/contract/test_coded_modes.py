"""The cache contract over coded tiers: pads, chunks, turns, generate's modes, and drafts that are taken back.

With torch's kernels, which sum in the same order whatever the batch; native ones round probabilities over codes.
"""

import copy

import pytest
import torch

import kvstrata

from .runs import feed, kv, prompt, tiny

CODED = {
    "qevict": "qevict:budget=35%,recent=8",
    "heads": "qevict:budget=35%,recent=8,heads=each,code=k2v2",
    "confkv": "confkv:high=40,low=80,recent=4,tau=0.31,window=8",
    "plus": "confkv+:high=40,low=80,tau=0.31,window=8,room=4",
    "pages": "h2o:budget=70%,codec=int8,exact=16",
    "before": "full:codec=int4,group=8,key_space=pre,exact=16",
    "turned": "tova:budget=60%,codec=k4v2,exact=8,corrected=yes",
}
each = pytest.mark.parametrize("policy", CODED.values(), ids=CODED)
LONG = ("plus", "before", "turned")  # whose kinds of tiers the others have too
some = pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=pytest.mark.slow if n in LONG else ()) for n, p in CODED.items()], ids=CODED
)


def stored(cache, row):
    return [(layer.entries(row), layer.store.lengths()[row]) for layer in cache.strata.values()]


@torch.no_grad()
@some
def test_a_padded_row_is_what_it_is_alone(policy):
    long, short = prompt(190), prompt(150, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 40, dtype=torch.long), short], dim=1)])
    mask = (torch.arange(190)[None] >= torch.tensor([[0], [40]])).long()
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        both = feed(tiny(), ids, cache, [160], mask)
        kept = [stored(cache, row) for row in range(2)]
    for row, own in enumerate((long, short)):
        with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
            alone = feed(tiny(), own, cache, [own.shape[1] - 30])
            assert stored(cache, 0) == kept[row]
        # a code may round either way where keys differ in their last bit
        assert (both[row, -29:] - alone[0, -29:]).abs().max() < 1e-2 * alone.abs().max()


@torch.no_grad()
@each
@pytest.mark.thin(2)
def test_a_prompt_in_parts_is_the_prompt_at_once(policy):
    ids = prompt(180)
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        whole = feed(tiny(), ids, cache, [150])
        kept = stored(cache, 0)
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        with cache.prefilling():
            for start in range(0, 150, 50):
                tiny()(ids[:, start : start + 50], **kv(cache))
        parts = [tiny()(ids[:, i : i + 1], **kv(cache)).logits for i in range(150, 180)]
        assert stored(cache, 0) == kept
    assert torch.allclose(torch.cat(parts, dim=1), whole[:, 150:], atol=1e-3)


@torch.no_grad()
@some
def test_chunks_turns_and_generate_run(policy):
    ids = prompt(160, 2)
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        feed(tiny(), ids, cache, [60, 60, 20])
        turn = torch.cat([ids, prompt(40, 2, seed=5)], dim=1)
        out = tiny().generate(turn, **kv(cache), max_new_tokens=6, do_sample=False)
        assert out.shape == (2, 206)
        assert cache.get_seq_length() == 205
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
            rows = 2 * options.get("num_return_sequences", 1)
            assert tiny().generate(ids, **kv(cache), max_new_tokens=6, **options).shape == (rows, 166)


@torch.no_grad()
@some
def test_every_beam_is_a_run_that_never_branched(policy):
    ids = prompt(130)
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        tiny()(ids, **kv(cache))
        cache.batch_repeat_interleave(3)
        tokens = prompt(10, 3, seed=7)
        logits = feed(tiny(), tokens, cache, [])
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        after = tiny()(prompt(1, 1, seed=8).expand(3, 1), **kv(cache)).logits
    for row, came in ((0, 2), (1, 2), (2, 0)):
        with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
            tiny()(ids, **kv(cache))
            alone = feed(tiny(), tokens[came : came + 1], cache, [])
            assert torch.allclose(logits[came : came + 1], alone, atol=1e-4)
            end = tiny()(prompt(1, 1, seed=8), **kv(cache)).logits
            assert torch.allclose(after[row : row + 1], end, atol=1e-4)


@torch.no_grad()
@each
@pytest.mark.parametrize("rejected", [5, 2])
@pytest.mark.thin(2)
def test_a_draft_that_is_taken_back_leaves_no_trace(policy, rejected):
    ids, drafts = prompt(150), prompt(5, seed=11)
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        feed(tiny(), ids, cache, [140])
        twin = copy.deepcopy(cache)
        cache.activate_past_recording()
        tiny()(drafts, **kv(cache))
        cache.crop(-rejected)
        cache.layers[0].record_past = False
        if rejected == 5:
            assert stored(cache, 0) == stored(twin, 0)
            assert cache.nbytes.live == twin.nbytes.live
        else:  # the first three were taken
            assert cache.get_seq_length() == 153
        going = feed(tiny(), prompt(20, seed=12), cache, [])
        if rejected == 5:
            assert torch.allclose(going, feed(tiny(), prompt(20, seed=12), twin, []), atol=1e-4)


@torch.no_grad()
@each
def test_reset_frees_codes_too(policy):
    with kvstrata.compress(tiny(), policy, kernels="reference") as cache:
        first = feed(tiny(), prompt(160), cache, [150])
        cache.reset()
        assert cache.nbytes.reserved == 0
        assert torch.equal(feed(tiny(), prompt(160), cache, [150]), first)
