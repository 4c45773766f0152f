"""A budget that holds everything changes nothing."""

import pytest
import torch

import kvstrata
from kvstrata.hf.compat import CACHE_KEYWORD

from .runs import ALL, feed, prompt, spec, stock, tiny

CHUNKS = {"one-shot": (40,), "chunks": (17, 23), "small-chunks": (20, 7, 13)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request):
    return request.param


@pytest.fixture(params=CHUNKS.values(), ids=CHUNKS.keys())
def chunks(request):
    return request.param


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thin(6)
def test_exact_kernels_are_bit_identical_to_the_stock_cache(name, rows, dtype, chunks):
    model, ids = tiny(dtype=dtype), prompt(52, rows)
    expected = feed(model, ids, stock(model), chunks)
    with kvstrata.compress(model, spec(name, 10_000), kernels="exact") as cache:
        assert torch.equal(feed(model, ids, cache, chunks), expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(4)
def test_fp32_stays_within_rounding_of_the_stock_cache(name, kind, chunks):
    model, ids = tiny(kind), prompt(52, 2)
    expected = feed(model, ids, stock(model), chunks)
    with kvstrata.compress(model, spec(name, 10_000)) as cache:
        got = feed(model, ids, cache, chunks)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(3)
def test_bf16_error_is_of_the_size_of_the_stock_cache_s_own(name, chunks):
    model, ids = tiny(dtype=torch.bfloat16), prompt(52, 4)
    double = tiny().__class__(model.config).double().eval()
    double.load_state_dict(model.state_dict())
    oracle = feed(double, ids, stock(double), chunks)
    own = (feed(model, ids, stock(model), chunks).double() - oracle).square().mean().sqrt()
    with kvstrata.compress(model, spec(name, 10_000)) as cache:
        error = (feed(model, ids, cache, chunks).double() - oracle).square().mean().sqrt()
    assert error <= 1.5 * own


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("keyword", sorted({"past_key_values", CACHE_KEYWORD}))
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_generate_takes_the_cache_under_both_names(name, keyword):
    model, ids = tiny(), prompt(30)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    with kvstrata.compress(model, spec(name, 10_000)) as cache:
        got = model.generate(ids, max_new_tokens=12, do_sample=False, **{keyword: cache})
        assert cache.get_seq_length() == 41
    assert torch.equal(got, expected)


def test_the_logits_of_the_prompt_are_those_of_the_full_cache():
    model, ids = tiny(), prompt(40)
    expected = feed(model, ids, stock(model), (40,))
    with kvstrata.compress(model, "h2o:budget=8") as cache:
        assert (feed(model, ids, cache, (40,)) - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert cache.report().layers[0].stored == [[8, 8]]


@pytest.mark.parametrize("name", ALL)
def test_the_implementation_the_model_was_loaded_with_makes_no_difference(name):
    model, ids = tiny(), prompt(40)
    results = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with kvstrata.compress(model, spec(name, 12)) as cache:
            results.append(feed(model, ids, cache, (30,)))
        assert model.config._attn_implementation == implementation
    model.set_attn_implementation("sdpa")
    assert torch.equal(*results)
