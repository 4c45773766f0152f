"""Assisted decoding: drafts are tentative, and a rejected one leaves no trace."""

import pytest
import torch

import kvstrata

from .replay import LOG, check_against_a_masked_replay, recorded
from .runs import ALL, GROW, MERGING, PRESETS, TWO_LEVELS, kv, prompt, spec, tiny

BUDGET = 14


def state(cache):
    """All that a cache holds: positions, columns, keys, values and clocks, in order of position."""
    found = []
    for layer in cache.strata.values():
        layer.store.sort()
        store = layer.store
        columns = {column.name: store.column(column.name) for column in store.columns if column.name != "step"}
        payload = [part for block in store.blocks() for part in (block.k, block.v)]
        found.append((layer.columns_fed, layer.seen, store.lengths(), columns, payload))
    return found


def same(left, right):
    """Equal up to rounding: the sums of a draft are made later, by another operator."""
    for (*one, columns, payload), (*other, other_columns, other_payload) in zip(left, right, strict=True):
        assert one == other
        assert columns.keys() == other_columns.keys()
        for name in columns:
            assert torch.allclose(columns[name].float(), other_columns[name].float(), atol=1e-5)
        for a, b in zip(payload, other_payload, strict=True):  # within 1e-5 of the largest, as everywhere in fp32
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("rejected", [0, 1, 3])
@pytest.mark.parametrize("name", [*ALL, TWO_LEVELS])
def test_a_rejected_draft_leaves_the_state_as_if_it_had_never_been_made(name, rejected):
    model, ids = tiny(), prompt(60)
    with torch.no_grad(), kvstrata.compress(model, spec(name, BUDGET)) as plain:
        model(ids[:, :40], **kv(plain))
        model(ids[:, 40 : 44 - rejected], **kv(plain))
        expected = state(plain)
    with torch.no_grad(), kvstrata.compress(model, spec(name, BUDGET)) as cache:
        model(ids[:, :40], **kv(cache))
        held = [cache.entries(layer, 0, head) for layer in range(3) for head in range(2)]
        cache.activate_past_recording()
        model(ids[:, 40:44], **kv(cache))
        with_drafts = [cache.entries(layer, 0, head) for layer in range(3) for head in range(2)]
        assert with_drafts == [[*kept, 40, 41, 42, 43] for kept in held], "nothing may be dropped for a draft"
        cache.crop(-rejected)
        same(state(cache), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_a_draft_that_nobody_judges_is_taken_with_the_next_forward(name):
    model, ids = tiny(), prompt(60)
    states = []
    for drafting in (False, True):
        with torch.no_grad(), kvstrata.compress(model, spec(name, BUDGET)) as cache:
            model(ids[:, :40], **kv(cache))
            if drafting:
                cache.activate_past_recording()
            model(ids[:, 40:43], **kv(cache))
            model(ids[:, 43:44], **kv(cache))
            cache.crop(0)
            states.append(state(cache))
    same(*states)


MODES = {
    "self-draft": lambda: {"assistant_model": tiny()},
    "random draft": lambda: {"assistant_model": tiny("qwen2")},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*(name for name in ALL if name not in MERGING), TWO_LEVELS])
@pytest.mark.thin(2)
def test_assisted_decoding_equals_a_masked_replay_of_the_same_schedule(name, mode, monkeypatch):
    model = tiny()
    ids = torch.cat([prompt(20), prompt(20)], 1)  # a prompt that repeats itself, so that lookup finds drafts
    longest = []
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, recorded(monkeypatch, model):
        out = model.generate(ids, **kv(cache), max_new_tokens=16, do_sample=False, **MODES[mode]())
        longest += [len(held[0]) for entry in LOG for held in entry["held"].values()]
    assert out.shape[1] == 56
    assert cache.get_seq_length() == 55
    if name != "full" and name not in GROW:
        assert max(longest) <= BUDGET, "what is held between forwards is within the budget"
        assert len(cache.entries(0)) <= BUDGET
    forwards = check_against_a_masked_replay(model)
    assert forwards < 16 or mode != "self-draft"


def drafted(model, cache, ids, new, wrong):
    """Greedy tokens with drafts of three, of which the last `wrong` are always bad; -> [T + new]"""
    plain = model.generate(ids, max_new_tokens=new + 4, do_sample=False)[0, ids.shape[1] :]  # drafts of the full cache
    out = ids[0].tolist()
    while len(out) < ids.shape[1] + new:
        done = len(out) - ids.shape[1]
        draft = plain[done : done + 3].clone()
        draft[3 - wrong :] = (draft[3 - wrong :] + 1) % 128
        fed = torch.cat([torch.tensor(out[-1:]), draft])[None]
        best = model(fed, **kv(cache)).logits[0].argmax(-1)
        accepted = int((best[:-1] == draft).long().cumprod(0).sum())
        out += best[: accepted + 1].tolist()
        cache.crop(accepted - 3)
    return torch.tensor(out[: ids.shape[1] + new])


@pytest.mark.parametrize("wrong", [0, 1, 3])
@pytest.mark.parametrize("name", ["full", *GROW])
def test_policies_that_keep_what_they_generate_give_the_plain_run_s_tokens(name, wrong):
    """With the prompt compressed before: a first forward of prompt and draft together shows the draft all of it.

    The loop is our own, since transformers' assisted decoding feeds a filled cache its whole history again.
    """
    model, ids = tiny(), prompt(40)
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, torch.no_grad():
        model(ids[:, :-1], **kv(cache))
        expected = model.generate(ids, **kv(cache), max_new_tokens=16, do_sample=False)[0]
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, torch.no_grad():
        model(ids[:, :-1], **kv(cache))
        cache.activate_past_recording()
        assert torch.equal(drafted(model, cache, ids, 16, wrong), expected)


def test_sampling_with_an_assistant_runs_under_a_policy_that_evicts():
    model = tiny()
    with kvstrata.compress(model, "confkv:high=10,low=14") as cache:
        out = model.generate(prompt(40), **kv(cache), do_sample=True, max_new_tokens=12, assistant_model=tiny("qwen2"))
    assert out.shape[1] == 52
    assert len(cache.entries(0)) <= 14


def test_a_chat_goes_on_with_the_same_cache_after_assisted_decoding():
    model, ids = tiny(), prompt(40)
    with kvstrata.compress(model, "h2o:budget=14") as cache:
        first = model.generate(ids, **kv(cache), max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
        history = torch.cat([first, prompt(6, seed=9)], dim=1)
        mask = torch.ones_like(history)
        second = model.generate(history, attention_mask=mask, **kv(cache), max_new_tokens=4, do_sample=False)
        assert second.shape[1] == 58
        assert cache.get_seq_length() == 57
