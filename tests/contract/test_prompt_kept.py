"""`prompt=keep`: prompts stay whole under any policy that decodes, and the budget is one of what was generated."""

import pytest
import torch

import kvstrata
from kvstrata.core import SpecError
from kvstrata.policy import parse_policy

from .runs import feed, kv, prompt, tiny
from .test_padding import LENGTHS, padded_batch

POLICIES = ["random", "h2o", "tova", "streaming", "keydiff", "scissorhands"]


@torch.no_grad()
@pytest.mark.parametrize("name", POLICIES)
def test_prompts_stay_and_what_follows_is_limited(name):
    ids = prompt(100)
    with kvstrata.compress(tiny(), f"{name}:budget=12,prompt=keep") as cache:
        feed(tiny(), ids, cache, (40,))
        for layer in range(3):
            kept = cache.entries(layer, 0, 1)
            assert kept[:40] == list(range(40))
            assert len(kept) == 52
        feed(tiny(), prompt(30, seed=4), cache, (20,))  # a second turn, whose prompt stays too
        for layer in range(3):
            kept = cache.entries(layer, 0, 0)
            assert set(range(40)) | set(range(100, 120)) <= set(kept)
            assert len(kept) == 72


@torch.no_grad()
def test_a_share_is_one_of_what_was_generated_and_scales_what_is_protected():
    ids = prompt(440)
    with kvstrata.compress(tiny(), "h2o:budget=25%,prompt=keep") as cache:
        feed(tiny(), ids, cache, (400,))
        kept = cache.entries(1)
        assert cache.report().layers[1].overruns == 0
    assert kept[:400] == list(range(400))
    assert len(kept) == 400 + 10, "a quarter of forty, though half of a quarter of all would be more"
    with kvstrata.compress(tiny(), "h2o:budget=25%,recent=30,prompt=keep") as cache:
        feed(tiny(), ids, cache, (400,))
        assert cache.entries(1)[400:] == list(range(410, 440)), "what is protected stays, and is reported"
        assert cache.report().layers[1].overruns > 0


@torch.no_grad()
@pytest.mark.parametrize("policy", ["cam:budget=60", "h2o:budget=20,prompt=keep"])
def test_sums_begin_with_a_prompt_that_came_with_drafts_as_without(policy):
    ids = prompt(60)
    with kvstrata.compress(tiny(), policy) as plain:
        tiny()(ids[:, :50], **kv(plain))
        expected = [layer.store.column("mass").clone() for layer in plain.strata.values()]
    with kvstrata.compress(tiny(), policy) as drafted:
        drafted.activate_past_recording()
        tiny()(ids[:, :53], **kv(drafted))
        drafted.crop(-3)
        found = [layer.store.column("mass") for layer in drafted.strata.values()]
    for a, b in zip(expected, found, strict=True):
        assert float(a.sum()) > 10
        assert torch.allclose(a, b, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_every_row_has_its_own_prompt(name):
    policy = f"{name}:budget=6,prompt=keep"
    ids, mask, rows = padded_batch(new=12)
    with kvstrata.compress(tiny(), policy) as together:
        feed(tiny(), ids, together, (40,), mask)
    for index, row in enumerate(rows):
        with kvstrata.compress(tiny(), policy) as alone:
            feed(tiny(), row[None], alone, (LENGTHS[index],))
        for layer in range(3):
            assert together.entries(layer, index, 1) == alone.entries(layer, 0, 1)
            assert len(alone.entries(layer)) == LENGTHS[index] + 6


@torch.no_grad()
def test_what_was_a_prompt_is_known_after_saving_and_forking(tmp_path):
    ids = prompt(70)
    with kvstrata.compress(tiny(), "tova:budget=5,prompt=keep") as cache:
        feed(tiny(), ids[:, :60], cache, (50,))
        twin = cache.fork()
        cache.save(tmp_path / "saved")
        feed(tiny(), ids[:, 60:], cache, ())
        feed(tiny(), ids[:, 60:], twin, ())
        assert cache.entries(2) == twin.entries(2)
        assert cache.entries(2)[:50] == list(range(50))
    with kvstrata.compress(tiny(), "tova:budget=5,prompt=keep") as loaded:
        loaded.load(tmp_path / "saved")
        feed(tiny(), ids[:, 60:], loaded, ())
        assert loaded.entries(2) == cache.entries(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o:prompt=drop", "prompt=keep"),
        ("snapkv:prompt=keep", "acts on prompts only"),
        ("qevict:prompt=keep", "cannot have"),
        ("echo:prompt=keep", "cannot have"),
        ("full:prompt=keep", "acts on prompts only"),
    ],
)
def test_policies_that_cannot_keep_prompts_apart_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        parse_policy(text)
