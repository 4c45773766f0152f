"""QEvict through a model: bytes at every step, windows that come and go whole, what it is without its coded tier."""

import copy
from itertools import pairwise

import pytest
import torch

import kvstrata
from kvstrata.core import InputError, SpecError, UnsupportedModelError

from .families import family
from .runs import kv, prompt, tiny

OPTIONS = ["", ",split=0.7", ",split=0", ",code=k2v2", ",code=k4v2,window=16", ",window=32,every=16", ",heads=each"]
CASES = [("10%", ""), ("50%", ""), ("10%", ",window=32,every=16"), *(("20%", options) for options in OPTIONS)]


@torch.no_grad()
def walk(policy, ids, prompt_tokens, kernels="auto", model=None):
    """Feed step by step and yield the cache after every step, the prompt's first."""
    model = model or tiny()
    with kvstrata.compress(model, policy, kernels=kernels) as cache:
        model(ids[:, :prompt_tokens], **kv(cache))
        yield cache
        for i in range(prompt_tokens, ids.shape[1]):
            model(ids[:, i : i + 1], **kv(cache))
            yield cache


@pytest.mark.parametrize(("budget", "options"), CASES)
@pytest.mark.thin(4)
def test_bytes_hold_at_every_one_of_500_steps(budget, options):
    """Grids, columns, frames and sleeping codes included; the bytes are a share of what the full cache would have."""
    ids = prompt(1100, 1)
    coded = woken = overruns = 0
    steps = 500 if (budget, options) == ("20%", "") else 120
    for cache in walk(f"qevict:budget={budget}{options}", ids[:, : 600 + steps], 600):
        allowed = float(budget.rstrip("%")) / 100 * cache.report().full
        overruns = cache.report().layers[0].overruns
        assert cache.nbytes.live <= allowed or overruns
        for layer in cache.strata.values():
            coded += any(any(tier.active) for tier in layer.store.coded.values())
            woken += any(any(tier.dormant) for tier in layer.store.coded.values())
    assert bool(overruns) == ("window=32" in options and budget == "10%"), "which has no room for a window"
    assert (coded > 0) == (options != ",split=0" and not overruns)
    if not options:
        assert woken > 0, "windows must have come back, or the hard part was not walked"


def test_the_protected_part_stays_when_the_budget_is_too_small():
    ids = prompt(140)
    *_, cache = walk("qevict:budget=5%,sinks=5,recent=32", ids, 100)
    seen = ids.shape[1]
    kept = cache.entries(0)
    assert kept[:5] == list(range(5))
    assert kept[-32:] == list(range(seen - 32, seen))
    assert cache.report().layers[0].overruns > 0


def test_a_planned_total_gives_its_bytes_from_the_start():
    ids, budgets = prompt(340), []
    for cache in walk("qevict:budget=25%,total=600,sinks=5,recent=16", ids, 300):
        each = cache.report().full / sum(cache.strata[0].seen)
        budgets.append(cache.nbytes.live / (0.25 * 600 * each))
    assert max(budgets) <= 1
    assert budgets[0] > 0.85, "half of the prompt, which a quarter of what was seen would not have held"


def test_windows_come_and_go_whole():
    ids = prompt(400)
    for cache in walk("qevict:budget=25%,sinks=5,recent=16", ids, 300):
        for layer in range(3):
            kept = [p - 5 for p in cache.entries(layer) if p >= 5]
            local = cache.strata[layer].seen[0] - 5 - 16 - 8 - 7  # what is surely outside the newest tokens
            numbers = [p // 8 for p in kept if p // 8 * 8 + 8 <= local]
            assert all(numbers.count(n) == 8 for n in set(numbers))


@torch.no_grad()
def test_scores_of_routing_steps_alone_change_at_those_alone():
    sums = []
    for cache in walk("qevict:budget=30%,score=routing-only", prompt(330), 300):
        layer = cache.strata[1]
        total = layer.store.column("mass")[layer.store.valid()].sum()
        sums.append((layer.acted == layer.columns_fed, float(total), sum(map(sum, layer.store.lengths()))))
    for (_, before, held), (acted, after, now) in pairwise(sums):
        assert acted or (after == pytest.approx(before) and now == held + 1)
    assert sum(acted for acted, *_ in sums) == 1 + 30 // 8
    plain = [cache.strata[1].store.column("mass").sum() for cache in walk("qevict:budget=30%", prompt(330), 300)]
    assert float(plain[5] - plain[0]) == pytest.approx(5, abs=0.1), "every query gives one"


def test_without_the_coded_tier_it_is_eviction_of_windows():
    ids = prompt(330)
    *_, plain = walk("qevict:budget=25%,split=0", ids, 300)
    assert plain.report().layers[0].tiers.keys() == {"exact"}
    *_, coded = walk("qevict:budget=25%", ids, 300)
    assert len(coded.entries(0)) > len(plain.entries(0))
    assert coded.nbytes.live < 1.1 * plain.nbytes.live


def test_a_budget_that_holds_everything_codes_nothing():
    ids = prompt(330)
    with kvstrata.compress(tiny(), "full", kernels="exact") as cache, torch.no_grad():
        expected = tiny()(ids, **kv(cache)).logits
    with kvstrata.compress(tiny(), "qevict:budget=150", kernels="exact") as cache, torch.no_grad():
        logits = tiny()(ids[:, :100], **kv(cache)).logits
    assert torch.equal(logits, expected[:, :100]) or torch.allclose(logits, expected[:, :100], atol=1e-5)
    assert cache.report().layers[0].tiers == {"exact": 100}


@pytest.mark.parametrize("options", ["", ",heads=each", ",code=k2v2", ",code=int8,window=64"])
def test_native_kernels_and_torch_agree(options):
    ids = prompt(360)
    policy = f"qevict:budget=30%,recent=16{options}"
    ours = list(walk(policy, ids, 300, "native"))[-1]
    theirs = list(walk(policy, ids, 300, "reference"))[-1]
    assert ours.nbytes.live == theirs.nbytes.live
    same = sum(ours.entries(layer) == theirs.entries(layer) for layer in range(3))
    assert same >= 2  # a near tie may fall either way once


@torch.no_grad()
def test_a_batch_of_two_is_two_batches_of_one():
    ids = torch.cat([prompt(340, seed=1), prompt(340, seed=2)])
    *_, both = walk("qevict:budget=20%", ids, 300)
    for row in range(2):
        *_, one = walk("qevict:budget=20%", ids[row : row + 1], 300)
        assert both.entries(1, row) == one.entries(1)


@torch.no_grad()
def test_a_crop_opens_coded_windows():
    """What is left of a window becomes exact copies of its codes, and codes are freed."""
    ids = prompt(400)
    with kvstrata.compress(tiny(), "full:codec=int4,group=8,exact=16") as cache:
        tiny()(ids, **kv(cache))
        before = cache.report().layers[0].tiers
        assert before["int4"] == 384
        cache.crop(-103)
        tiers = cache.report().layers[0].tiers
        assert cache.entries(0) == list(range(297))
        assert tiers["int4"] == 296
        assert tiers["exact"] == 1
        again = copy.deepcopy(cache)
        logits = tiny()(ids[:, 297:298], **kv(cache)).logits
        assert logits.isfinite().all()
    assert again.entries(2) == list(range(297))


@torch.no_grad()
def test_rows_beams_and_reset():
    with kvstrata.compress(tiny(), "qevict:budget=25%") as cache:
        tiny()(prompt(300), **kv(cache))
        held = cache.nbytes.held
        cache.batch_repeat_interleave(3)
        assert cache.nbytes.held < 1.3 * held, "copies share pages"
        for seed in range(20):
            tiny()(prompt(1, 3, seed=seed), **kv(cache))
        apart = [cache.entries(1, row) for row in range(3)]
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert [cache.entries(1, row) for row in range(3)] == [apart[2], apart[0], apart[0]]
        cache.reset()
        assert cache.nbytes.held == 0
        tiny()(prompt(200), **kv(cache))
        assert cache.nbytes.live <= 0.25 * cache.report().full


def test_keys_before_rotary_positions_need_a_rotation_that_can_be_undone():
    ids = prompt(340)
    *_, cache = walk("qevict:budget=25%,keys=pre", ids, 300)
    assert cache.report().layers[0].tiers["int2"] > 0
    with pytest.raises(UnsupportedModelError, match="before rotary"):
        list(walk("qevict:keys=pre", ids, 100, model=family("gpt2")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("qevict:split=1.5", "between 0 and 1"),
        ("qevict:window=12", "group=12"),
        ("qevict:margin=-1", "0 or more"),
        ("qevict:every=0", "at least one"),
        ("qevict:budget=64,total=500", "budget=64 is none"),
        ("h2o:codec=int4,group=8", "only dropped together"),
        ("h2o:codec=int8,group=8", "leave it out"),
        ("full:codec=int8,key_space=pre", "leave it out"),
        ("qevict:corrected=yes", "is for rot4, k4v2 and k2v2"),
        ("confkv:window=0", "1 or more"),
    ],
)
def test_options_that_cannot_work(text, message):
    with pytest.raises((SpecError, InputError), match=message):
        kvstrata.compress(tiny(), text).__enter__()


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("policy", ["qevict:budget=30%,window=4", "qevict:budget=40%,code=k2v2", "int8"])
def test_one_key_value_head_in_one_row(policy, kernels):
    """Multi-query attention: what is coded stands first in the only rectangle there is, and mass must find its way."""
    config = tiny().config.__class__(**{**tiny().config.to_dict(), "num_key_value_heads": 1})
    model = tiny().__class__(config).eval()
    ids = prompt(300)
    for cache in walk(policy, ids[:, :230], 200, kernels, model):
        mass = cache.strata[0].store.column("mass") if policy != "int8" else torch.zeros(1)
        assert mass.isfinite().all()
    with kvstrata.compress(model, policy, kernels=kernels) as cache:
        model(ids[:, :200], **kv(cache))
        logits = model(ids[:, 200:240], **kv(cache)).logits  # a turn: not by pages
        total = sum(n for row in cache.strata[0].store.lengths() for n in row)
    assert logits.isfinite().all()
    assert total <= 240


def test_windows_of_a_page_come_back_too():
    ids = prompt(900)
    woken = 0
    for cache in walk("qevict:budget=40%,window=64,every=16,recent=64", ids[:, :760], 700):
        assert cache.nbytes.live <= 0.4 * cache.report().full or cache.report().layers[0].overruns
        woken += sum(any(tier.dormant) for layer in cache.strata.values() for tier in layer.store.coded.values())
    assert any(layer.tiers.get("int2", 0) for layer in cache.report().layers)


@pytest.mark.parametrize("length", [20, 22, 25])
def test_windows_stay_where_they_are_while_sinks_become_more(length):
    for _ in walk("qevict:budget=50%,every=2,window=4,recent=4,split=0.8", prompt(60), length):
        pass


@torch.no_grad()
def test_what_is_coded_in_a_prompt_stays_so_under_a_rule_without_codes(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        'layers:\n  0-: {prefill: "h2o:budget=200,codec=int8-running,exact=32", decode: "h2o:budget=200"}\n'
    )
    ids = prompt(320)
    with kvstrata.compress(tiny(), path) as cache:
        tiny()(ids[:, :300], **kv(cache))
        before = cache.report().layers[0].tiers
        tiny()(ids[:, 300:301], **kv(cache))
        after = cache.report().layers[0].tiers
    assert after["int8"] >= before["int8"] - 2
    assert after["exact"] <= before["exact"] + 2


@pytest.mark.parametrize("text", ["qevict:codec=int8", "int8:codec=int4", "kivi:codec=int8"])
def test_policies_that_code_in_a_way_of_their_own_take_no_codec(text):
    with pytest.raises(SpecError, match="way of its own"):
        kvstrata.compress(tiny(), text).__enter__()
