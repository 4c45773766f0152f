"""What a draft, a crop or an interruption must not leave behind."""

import types

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvstrata

from .runs import ALL, feed, kv, prompt, spec, stock, tiny


def test_a_long_turn_after_assisted_decoding_is_a_prompt_again():
    model = tiny()
    with kvstrata.compress(model, "snapkv:budget=20,window=4") as cache:
        first = model.generate(prompt(40), **kv(cache), max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3)
        history = torch.cat([first, prompt(100, seed=5)], 1)
        mask = torch.ones_like(history)
        model.generate(history, attention_mask=mask, **kv(cache), max_new_tokens=4, do_sample=False)
        assert len(cache.entries(0)) == 20 + 3
        assert not cache.engine.mode.drafting


def test_transformers_can_end_recording_by_the_attribute_it_uses():
    model = tiny()
    with torch.no_grad(), kvstrata.compress(model, "h2o:budget=12") as cache:
        model(prompt(40), **kv(cache))
        cache.activate_past_recording()
        assert all(layer.record_past for layer in cache.layers)
        model(prompt(3), **kv(cache))
        assert len(cache.entries(0)) == 15
        for layer in cache.layers:
            layer.record_past = False
        assert len(cache.entries(0)) == 12
        model(prompt(3), **kv(cache))
        assert len(cache.entries(0)) == 12


@pytest.mark.parametrize("name", ["tova", "snapkv", "h2o", "confkv", "scissorhands"])
def test_what_is_kept_of_a_prompt_with_drafts_is_bounded(name):
    model = tiny()
    with torch.no_grad(), kvstrata.compress(model, spec(name, 20)) as cache:
        cache.activate_past_recording()
        model(prompt(1200), **kv(cache))
        for layer in cache.strata.values():
            kept = sum(q.untyped_storage().nbytes() for q in layer._pending.queries)
            assert kept <= (64 + {"snapkv": 32, "confkv": 88, "scissorhands": 400}.get(name, 1)) * 4 * 16 * 4
        cache.crop(-3)
        drafted = [cache.entries(layer, 0, head) for layer in range(3) for head in range(2)]
    with torch.no_grad(), kvstrata.compress(model, spec(name, 20)) as plain:
        model(prompt(1197), **kv(plain))
        assert drafted == [plain.entries(layer, 0, head) for layer in range(3) for head in range(2)]


def test_what_is_kept_of_a_prompt_in_parts_is_bounded():
    model, ids = tiny(), prompt(600)
    with torch.no_grad(), kvstrata.compress(model, "snapkv:budget=20,window=4") as cache, cache.prefilling():
        for start in (0, 300):
            model(ids[:, start : start + 300], **kv(cache))
            queries = cache.strata[1]._pending.queries[0]
            assert queries.untyped_storage().nbytes() == 4 * 4 * 16 * 4


def test_crop_inside_prefilling_is_refused_and_changes_nothing():
    with torch.no_grad(), kvstrata.compress(tiny(), "snapkv:budget=20") as cache, cache.prefilling():
        tiny()(prompt(40), **kv(cache))
        with pytest.raises(kvstrata.InputError, match="end it first"):
            cache.crop(-3)
        assert cache.get_seq_length() == 40


def test_recording_that_begins_while_a_step_waits_for_its_logits():
    model = tiny()
    with torch.no_grad(), kvstrata.compress(model, "confkv:high=7,low=14,recent=3") as cache:
        model.model(prompt(40), **kv(cache))
        cache.activate_past_recording()
        cache.crop(-2)
        assert [layer.columns_fed for layer in cache.strata.values()] == [38] * 3
        assert len(cache.entries(0)) <= 14


def test_a_draft_of_more_than_a_verdict_can_take_back_is_taken_first():
    model = tiny()
    with torch.no_grad(), kvstrata.compress(model, "h2o:budget=20") as cache:
        cache.activate_past_recording()
        model(prompt(120), **kv(cache))
        cache.crop(-70)
        assert cache.get_seq_length() == 50
        assert max(cache.entries(0)) < 50


def test_a_forward_that_was_interrupted_half_way_is_noticed():
    model = tiny()
    layer = model.model.layers[1]
    with torch.no_grad(), kvstrata.compress(model, "h2o:budget=12") as cache:
        model(prompt(30), **kv(cache))
        hook = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            model(prompt(1), **kv(cache))
        hook.remove()
        with pytest.raises(kvstrata.InputError, match=r"interrupted half-way.*reset"):
            model(prompt(1), **kv(cache))
        cache.reset()
        model(prompt(30), **kv(cache))


def test_a_mask_of_the_new_tokens_alone_is_refused():
    model, ids = tiny(), prompt(40)
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[0, 0] = 0
    with torch.no_grad(), kvstrata.compress(model, "full") as cache:
        model(ids[:, :30], **kv(cache))
        with pytest.raises(kvstrata.InputError, match="past ones included"):
            model(ids[:, 30:], attention_mask=mask, **kv(cache))


def test_an_implementation_that_reads_its_own_name_finds_it():
    """As flash attention does: it looks up the config of the module it is given."""
    found = []

    def reads_its_name(module, *args, **kwargs):
        found.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("reads-its-name", reads_its_name)
    model = tiny("qwen2")
    model.config._attn_implementation = "reads-its-name"
    try:
        with torch.no_grad(), kvstrata.compress(model, "h2o"):
            model(prompt(5), use_cache=False)  # it has no mask function either
        AttentionMaskInterface.register("reads-its-name", sdpa_mask)
        with torch.no_grad(), kvstrata.compress(model, "h2o"):
            model(prompt(5), use_cache=False)
    finally:
        model.config._attn_implementation = "sdpa"
    assert found == ["reads-its-name"] * 6


@pytest.mark.parametrize("name", ALL)
def test_all_of_it_is_all_of_it(name):
    """A budget of 100% keeps everything, whatever the budget depends on."""
    text = name if name == "full" else f"{name}:budget=100%" + (",tau=0.16" if name.startswith("confkv") else "")
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, text) as cache:
        got = feed(model, ids, cache, (50,))
    assert all(cache.entries(layer) == list(range(60)) for layer in range(3))
    expected = feed(model, ids, stock(model), (50,))
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_confkv_that_contradicts_itself_is_refused():
    for text, message in [
        ("confkv:high=64,budget=100", "not both"),
        ("confkv:high=256,low=128", "need fewer"),
    ]:
        with pytest.raises(kvstrata.SpecError, match=message), kvstrata.compress(tiny(), text):
            pass


def test_cached_results_of_a_policy_are_its_own():
    """The only memory outside a cache object is of pure functions."""
    module = __import__("kvstrata.policy.allocation", fromlist=["_falling_shares"])
    assert isinstance(module._falling_shares.__wrapped__, types.FunctionType)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["qevict:budget=40%,decay=0.95", "h2o:budget=1000,codec=int8"])
def test_sums_of_drafts_are_those_of_the_tokens_that_stay(policy):
    """A prompt, and in coded tiers another one, with drafts that are taken back."""
    model, ids = tiny(), prompt(500)
    columns = []
    for drafts in (5, 0):
        with kvstrata.compress(model, policy) as cache:
            model(ids[:, :300], **kv(cache))
            cache.activate_past_recording()
            model(ids[:, 300 : 400 + drafts], **kv(cache))
            cache.crop(-drafts)
            columns.append([layer.store.column("mass") for layer in cache.strata.values()])
    for left, plain in zip(*columns, strict=True):
        assert torch.allclose(left, plain, atol=1e-5)


@torch.no_grad()
def test_a_first_prompt_s_decaying_sums_are_those_of_the_tokens_that_stay():
    model, ids, columns = tiny(), prompt(205), []
    for drafts in (5, 0):
        with kvstrata.compress(model, "qevict:budget=40%,decay=0.95") as cache:
            cache.activate_past_recording()
            model(ids[:, : 200 + drafts], **kv(cache))
            cache.crop(-drafts)
            columns.append([cache.entries(layer) for layer in range(3)])
            columns.append([layer.store.column("mass") for layer in cache.strata.values()])
    assert columns[0] == columns[2]
    for left, plain in zip(columns[1], columns[3], strict=True):
        assert torch.allclose(left, plain, atol=1e-5)


@torch.no_grad()
def test_a_cache_can_be_saved_after_assisted_decoding(tmp_path):
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=20") as cache:
        model.generate(prompt(40), **kv(cache), max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3)
        cache.save(tmp_path / "saved")
        with kvstrata.compress(model, "h2o:budget=20") as other:
            other.load(tmp_path / "saved")
            assert other.entries(0) == cache.entries(0)
