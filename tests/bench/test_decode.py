"""Caches that decode side by side hold the same entries, choose the same tokens, and get no ratio if they do not."""

from contextlib import ExitStack

import pytest
import torch
from transformers import DynamicCache

import kvstrata
from kvstrata.bench import contenders, repaired
from kvstrata.bench.decode import Turns, run_case, run_reference
from kvstrata.bench.glue import share_of_glue
from kvstrata.bench.peers import parse_peers
from kvstrata.cache import stored
from kvstrata.core import UnsupportedModelError
from kvstrata.hf.compat import attention_name, text_config

from ..contract.families import family
from ..contract.runs import feed, kv, prompt, stock, tiny

TURNS = Turns(rounds=2, steps=2, limit=60.0)
POLICIES = ["h2o:budget=25%", "window:budget=12"]


def decode(model, ids, batch, policies, specs, turns, tell=lambda _: None):
    with ExitStack() as stack:
        reference = run_reference(model, ids, policies, turns.most_steps, tell, stack=stack, batches=[batch])
        return run_case(model, reference, batch, specs, turns, tell)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [100, 33])  # roomy, and such that the buffers grow
def test_the_repaired_baseline_computes_what_transformers_does(dtype, capacity):
    model, ids = tiny(dtype=dtype), prompt(48, 2)
    expected = feed(model, ids, stock(model), (32,))
    cache = repaired.repaired_cache(model, capacity)
    with contenders.attention_of(model, repaired.NAME):
        found = feed(model, ids, cache, (32,))
    assert cache.get_seq_length() == 48
    assert float((found - expected).abs().max()) <= (1e-5 if dtype == torch.float32 else 2.0**-5) * float(
        expected.abs().max()
    )


def test_the_repaired_baseline_appends_in_place():
    model, cache = tiny(), repaired.repaired_cache(tiny(), 40)
    with contenders.attention_of(model, repaired.NAME):
        feed(model, prompt(32), cache, (30,))
    first = cache.layers[0].keys.data_ptr()
    with contenders.attention_of(model, repaired.NAME):
        feed(model, prompt(2), cache, ())
    assert cache.layers[0].keys.data_ptr() == first
    assert cache.layers[0].nbytes == 2 * 40 * 2 * 16 * 4


def test_the_repaired_baseline_refuses_layers_of_other_kinds():
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        repaired.repaired_cache(family("gemma3"), 10)


def test_the_model_s_attention_is_put_back():
    model, before = tiny(), attention_name(text_config(tiny()))
    with pytest.raises(ZeroDivisionError), contenders.attention_of(model, repaired.NAME):
        1 / 0  # noqa: B018
    assert attention_name(text_config(model)) == before


def test_rows_have_memory_of_their_own():
    model = tiny()
    read = contenders.read_prompt(model, prompt(40))
    row = 3 * 2 * 2 * 40 * 16 * 4
    assert contenders.stock(model, read, 3).nbytes() == 3 * row
    for policy in ("full", "h2o:budget=100%"):  # filled, and read by itself
        with ExitStack() as stack:
            made = contenders.ours(model, read, 3, policy, stack)
            assert made.cache.nbytes.live == 3 * (row + 3 * 40 * 4 * (1 + 3 * (policy != "full")))
            assert made.nbytes() >= made.cache.nbytes.live
            assert made.cache.entries(0, row=2) == list(range(40))
            assert made.cache.nbytes.reserved >= 3 * row


@pytest.mark.parametrize(
    "policy", ["full:codec=int8,exact=64", "full:codec=k2v2,exact=64", "snapkv:budget=150,codec=int4,exact=64"]
)
def test_rows_have_codes_of_their_own(policy):
    model = tiny()
    read, live = contenders.read_prompt(model, prompt(200)), []
    for rows in (1, 3):
        with ExitStack() as stack:
            made = contenders.ours(model, read, rows, policy, stack)
            live.append(made.cache.nbytes.live)
            logits = made.step(read.first, rows)
            assert torch.allclose(logits, logits[:1].expand(rows, -1), atol=1e-6)
    assert live[1] == 3 * live[0]


def test_bytes_of_cache_layers_are_those_of_their_tensors():
    cache = DynamicCache(config=tiny().config)
    with torch.no_grad():
        tiny()(prompt(10), **kv(cache))
    assert contenders.tensor_bytes(cache.layers) == 3 * 2 * 2 * 10 * 16 * 4


def test_the_reference_feeds_what_generate_would_write():
    model, ids = tiny(), prompt(40)
    with ExitStack() as stack:
        found = run_reference(model, ids, POLICIES, 6, stack=stack)
    written = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    assert found.tokens == written
    assert all(logits.shape == (6, 128) for logits in found.logits.values())
    assert found.allowed < 1e-3


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_take_turns_and_agree(dtype, batch):
    told = []
    rows = decode(
        tiny(dtype=dtype),
        prompt(70),
        batch,
        POLICIES,
        parse_peers("hf,repaired"),
        TURNS,
        lambda text: told.append(text),
    )
    assert [row.name for row in rows] == ["hf", "repaired", "full", *POLICIES]
    for row in rows:
        assert row.passed, row.check
        assert len(row.ms) == 4
        assert row.over_hf == pytest.approx(row.tokens_per_s / rows[0].tokens_per_s)
        assert row.over_repaired == pytest.approx(row.tokens_per_s / rows[1].tokens_per_s)
        assert row.tokens_per_s == pytest.approx(batch * 1e3 / row.ms_per_step)
    assert rows[0].over_hf == 1.0
    assert rows[2].glue_share > 0
    assert rows[3].cache_bytes < rows[2].cache_bytes
    assert any(text.startswith("measuring for") for text in told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_is_wrong_gets_no_ratio(dtype, monkeypatch):
    attend = stored.attend_pages

    def slightly_wrong(q, *arguments, **options):
        out, mass = attend(q * 1.1, *arguments, **options)
        return out, mass

    pytest.importorskip("kvstrata._native")
    monkeypatch.setattr(stored, "attend_pages", slightly_wrong)
    rows = decode(tiny(dtype=dtype), prompt(70), 1, [], parse_peers("hf,repaired"), TURNS)
    assert [row.passed for row in rows] == [True, True, False]
    assert rows[2].over_hf is rows[2].over_repaired is None
    assert rows[1].over_hf is not None


def test_a_baseline_that_is_wrong_gives_no_ratios(monkeypatch):
    monkeypatch.setattr(repaired, "scaled_dot_product_attention", lambda q, k, v, scale: q * 0.5)
    rows = decode(tiny(), prompt(70), 1, [], parse_peers("hf,repaired"), TURNS)
    assert [row.passed for row in rows] == [True, False, True]
    assert all(row.over_repaired is None for row in rows)
    assert rows[2].over_hf is not None


def test_no_round_is_begun_that_would_pass_the_limit():
    rows = decode(tiny(), prompt(40), 1, [], parse_peers("hf"), Turns(rounds=50, steps=1, limit=0.0))
    assert all(len(row.ms) == 1 for row in rows)


def test_nothing_is_left_behind():
    model = tiny()
    decode(model, prompt(40), 1, [], parse_peers("hf,repaired"), TURNS)
    assert attention_name(text_config(model)) == "sdpa"
    with kvstrata.compress(model, "full") as cache:
        share_of_glue(lambda: model(prompt(4), **kv(cache)), 2)
    assert stored.attend.__module__ == "kvstrata.kernels.attention"
