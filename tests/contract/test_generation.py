"""Every way transformers generates: each sequence gets what it would get alone, under every policy."""

import threading

import pytest
import torch

import kvstrata

from .runs import ALL, TWO_LEVELS, feed, kv, prompt, spec, stock, tiny

BUDGET = 14


@torch.no_grad()
def alone(name, sequence, prompt_length):
    """Logits [T, V] of one sequence fed through a cache of its own, the prompt at once and then token by token."""
    with kvstrata.compress(tiny(), spec(name, BUDGET)) as cache:
        return feed(tiny(), sequence[None], cache, (prompt_length,))[0]


@pytest.mark.parametrize("name", [*ALL, TWO_LEVELS])
@pytest.mark.thin(2)
def test_every_beam_is_scored_as_if_it_ran_alone(name):
    """A beam's history is its own: its score is the sum of log-probabilities of a run that never branched."""
    model, ids = tiny(), prompt(30, 2)
    with kvstrata.compress(model, spec(name, BUDGET)) as cache:
        out = model.generate(
            ids,
            **kv(cache),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=10,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    assert len({tuple(row.tolist()) for row in out.sequences}) == 6
    for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
        log_probs = alone(name, sequence, 30)[29:-1].log_softmax(-1)
        own = log_probs.gather(-1, sequence[30:, None]).sum()
        assert abs(own - score) <= 1e-4 * abs(score)


@pytest.mark.parametrize("name", [*ALL, TWO_LEVELS])
@pytest.mark.thin(2)
def test_sampled_sequences_of_one_prompt_do_not_mix(name):
    model, ids = tiny(), prompt(30)
    with kvstrata.compress(model, spec(name, BUDGET)) as cache:
        out = model.generate(
            ids,
            **kv(cache),
            do_sample=True,
            temperature=1.5,
            num_return_sequences=3,
            max_new_tokens=10,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(out.logits, dim=1)
    for index, sequence in enumerate(out.sequences):
        expected = alone(name, sequence, 30)[29:-1]
        assert (logits[index] - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_full_budget_beams_and_samples_are_those_of_the_stock_cache():
    model, ids = tiny(), prompt(30, 2)
    for options in ({"num_beams": 4}, {"num_beams": 3, "do_sample": True}, {"do_sample": True, "top_k": 5}):
        torch.manual_seed(0)
        expected = model.generate(ids, max_new_tokens=10, **options)
        torch.manual_seed(0)
        with kvstrata.compress(model, "h2o:budget=1000", kernels="exact") as cache:
            assert torch.equal(model.generate(ids, **kv(cache), max_new_tokens=10, **options), expected)


@pytest.mark.parametrize("name", [*ALL, TWO_LEVELS])
def test_rows_may_be_reordered_repeated_and_selected(name):
    """The cache operations of contrastive search and of beams, by hand."""
    model, ids = tiny(), prompt(40, 2)
    steps = prompt(4, 4, seed=8)
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, torch.no_grad():
        model(ids[:, :30], **kv(cache))
        cache.batch_repeat_interleave(2)  # rows 0 0 1 1
        for step in range(2):
            model(steps[:, step : step + 1], **kv(cache))
        cache.reorder_cache(torch.tensor([2, 2, 1, 0]))
        model(steps[:, 2:3], **kv(cache))
        cache.batch_select_indices(torch.tensor([3, 0]))
        got = model(steps[[3, 0], 3:4], **kv(cache)).logits[:, -1]
        assert cache.batch_size == 2
    for row, (first, before, after) in enumerate([(0, 0, 3), (1, 2, 0)]):
        sequence = torch.cat([ids[first, :30], steps[before, :2], steps[after, 2:]])
        expected = alone(name, sequence, 30)[-1]
        assert (got[row] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("chunks", [(17, 23), (7, 33), (20, 10, 10)], ids=str)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.thin(2)
def test_a_prompt_in_parts_inside_prefilling_is_as_good_as_one_shot(name, chunks):
    model, ids = tiny(), prompt(50)
    with kvstrata.compress(model, spec(name, BUDGET)) as whole:
        expected = feed(model, ids, whole, (40,))
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, torch.no_grad():
        with cache.prefilling():
            first = feed(model, ids[:, :40], cache, chunks)
            assert len(cache.entries(1)) == 40
        kept = [cache.entries(layer, 0, head) for layer in range(3) for head in range(2)]
        rest = torch.cat([model(ids[:, t : t + 1], **kv(cache)).logits for t in range(40, 50)], 1)
    got = torch.cat([first, rest], 1)
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    with kvstrata.compress(model, spec(name, BUDGET)) as whole:
        feed(model, ids[:, :40], whole, (40,))
        assert kept == [whole.entries(layer, 0, head) for layer in range(3) for head in range(2)]


@pytest.mark.parametrize("name", ["h2o", "snapkv", "confkv"])
def test_prefilling_a_padded_batch_in_parts(name):
    model, ids = tiny(), prompt(40, 2)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :25] = 0
    kept = []
    for chunks in ((40,), (20, 20)):
        with kvstrata.compress(model, spec(name, 8)) as cache, cache.prefilling():
            feed(model, ids, cache, chunks, mask)
        kept.append([cache.entries(layer, row, head) for layer in range(3) for row in range(2) for head in range(2)])
    assert kept[0] == kept[1]


def test_prefilling_settles_after_an_exception_too_and_does_not_nest():
    model = tiny()
    with kvstrata.compress(model, "snapkv:budget=10") as cache:
        with pytest.raises(IndexError), cache.prefilling():
            feed(model, torch.cat([prompt(30), prompt(1) + 1000], 1), cache, (30,))  # the last is no token
        assert len(cache.entries(0)) == 10
        with cache.prefilling(), pytest.raises(kvstrata.InputError, match="already"), cache.prefilling():
            pass


def test_generate_continues_a_prompt_that_was_fed_in_parts():
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, "snapkv:budget=20") as cache, torch.no_grad():
        with cache.prefilling():
            feed(model, ids[:, :59], cache, (30, 29))
        out = model.generate(ids, **kv(cache), max_new_tokens=8, do_sample=False)
    with kvstrata.compress(model, "snapkv:budget=20") as cache, torch.no_grad():
        model(ids[:, :59], **kv(cache))
        assert torch.equal(out, model.generate(ids, **kv(cache), max_new_tokens=8, do_sample=False))


def test_threads_generate_with_their_own_caches_and_policies_on_one_model():
    model, names, results = tiny(), ("h2o", "confkv", "snapkv", "full", "tova"), {}

    def work(name):
        with kvstrata.compress(model, spec(name, BUDGET)) as cache:
            ids = prompt(30, seed=len(name))
            results[name] = model.generate(ids, **kv(cache), max_new_tokens=12, do_sample=False, num_beams=2)

    expected = {}
    for name in names:
        work(name)
        expected[name] = results.pop(name)
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    plain = [model.generate(prompt(20), max_new_tokens=6, do_sample=False) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[name], expected[name]) for name in names)
    after = model.generate(prompt(20), max_new_tokens=6, do_sample=False)
    assert all(torch.equal(out, after) for out in plain)
    assert not model._forward_hooks


@pytest.mark.parametrize("name", ALL)
def test_crop_forgets_the_newest_tokens(name):
    """What a plan dropped stays dropped; the rest is as if the tokens had never come."""
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, spec(name, BUDGET)) as cache, torch.no_grad():
        feed(model, ids[:, :40], cache, (36,))
        before = [set(cache.entries(layer, 0, head)) for layer in range(3) for head in range(2)]
        cache.crop(-3)
        assert cache.get_seq_length() == 37
        after = [set(cache.entries(layer, 0, head)) for layer in range(3) for head in range(2)]
        assert after == [{p for p in kept if p < 37} for kept in before]
        model(ids[:, 37:38], **kv(cache))
        assert cache.entries(0)[-1] == 37
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        assert cache.nbytes.live == 0
        again = model(ids[:, :40], **kv(cache)).logits
        expected = feed(model, ids[:, :40], stock(model), (40,))
        assert (again - expected).abs().max() <= 1e-5 * expected.abs().max()
