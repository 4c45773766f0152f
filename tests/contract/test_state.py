"""No state outside the cache object; leaving a block restores the model."""

import threading

import pytest
import torch

import kvstrata

from .runs import ALL, feed, kv, prompt, spec, stock, tiny


def fingerprint(model):
    """Everything a module carries, by name and identity, and the attention implementations in force."""
    return [
        (name, sorted((key, id(value)) for key, value in module.__dict__.items()), len(module._forward_hooks))
        for name, module in model.named_modules()
    ], model.config._attn_implementation


def stopped(model, name):
    with kvstrata.compress(model, spec(name, 12)) as cache:
        model(prompt(30, seed=3), **kv(cache))
        raise RuntimeError("stop")


@pytest.mark.parametrize("name", ALL)
def test_three_prompts_and_an_exception_leave_no_trace(name):
    model, before = tiny(), fingerprint(tiny())
    expected = feed(model, prompt(30), stock(model), (20,))

    def run(seed):
        with kvstrata.compress(model, spec(name, 12)) as cache:
            return feed(model, prompt(40, seed=seed), cache, (30,)), cache.entries(0)

    first, kept = run(1)
    run(2)
    with pytest.raises(RuntimeError, match="stop"):
        stopped(model, name)
    again, kept_again = run(1)
    assert torch.equal(first, again)
    assert kept == kept_again
    assert fingerprint(model) == before
    assert torch.equal(feed(model, prompt(30), stock(model), (20,)), expected)


def test_an_exception_between_update_and_attention_leaves_the_cache_usable():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=12") as cache:
        model(prompt(30), **kv(cache))
        before = [cache.entries(layer) for layer in range(3)]
        cache.layers[0].update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
        assert [cache.entries(layer) for layer in range(3)] == before
        model(prompt(1), **kv(cache))
        assert cache.get_seq_length() == 31


def test_blocks_may_end_in_any_order():
    model = tiny()
    first, second = kvstrata.compress(model, "h2o:budget=12"), kvstrata.compress(model, "window:budget=9")
    one, two = first.__enter__(), second.__enter__()
    model(prompt(30), **kv(one))
    model(prompt(25), **kv(two))
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "kvstrata"
    model(prompt(1), **kv(two))
    assert two.entries(0) == list(range(17, 26))
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_caches_open_on_one_model_do_not_mix():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=12") as alone:
        expected = feed(model, prompt(40), alone, (30,))
    with kvstrata.compress(model, "h2o:budget=12") as one, kvstrata.compress(model, "tova:budget=7") as two:
        parts = [model(prompt(40)[:, :30], **kv(one)).logits]
        model(prompt(33, seed=4), **kv(two))
        for step in range(30, 40):
            parts.append(model(prompt(40)[:, step : step + 1], **kv(one)).logits)
            model(prompt(1, seed=step), **kv(two))
    assert torch.equal(torch.cat(parts, 1), expected)


def test_stock_caches_and_no_cache_work_inside_the_block():
    model, ids = tiny(), prompt(24, 2)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    plain = model(ids, attention_mask=mask, use_cache=False).logits
    cached = feed(model, ids, stock(model), (20,), mask)
    with kvstrata.compress(model, "h2o:budget=12"):
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, plain)
        assert torch.equal(feed(model, ids, stock(model), (20,), mask), cached)


def test_a_closed_cache_can_be_read_but_not_fed():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=12") as cache:
        model(prompt(30), **kv(cache))
    assert len(cache.entries(0)) == 12
    with pytest.raises(kvstrata.KvstrataError, match="inside the block"):
        model(prompt(1), **kv(cache))


def test_reset_starts_anew():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=12") as cache:
        first = feed(model, prompt(40), cache, (30,))
        cache.reset()
        assert cache.nbytes.reserved == 0
        assert cache.get_seq_length() == 0
        assert torch.equal(feed(model, prompt(40), cache, (30,)), first)


def test_no_gradient_is_kept_alive():
    model = tiny()
    with kvstrata.compress(model, "h2o:budget=12") as cache:
        model(prompt(30), **kv(cache))
        assert not next(iter(cache.strata[0].store.blocks())).k.requires_grad


def test_two_threads_with_their_own_caches():
    model, results = tiny(), {}

    def work(name):
        with torch.no_grad(), kvstrata.compress(model, spec(name, 12)) as cache:
            results[name] = feed(model, prompt(60), cache, (30,))

    expected = {}
    for name in ("h2o", "streaming"):
        work(name)
        expected[name] = results.pop(name)
    threads = [threading.Thread(target=work, args=(name,)) for name in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_config_are_restored_together():
    model = tiny()
    twin = model.__class__(model.config).eval()
    first, second = kvstrata.compress(model, "h2o:budget=12"), kvstrata.compress(twin, "h2o:budget=12")
    first.__enter__()
    cache = second.__enter__()
    first.__exit__(None, None, None)
    twin(prompt(20), **kv(cache))
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"
