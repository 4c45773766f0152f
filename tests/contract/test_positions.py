"""Positions go on after eviction, turns feed only what is new, chunks stay within budget + chunk."""

import pytest
import torch

import kvstrata

from .runs import ALL, GROW, PRESETS, feed, kv, prompt, spec, tiny


class Spy:
    """Records the ids fed to the model and the positions they were rotated at."""

    def __init__(self, model):
        self.ids, self.positions = [], []
        base = model.model
        self._hooks = [
            base.embed_tokens.register_forward_pre_hook(lambda _, args: self.ids.append(args[0].shape[1])),
            base.rotary_emb.register_forward_pre_hook(self._rotary, with_kwargs=True),
        ]

    def _rotary(self, _, args, kwargs):
        self.positions += kwargs["position_ids"][0].tolist()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("name", ALL)
def test_positions_continue_in_generate(name):
    with kvstrata.compress(tiny(), spec(name, 20)) as cache, Spy(tiny()) as spy:
        tiny().generate(prompt(40), **kv(cache), max_new_tokens=6, do_sample=False)
    assert spy.positions == list(range(45))


@pytest.mark.parametrize("name", ALL)
def test_positions_continue_in_a_hand_loop_without_position_ids(name):
    with kvstrata.compress(tiny(), spec(name, 20)) as cache, Spy(tiny()) as spy:
        feed(tiny(), prompt(45), cache, (40,))
    assert spy.positions == list(range(45))


@pytest.mark.parametrize("name", ALL)
def test_a_second_turn_feeds_only_new_ids(name):
    model = tiny()
    with kvstrata.compress(model, spec(name, 20)) as cache, Spy(model) as spy:
        first = model.generate(prompt(40), **kv(cache), max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == 43
        history = torch.cat([first, prompt(6, seed=9)], dim=1)
        # generate would take a token that happens to be the pad token for a pad
        mask = torch.ones_like(history)
        model.generate(history, attention_mask=mask, **kv(cache), max_new_tokens=3, do_sample=False)
    assert spy.ids == [40, 1, 1, 1, 7, 1, 1]
    assert spy.positions == list(range(52))
    assert cache.entries(0)[-1] == 51


def test_two_turns_equal_one_long_run_at_full_budget():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=10000") as cache:
        first = model.generate(prompt(40), **kv(cache), max_new_tokens=4, do_sample=False)
        history = torch.cat([first, prompt(6, seed=9)], dim=1)
        second = model.generate(history, **kv(cache), max_new_tokens=5, do_sample=False)
    assert torch.equal(second, model.generate(history, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("chunk", [7, 16, 17, 40])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.thin(2)
def test_chunked_prefill_never_stores_more_than_budget_and_chunk(name, chunk):
    model, ids, budget = tiny(), prompt(120), 20
    most = 0
    with kvstrata.compress(model, spec(name, budget)) as cache:
        store, stage = cache.strata[1].store, cache.strata[1].store.stage

        def watch(*args):
            nonlocal most
            stage(*args)
            most = max(most, store.longest)

        store.stage = watch
        feed(model, ids, cache, [chunk] * (120 // chunk))
        # up to 16 tokens at once are decode steps, where a policy for the prompt alone lets the cache grow
        grows = name in GROW and chunk <= 16
        decoded = 120 - chunk if grows else (120 % chunk if name in GROW else 0)
        assert budget < most <= budget + chunk + decoded
        assert store.lengths()[0][0] == (min(budget, chunk) if grows else budget) + decoded


@pytest.mark.parametrize("name", ["window", "streaming"])
def test_what_depends_on_positions_alone_is_the_same_in_chunks(name):
    kept = []
    for chunks in [(90,), (45, 45), (30, 30, 30)]:
        with kvstrata.compress(tiny(), spec(name, 20)) as cache:
            feed(tiny(), prompt(90), cache, chunks)
            kept.append(cache.entries(2))
    assert kept[0] == kept[1] == kept[2]


def test_prefill_chunk_size_of_generate():
    with kvstrata.compress(tiny(), "streaming:budget=20") as cache:
        tiny().generate(prompt(40), **kv(cache), max_new_tokens=2, do_sample=False, prefill_chunk_size=20)
    assert cache.entries(0) == [0, 1, 2, 3, *range(25, 41)]


@pytest.mark.parametrize("name", ALL)
def test_prefill_chunk_size_of_generate_is_feeding_in_chunks(name):
    model = tiny()
    with kvstrata.compress(model, spec(name, 14)) as cache:
        out = model.generate(prompt(40), **kv(cache), max_new_tokens=6, do_sample=False, prefill_chunk_size=20)
    with kvstrata.compress(model, spec(name, 14)) as by_hand:
        logits = feed(model, out[:, :-1], by_hand, (20, 20))
    assert torch.equal(out[:, 40:], logits[:, 39:].argmax(-1))
    assert all(cache.entries(layer) == by_hand.entries(layer) for layer in range(3))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(2)
def test_logical_length_is_what_was_fed(name):
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, spec(name, 12)) as cache:
        for fed in range(1, 60):
            model(ids[:, fed - 1 : fed], **kv(cache))
            assert cache.get_seq_length() == fed
            assert len(cache.entries(0)) == (fed if name in ("full", *GROW) else min(fed, 12))


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in GROW])
def test_a_policy_that_makes_room_stays_within_its_budget(name):
    model, ids = tiny(), prompt(90)
    with kvstrata.compress(model, spec(name, "20,room=6")) as cache:
        model(ids[:, :40], **kv(cache))
        lengths = [len(cache.entries(1))]
        for step in range(40, 90):
            model(ids[:, step : step + 1], **kv(cache))
            lengths.append(len(cache.entries(1)))
    assert lengths == [20] + [15 + step % 6 for step in range(50)]  # the prompt keeps all that it may
    assert cache.report().layers[1].plans == 2 + 49 // 6


PROTECTED = {
    "streaming": ("streaming:budget=16", 4, 12),
    "h2o": ("h2o:budget=16", 0, 8),
    "h2o-explicit": ("h2o:budget=16,sinks=3,recent=5", 3, 5),
    "tova": ("tova:budget=16", 0, 1),
    "keydiff": ("keydiff:budget=16,sinks=4,recent=4", 4, 4),
    "random": ("random:budget=16,sinks=2,recent=6", 2, 6),
}


@pytest.mark.parametrize(("text", "sinks", "recent"), PROTECTED.values(), ids=PROTECTED.keys())
def test_sinks_and_recent_tokens_are_kept_at_every_step(text, sinks, recent):
    model, ids = tiny(), prompt(140)
    with kvstrata.compress(model, text) as cache:
        model(ids[:, :40], **kv(cache))
        for step in range(40, 140):
            model(ids[:, step : step + 1], **kv(cache))
            for head in range(2):
                kept = cache.entries(1, 0, head)
                assert kept == sorted(set(kept))
                assert len(kept) == 16
                assert kept[:sinks] == list(range(sinks))
                assert kept[-recent:] == list(range(step + 1 - recent, step + 1))


@pytest.mark.parametrize("length", range(1, 6))
@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(2)
def test_prompts_of_one_to_five_tokens(name, length):
    model = tiny()
    for budget in (1, 2, "10%", "99%"):
        with kvstrata.compress(model, spec(name, budget)) as cache:
            logits = feed(model, prompt(length + 3), cache, (length,))
            assert logits.isfinite().all()
            assert all(len(cache.entries(layer, 0, head)) >= 1 for layer in range(3) for head in range(2))


def test_snapkv_with_a_window_longer_than_the_prompt_compresses_nothing():
    with kvstrata.compress(tiny(), "snapkv:budget=30,window=32") as cache:
        feed(tiny(), prompt(8), cache, (8,))
    assert cache.entries(0) == list(range(8))
    assert "not compressed: 8 tokens seen are within the budget" in str(cache.report())
