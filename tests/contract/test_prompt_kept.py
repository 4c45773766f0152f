"""`prompt=keep`: prompts stay whole under any policy that decodes, and the budget is one of what was generated."""

import pytest
import torch

import kvstrata
from kvstrata.core import SpecError
from kvstrata.policy import parse_policy

from .runs import feed, prompt, tiny
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
    ids = prompt(140)
    with kvstrata.compress(tiny(), "h2o:budget=25%,prompt=keep") as cache:
        feed(tiny(), ids, cache, (60,))
        kept = cache.entries(1)
    assert kept[:60] == list(range(60))
    assert len(kept) == 60 + 20


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
