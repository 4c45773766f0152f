"""Bad input: a clear error that names the fix, and nothing half-done."""

import pytest
import torch
from transformers import BertConfig, BertModel, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

import kvstrata
from kvstrata.hf import compat
from kvstrata.kernels.attention import Softmax

from .runs import ALL, GROW, feed, kv, prompt, spec, tiny

BAD_SPECS = {
    "unknown preset": ("h20", "Did you mean 'h2o'"),
    "unknown key": ("h2o:bugdet=12", "Did you mean 'budget'"),
    "unit": ("h2o:budget=12lightyears", "64MiB/layer"),
    "zero": ("h2o:budget=0", "at least one token"),
    "share": ("h2o:budget=140%", "up to 100%"),
    "bytes": ("h2o:budget=0MiB", "positive size"),
    "no value": ("h2o:budget", "key=value"),
    "twice": ("h2o:budget=1,budget=2", "given twice"),
    "protection": ("h2o:budget=16,sinks=4,recent=20", "raise the budget or protect fewer"),
    "type": ("random:seed=x", "seed"),
    "even pool": ("snapkv:pool=4", "odd"),
    "file": ("nowhere.yaml", "no policy file"),
}


@pytest.mark.parametrize(("text", "message"), BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_a_policy_that_cannot_work_is_refused_when_written(text, message):
    with pytest.raises(kvstrata.SpecError, match=message), kvstrata.compress(tiny(), text):
        pass
    assert tiny().config._attn_implementation == "sdpa"


def test_kernels_are_checked():
    with pytest.raises(kvstrata.SpecError, match="exact"), kvstrata.compress(tiny(), "full", kernels="fast"):
        pass


IMPOSSIBLE = {
    "bytes that hold no token": ("h2o:budget=100B", "give more"),
    "three heads": ("h2o:budget=4/5/6", "2 key-value"),
    "three heads in the last layer": ("layers: {0-1: 'h2o:budget=4', 2: {prefill: 'h2o:budget=4/5/6'}}", "layer 2"),
    "three heads while decoding": ("layers: {0-: {decode: 'h2o:budget=4/5/6'}}", "2 key-value"),
}


@pytest.mark.parametrize(("text", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_budget_that_the_model_cannot_meet_is_refused_before_anything_runs(text, message, tmp_path):
    if text.startswith("layers"):
        (tmp_path / "p.yaml").write_text(text)
        text = tmp_path / "p.yaml"
    with pytest.raises(kvstrata.SpecError, match=message), kvstrata.compress(tiny(), text):
        pass
    assert tiny().config._attn_implementation == "sdpa"


def test_a_budget_for_all_rows_that_this_batch_cannot_meet_leaves_nothing_stored():
    one = 3 * (2 * 2 * 16 * 4 + 2 * 8)  # bytes of one token over all layers
    with kvstrata.compress(tiny(), f"h2o:budget={2 * one}B/cache") as cache:
        with pytest.raises(kvstrata.SpecError, match="give more"):
            tiny()(prompt(20, 3), **kv(cache))
        assert cache.nbytes.reserved == 0
        tiny()(prompt(20, 2), **kv(cache))
        assert cache.report().layers[0].stored == [[1, 1], [1, 1]]


def test_a_layer_that_no_range_covers(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("layers: {0-1: 'h2o:budget=8'}")
    with pytest.raises(kvstrata.SpecError, match="layer 2"), kvstrata.compress(tiny(), path):
        pass


def test_an_empty_prompt():
    """transformers itself fails on one before attention is reached in these models; others may get here."""
    with kvstrata.compress(tiny(), "h2o") as cache:
        nothing = torch.empty(1, 2, 0, 16)
        with pytest.raises(kvstrata.InputError, match="prompt is empty"):
            cache.strata[0].attend(torch.empty(1, 4, 0, 16), nothing, nothing, None, Softmax(0.25))
        assert cache.nbytes.reserved == 0


def test_another_batch_size_than_what_is_stored():
    with kvstrata.compress(tiny(), "h2o") as cache:
        tiny()(prompt(20, 2), **kv(cache))
        with pytest.raises(kvstrata.InputError, match="holds 2"):
            tiny()(prompt(1, 3), **kv(cache))


def test_crop_wants_a_negative_number():
    with kvstrata.compress(tiny(), "h2o") as cache:
        tiny()(prompt(20), **kv(cache))
        with pytest.raises(kvstrata.InputError, match="negative"):
            cache.crop(5)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
OTHERS = {
    "no model": (lambda: torch.nn.Linear(2, 2), "transformers model"),
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(T5Config(d_model=16, num_layers=1, d_ff=16, vocab_size=50)),
        "encoder-decoder",
    ),
    "no attention": (lambda: MambaForCausalLM(MambaConfig(**SMALL, state_size=4)), "no full-attention layer"),
    "no causal model": (
        lambda: BertModel(BertConfig(**SMALL, num_attention_heads=2, intermediate_size=32)),
        "not causal",
    ),
}


@pytest.mark.parametrize(("make", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_models_that_cannot_be_compressed_are_refused_with_the_reason(make, message):
    model = make()
    with pytest.raises(kvstrata.KvstrataError, match=message), kvstrata.compress(model, "h2o"):
        pass


@pytest.mark.parametrize("name", ALL)
def test_nan_passes_through_and_is_counted(name):
    """A NaN in the keys is the model's to deal with: the cache neither hides it nor breaks."""
    model, ids = tiny(), prompt(40)
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad(), kvstrata.compress(model, spec(name, 12)) as cache:
        model(ids[:, :30], **kv(cache))
        kept, weight.data = weight.data, weight.data * float("nan")
        try:
            logits = model(ids[:, 30:31], **kv(cache)).logits
        finally:
            weight.data = kept
        assert logits.isnan().all()
        assert len(cache.entries(1)) == (31 if name == "full" else 13 if name in GROW else 12)
        if name in ("keynorm", "keydiff"):
            assert cache.report().layers[1].nan_scores > 0


def test_more_threads_than_native_kernels_take_are_no_error(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 300)
    with torch.no_grad(), kvstrata.compress(tiny(), "h2o:budget=50%") as cache:
        tiny()(prompt(40), **kv(cache))
        assert len(cache.entries(0)) == 20


def test_protected_tokens_beyond_a_small_budget_are_kept_and_reported():
    with kvstrata.compress(tiny(), "h2o:budget=10%,sinks=4,recent=8") as cache:
        feed(tiny(), prompt(40), cache, (40,))
        assert cache.entries(0) == [0, 1, 2, 3, *range(32, 40)]
        assert cache.report().layers[0].overruns > 0
        assert "over budget" in str(cache.report())


def test_a_newer_transformers_warns(monkeypatch):
    monkeypatch.setattr(compat.transformers, "__version__", "6.1.0")
    with pytest.warns(UserWarning, match=r"tested with transformers"), kvstrata.compress(tiny(), "full"):
        pass
