"""The same contract for every family of models: full budget, tight budget, what is passed through, what is refused."""

import pytest
import torch
from transformers import DynamicCache

import kvstrata
from kvstrata.core import InputError

from .families import FAMILIES, IMAGE, IMAGE_TOKENS, MULTIMODAL, REFUSED, family
from .replay import check_against_a_masked_replay, recorded
from .runs import feed, kv, prompt

SINKS_OR_CAPS = ("gemma2", "gpt-oss")  # which sdpa cannot compute


def padded(new):
    """Ids and mask [2, 36 + new]; the first row begins with 13 pads."""
    ids, mask = prompt(36 + new, 2), torch.ones(2, 36 + new, dtype=torch.long)
    mask[0, :13] = 0
    return ids, mask


@pytest.mark.parametrize("name", FAMILIES)
def test_a_full_budget_changes_nothing(name):
    model = family(name)
    ids, mask = padded(new=4)
    expected = feed(model, ids, DynamicCache(config=model.config), (18, 18), mask)
    with kvstrata.compress(model, "h2o:budget=1000") as cache:
        got = feed(model, ids, cache, (18, 18), mask)
    real = mask.bool()
    assert (got - expected)[real].abs().max() <= 1e-5 * expected[real].abs().max()
    assert cache.passed_through == FAMILIES[name][3]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SINKS_OR_CAPS])
def test_exact_kernels_change_no_bit(name):
    model, ids = family(name), prompt(40, 2)
    expected = feed(model, ids, DynamicCache(config=model.config), (36,))
    with kvstrata.compress(model, "h2o:budget=1000", kernels="exact") as cache:
        assert torch.equal(feed(model, ids, cache, (36,)), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tight_budget_equals_the_family_s_own_attention_with_masks(name, monkeypatch):
    """Attention sinks, soft-capping, head sizes and scales are all in the family's own eager function."""
    model, ids = family(name), prompt(46)
    with kvstrata.compress(model, "h2o:budget=20") as cache, recorded(monkeypatch, model):
        feed(model, ids, cache, (40,))
    assert all(len(heads[0]) == 20 for layer in cache.report().layers for heads in [layer.positions[0]])
    assert check_against_a_masked_replay(model) == 7


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_under_a_tight_budget(name):
    model = family(name)
    with kvstrata.compress(model, "confkv:high=10,low=14") as cache:
        out = model.generate(prompt(30, 2), **kv(cache), max_new_tokens=6, do_sample=False)
    assert out.shape == (2, 36)
    assert all(10 <= n <= 14 for layer in cache.report().layers for row in layer.stored for n in row)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name][3]])
def test_the_report_names_what_is_passed_through(name):
    with kvstrata.compress(family(name), "h2o") as cache:
        text = str(cache.report())
    for kind in set(FAMILIES[name][3].values()):
        assert f"passed through uncompressed ({kind})" in text


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_work_is_refused_with_the_reason(name):
    with pytest.raises(kvstrata.UnsupportedModelError, match=REFUSED[name][3]), kvstrata.compress(family(name), "h2o"):
        pass


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_calls_without_our_cache_go_to_the_implementation_the_model_was_loaded_with(name):
    """Inside a block a model loaded with eager attention still gets its soft-capping, its sinks and its weights."""
    model, ids = family(name), prompt(30)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True, use_cache=False)
        with kvstrata.compress(model, "h2o:budget=12"):
            got = model(ids, output_attentions=True, use_cache=False)
    assert torch.equal(got.logits, expected.logits)
    assert all(torch.equal(*pair) for pair in zip(got.attentions, expected.attentions, strict=True))


class TouchesKeys(torch.nn.Module):
    """A layer that does something with what its cache returned."""

    def __init__(self, attention, touch):
        super().__init__()
        self.attention, self.touch = attention, touch

    def forward(self, **kwargs):
        name = next(name for name, value in kwargs.items() if isinstance(value, kvstrata.hf.StrataCache))
        keys, _ = kwargs[name].update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
        self.touch(keys)


TOUCHES = {
    "shape": lambda keys: keys.shape,
    "slice": lambda keys: keys[:, :, -1:],
    "function": lambda keys: torch.cat([keys, keys]),
    "product": lambda keys: torch.ones(1, 2, 1, 16) @ keys,
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_a_model_that_works_on_keys_after_the_cache_is_told_so(touch):
    model = family("llama")
    layer = model.model.layers[0]
    kept, layer.self_attn = layer.self_attn, TouchesKeys(layer.self_attn, touch)
    try:
        with (
            kvstrata.compress(model, "h2o") as cache,
            pytest.raises(kvstrata.UnsupportedModelError, match="between cache and attention"),
        ):
            model(prompt(1), **kv(cache))
    finally:
        layer.self_attn = kept


# -- images -------------------------------------------------------------------------------------------------------


def with_image(name):
    """A tiny model, and a prompt of 30 tokens of which 16 stand for an image."""
    torch.manual_seed(0)
    model, image = MULTIMODAL[name]()
    ids = prompt(30) % 90 + 3
    ids[0, 4 : 4 + IMAGE_TOKENS] = IMAGE
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image}
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name == "qwen2-vl":
        ids[0, 3] = 102
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return model.eval(), inputs


@pytest.mark.parametrize("kernels", ["reference", "exact"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_image_tokens_are_counted_and_a_full_budget_changes_nothing(name, kernels):
    model, inputs = with_image(name)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options)
    with kvstrata.compress(model, "h2o:budget=1000", kernels=kernels) as cache:
        got = model.generate(**inputs, **kv(cache), **options)
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert torch.equal(ours, theirs) if kernels == "exact" else torch.allclose(ours, theirs, atol=1e-4)
    assert cache.report().layers[0].seen == [35]
    assert cache.report().layers[0].positions[0][0] == list(range(35))


@pytest.mark.parametrize("policy", ["snapkv:budget=12", "h2o:budget=12", "confkv:high=10,low=12"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_a_prompt_with_an_image_is_compressed_like_any_other(name, policy):
    model, inputs = with_image(name)
    first = model(**inputs).logits[0, -1]
    with kvstrata.compress(model, policy) as cache, torch.no_grad():
        logits = model(**inputs, **kv(cache)).logits[0, -1]
        assert torch.allclose(logits, first, atol=1e-4), "the prompt is compressed after its attention"
        assert all(len(cache.entries(layer)) <= 12 for layer in cache.strata)


def test_parts_of_a_prompt_with_an_image_need_attention_that_is_not_kept():
    model, inputs = with_image("gemma3")
    with (
        kvstrata.compress(model, "snapkv:budget=12") as cache,
        cache.prefilling(),
        pytest.raises(kvstrata.UnsupportedModelError, match="feed it at once"),
    ):
        model(**inputs, **kv(cache))


@torch.no_grad()
def test_a_refused_forward_of_a_hybrid_is_not_silently_fed_twice():
    """Sliding layers stand before the first of ours, and have stored their part when ours refuses the mask."""
    model, ids = family("gemma3"), prompt(8, 2)
    right = torch.ones_like(ids)
    right[0, -3:] = 0
    with kvstrata.compress(model, "h2o:budget=50%") as cache:
        with pytest.raises(InputError, match="right padding"):
            model(ids, attention_mask=right, **kv(cache))
        with pytest.raises(InputError, match=r"reset\(\)"):
            model(ids, **kv(cache))
        cache.reset()
        again = model(ids, **kv(cache)).logits
    with kvstrata.compress(model, "h2o:budget=50%") as fresh:
        assert torch.allclose(again, model(ids, **kv(fresh)).logits, atol=1e-6)


@torch.no_grad()
def test_a_refused_crop_takes_nothing_from_passed_through_layers():
    model, ids = family("gemma3"), prompt(8)
    with kvstrata.compress(model, "h2o:budget=50%") as cache, cache.prefilling():
        model(ids, **kv(cache))
        before = [cache.layers[index].get_seq_length() for index in cache.passed_through]
        with pytest.raises(InputError, match="inside prefilling"):
            cache.crop(-2)
        assert [cache.layers[index].get_seq_length() for index in cache.passed_through] == before
