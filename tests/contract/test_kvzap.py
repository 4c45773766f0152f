"""KVzap in a cache: what the surrogate says decides, once, when an entry leaves the window; and the repetition."""

import math
from contextlib import ExitStack
from itertools import product

import pytest
import torch

import kvstrata
from kvstrata.core import InputError, SpecError, UnsupportedModelError
from kvstrata.hf.files import identity
from kvstrata.hf.repeat import LEAST, Request, repeat, request_of
from kvstrata.hf.together import read_together
from kvstrata.policy.surrogate import read_surrogate, write_surrogate

from .runs import Tokenizer, feed, kv, prompt, stock, tiny

LAYERS, HEADS, WIDTH = 3, 2, 64


def weights(kind, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, WIDTH), (HEADS,)] if kind == "linear" else [(8, WIDTH), (8,), (HEADS, 8), (HEADS,)]
    return [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(LAYERS)]


@pytest.fixture(params=["linear", "mlp"])
def folder(request, tmp_path):
    write_surrogate(tmp_path / "zap", weights(request.param), {"thresholds": {"0.75": 0.5}})
    return tmp_path / "zap"


def hidden_of(model, ids):
    """What the attention of each layer gets, [L][T, hidden], with the full cache."""
    found = {}

    def note(module, args, kwargs):
        found.setdefault(module.layer_idx, kwargs.get("hidden_states", args[0] if args else None)[0])

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def test_caches_that_read_a_prompt_together_each_get_the_hidden_states(folder):
    ids, mine = prompt(90), f"kvzap:file={folder},tau=0.5,window=16"
    with ExitStack() as stack:
        caches = [stack.enter_context(kvstrata.compress(tiny(), policy)) for policy in ("full", mine, "window", mine)]
        read_together(tiny(), caches, ids)
        with kvstrata.compress(tiny(), mine) as alone:
            tiny()(ids, **kv(alone))
            for layer, head in product(range(LAYERS), range(HEADS)):
                expected = alone.entries(layer, 0, head)
                assert len(expected) < 90
                assert [caches[i].entries(layer, 0, head) for i in (1, 3)] == [expected, expected]


@torch.no_grad()
def test_a_prompt_keeps_what_scores_enough_and_the_window(folder):
    ids, surrogate = prompt(120), read_surrogate(folder)
    with kvstrata.compress(tiny(), f"kvzap:file={folder},tau=0.5,window=16") as cache:
        tiny()(ids, **kv(cache))
        for layer, hidden in hidden_of(tiny(), ids).items():
            z = surrogate(layer, hidden[None])[0]
            for head in range(HEADS):
                kept = {i for i in range(120) if i >= 104 or z[head, i] >= 0.5}
                assert set(cache.entries(layer, 0, head)) == kept
    assert len({len(cache.entries(layer, 0, head)) for layer in range(3) for head in range(2)}) > 2


@torch.no_grad()
@pytest.mark.parametrize(("tau", "kept"), [(-math.inf, 150), (math.inf, 16)])
def test_the_extremes_keep_all_or_the_window(folder, tau, kept):
    with kvstrata.compress(tiny(), f"kvzap:file={folder},tau={tau},window=16,room=1") as cache:
        feed(tiny(), prompt(150), cache, [100, 20])
        assert {len(cache.entries(layer, 0, head)) for layer in range(3) for head in range(2)} == {kept}


@torch.no_grad()
def test_a_short_prompt_loses_nothing(folder):
    with kvstrata.compress(tiny(), f"kvzap:file={folder},tau=99,window=128") as cache:
        feed(tiny(), prompt(128), cache, [100])
        assert cache.entries(1) == list(range(128))


@torch.no_grad()
def test_an_entry_is_decided_when_it_leaves_the_window_by_the_score_it_came_with(folder):
    """Fed one by one, and in parts, under a threshold: the first layer's hidden states depend on nothing dropped."""
    ids, surrogate = prompt(90), read_surrogate(folder)
    z = surrogate(0, hidden_of(tiny(), ids)[0][None])[0]
    for lengths in ([30], [30, 7, 1, 20], [90]):
        with kvstrata.compress(tiny(), f"kvzap:file={folder},tau=0.5,window=10,room=1") as cache:
            feed(tiny(), ids, cache, lengths)
            for head in range(HEADS):
                assert cache.entries(0, 0, head) == [i for i in range(90) if i >= 80 or z[head, i] >= 0.5]


@torch.no_grad()
@pytest.mark.parametrize("policy", ["kvzap:budget=30,window=8", "kvzap-layer:budget=30", "kvzap-head:budget=30"])
def test_budgets_and_generate_in_all_its_modes(folder, policy):
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        with kvstrata.compress(tiny(), f"{policy},file={folder}") as cache:
            out = tiny().generate(prompt(80, 2), **kv(cache), max_new_tokens=10, **options)
            assert out.shape[1] == 90
            rows = cache.strata[0].store.batch_size
            held = sum(sum(map(sum, layer.store.lengths())) for layer in cache.strata.values())
            assert held <= 30 * LAYERS * HEADS * rows


@torch.no_grad()
def test_padded_rows_forks_crops_and_files(folder, tmp_path):
    long, short = prompt(100), prompt(80, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 20, dtype=torch.long), short], dim=1)])
    mask = (torch.arange(100)[None] >= torch.tensor([[0], [20]])).long()
    policy = f"kvzap:file={folder},tau=0.5,window=16,room=1"
    with kvstrata.compress(tiny(), policy) as cache, kvstrata.compress(tiny(), policy) as alone:
        both = feed(tiny(), ids, cache, [90], mask)
        apart = feed(tiny(), short, alone, [70])
        assert [cache.entries(2, 1, h) for h in (0, 1)] == [alone.entries(2, 0, h) for h in (0, 1)]
        assert (both[1, -10:] - apart[0, -10:]).abs().max() <= 1e-4 * apart.abs().max()
        twin = alone.fork()
        feed(tiny(), prompt(5, seed=3), twin, [])
        twin.crop(-5)
        twin.save(tmp_path / "saved")
        with kvstrata.compress(tiny(), policy) as other:
            other.load(tmp_path / "saved")
            more = prompt(30, seed=4)
            expected = feed(tiny(), more, alone, [])
            assert torch.allclose(feed(tiny(), more, other, []), feed(tiny(), more, twin, []), atol=1e-5)
            assert expected.isfinite().all()


@torch.no_grad()
def test_a_score_that_is_no_number_keeps_its_entry_and_is_counted(folder):
    with kvstrata.compress(tiny(), f"kvzap:file={folder},tau=99,window=16") as cache:
        surrogate = next(iter(cache.engine.model.surrogates.values()))
        surrogate.layers[1][-1][0] = math.nan
        tiny()(prompt(100), **kv(cache))
        assert len(cache.entries(1, 0, 0)) == 100
        assert len(cache.entries(1, 0, 1)) == 16
        assert cache.report().layers[1].nan_scores


def test_surrogates_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(SpecError, match="no surrogate 'nowhere'"), kvstrata.compress(tiny(), "kvzap:file=nowhere"):
        pass
    write_surrogate(tmp_path / "wide", [[torch.zeros(2, 32), torch.zeros(2)] for _ in range(3)], {})
    write_surrogate(tmp_path / "few", weights("linear")[:2], {})
    write_surrogate(tmp_path / "other", weights("linear"), {"model": "another"})
    for name, message in (("wide", "hidden states of 32"), ("few", "2 layers"), ("other", "another model")):
        with pytest.raises(SpecError, match=message), kvstrata.compress(tiny(), f"kvzap:file={tmp_path / name}"):
            pass
    write_surrogate(tmp_path / "own", weights("linear"), {"model": identity(tiny())})
    with kvstrata.compress(tiny(), f"kvzap:file={tmp_path / 'own'}"):
        pass
    (folder / "config.json").write_text("{")
    with pytest.raises(SpecError, match="no surrogate that can be read"):
        read_surrogate(folder)
    with pytest.raises(SpecError, match="not both"):
        kvstrata.policy.parse_policy("kvzap:budget=25%,tau=-3")


@torch.no_grad()
def test_embeddings_cannot_be_repeated():
    with kvstrata.compress(tiny(), "kvzip:budget=25%", tokenizer=Tokenizer()) as cache:
        with pytest.raises(InputError, match="feed token ids"):
            tiny()(inputs_embeds=torch.randn(1, 20, WIDTH), **kv(cache))
        assert cache.get_seq_length() == 0


def test_a_model_that_hides_its_hidden_states_is_refused(folder, monkeypatch):
    monkeypatch.setattr("kvstrata.hf.signals.attention_modules", lambda model: [])
    with kvstrata.compress(tiny(), f"kvzap:file={folder}") as cache:
        with pytest.raises(UnsupportedModelError, match="hidden states"):
            tiny()(prompt(20), **kv(cache))
        assert cache.get_seq_length() == 0


# -- the repetition ---------------------------------------------------------------------------------------------


def by_hand(model, ids, request, chunk):
    """KVzip's and KVzip+'s scores [L][2, H, T] from whole attention matrices of transformers' own cache."""
    found = [torch.full((2, HEADS, len(ids)), LEAST) for _ in range(LAYERS)]
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        lead = [*request.later, *ids[max(0, start - 8) : start]] if start else request.first
        fed = torch.tensor([[*lead, *request.after, *part]])
        cache, seen = stock(model), {}
        model(torch.tensor([ids]), **kv(cache))
        hooks = []
        for layer in model.model.layers:

            def note(module, args, kwargs, seen=seen):
                h = kwargs["hidden_states"]
                q = module.q_proj(h).view(1, h.shape[1], -1, 16).transpose(1, 2)
                cos, sin = kwargs["position_embeddings"]
                half = torch.cat([-q[..., 8:], q[..., :8]], -1)
                seen[module.layer_idx] = (q * cos + half * sin, h[0])

            hooks.append(layer.self_attn.register_forward_pre_hook(note, with_kwargs=True))
        model(fed, **kv(cache))
        for hook in hooks:
            hook.remove()
        for i in range(LAYERS):
            q, h = seen[i]
            k, v = cache.layers[i].keys[0], cache.layers[i].values[0]
            place = [*range(min(4, start)), *range(start, start + len(part))]
            own = list(range(len(ids), k.shape[1]))
            wo = model.model.layers[i].self_attn.o_proj.weight.unflatten(1, (4, 16))
            for g in range(4):
                s = q[0, g] @ k[g // 2][place + own].T / 4
                hidden = torch.ones(len(own), len(own)).triu(1).bool()
                s[:, len(place) :].masked_fill_(hidden, -math.inf)
                p = s.softmax(-1)[:, min(4, start) : len(place)]  # [R, chunk]
                weight = torch.stack([(wo[:, g] @ v[g // 2, t]).norm() for t in range(start, start + len(part))])
                plus = (p / h.norm(dim=-1)[:, None]).amax(0) * weight
                for kind, value in enumerate((p.amax(0), plus)):
                    row = found[i][kind, g // 2, start : start + len(part)]
                    row.copy_(torch.maximum(row, value))
    return found


@torch.no_grad()
@pytest.mark.parametrize("chunk", [200, 25])
@pytest.mark.parametrize("block", [1 << 21, 300])
def test_scores_of_the_repetition_are_those_of_whole_matrices(monkeypatch, chunk, block):
    monkeypatch.setattr("kvstrata.hf.repeat.CHUNK", chunk)
    monkeypatch.setattr("kvstrata.kernels.mass.ref.BLOCK_ELEMENTS", block)
    ids, request = prompt(60)[0].tolist(), Request([5, 6, 7], [8, 9], [10])
    with kvstrata.compress(tiny(), "kvzip+", tokenizer=Tokenizer()) as cache:
        with cache.prefilling(), pytest.raises(InputError, match="not in parts"):
            tiny()(torch.tensor([ids]), **kv(cache))
        cache.reset()
        tiny()(torch.tensor([ids])[:, :60], **kv(cache))
        cache.reset()
    with kvstrata.compress(tiny(), "kvzip+:budget=100%", tokenizer=Tokenizer()) as cache:
        tiny()(torch.tensor([ids]), **kv(cache))
        got = repeat(tiny(), cache, ids, 0, request)
        for layer, true in zip(got, by_hand(tiny(), ids, request, chunk), strict=True):
            assert torch.allclose(layer, true, rtol=2e-4, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["kvzip", "kvzip+"])
def test_generate_under_the_oracle(name):
    ids = torch.cat([torch.cat([torch.zeros(1, 10, dtype=torch.long), prompt(70)], 1), prompt(80, seed=2)])
    mask = (torch.arange(80)[None] >= torch.tensor([[10], [0]])).long()
    with kvstrata.compress(tiny(), f"{name}:budget=25%", tokenizer=Tokenizer()) as cache:
        tiny().generate(ids, attention_mask=mask, **kv(cache), max_new_tokens=8)
        for row, seen in enumerate((70, 80)):
            held = sum(sum(layer.store.lengths()[row]) for layer in cache.strata.values())
            assert held == (seen // 4 + 7) * LAYERS * HEADS, "generated tokens stay"
        alone = tiny().generate
        with kvstrata.compress(tiny(), f"{name}:budget=25%", tokenizer=Tokenizer()) as other:
            alone(prompt(80, seed=2), **kv(other), max_new_tokens=8)
            assert [other.entries(1, 0, h) for h in (0, 1)] == [cache.entries(1, 1, h) for h in (0, 1)]


@torch.no_grad()
@pytest.mark.parametrize("policy", ["kvzip+:budget=30%", "h2o:budget=30%", "echo:budget=30%"])
def test_a_prefilled_cache_goes_on_as_one_that_read_the_prompt_itself(policy):
    ids, more = prompt(80, 2), prompt(5, 2, seed=7)
    with kvstrata.prefill(tiny(), ids, policy, tokenizer=Tokenizer()) as cache:
        assert cache.get_seq_length() == 80
        assert cache.report().layers[0].evicted
        got = tiny().generate(torch.cat([ids, more], dim=1), **kv(cache), max_new_tokens=8, do_sample=False)
    with kvstrata.compress(tiny(), policy, tokenizer=Tokenizer()) as cache:
        tiny()(ids, **kv(cache))
        assert torch.equal(
            got, tiny().generate(torch.cat([ids, more], dim=1), **kv(cache), max_new_tokens=8, do_sample=False)
        )


def test_without_a_tokenizer_the_oracle_is_refused_by_name():
    with pytest.raises(SpecError, match=r"'kvzip' has the model repeat its prompt: pass compress\(tokenizer"):
        kvstrata.compress(tiny(), "kvzip").__enter__()


def test_a_request_is_the_request_of_the_paper_in_the_model_s_template():
    found = request_of(Tokenizer())
    assert found.first != found.later
    assert found.after == [ord("\n") % 120 + 1]
