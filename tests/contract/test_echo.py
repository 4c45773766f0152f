"""The scorer echo in a cache: its scores by the definition, however the tokens come, and what is kept by them."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvstrata
from kvstrata.cache import Layer
from kvstrata.core import SpecError, UnsupportedModelError
from kvstrata.hf.parts import outputs_of

from .families import FAMILIES, SIZES, build, frozen
from .runs import feed, kv, prompt, tiny

ALL_STAY = "echo:budget=100%"
weights = pytest.mark.parametrize("policy", [ALL_STAY, f"{ALL_STAY},weight=u+"])
BAND, SHIFT, SINKS = 4, 512, 4


@pytest.fixture
def seen(monkeypatch):
    """Queries, keys and values of every layer, as attention gets them."""
    parts, attend = {}, Layer.attend

    def note(self, q, k, v, *args, **kwargs):
        parts.setdefault(self.index, []).append((q, k, v))
        return attend(self, q, k, v, *args, **kwargs)

    monkeypatch.setattr(Layer, "attend", note)
    return parts


def defined(model, layer, q, k, v, hidden=None):
    """docs/methods.md word by word, for one row in float64: scores [H, T] before the logarithm; of u+ with `hidden`."""
    (group, dim), tokens = (q.shape[0] // k.shape[0], q.shape[2]), q.shape[1]
    cos, sin = model.model.rotary_emb(q.float(), torch.full((1, tokens), SHIFT))
    later = apply_rotary_pos_emb(q[None], q[None], cos, sin)[0][0].double()
    q, k, v = q.double(), k.double(), v.double()
    output = model.model.layers[layer].self_attn.o_proj.weight.double().unflatten(1, (-1, dim))
    found = torch.zeros(k.shape[0], tokens, dtype=torch.float64)
    for g in range(q.shape[0]):
        h = g // group
        asked = torch.full((tokens,), -math.inf, dtype=torch.float64)
        for j in range(tokens - BAND):  # the last ones wait for the keys of their band
            copy = torch.tensor([q[g, j] @ k[h, s] for s in range(SINKS, j + 1)]) * dim**-0.5
            band = [i for i in range(j - BAND, j + BAND + 1) if i >= SINKS]
            near = torch.stack([later[g, j] @ k[h, i] for i in band]) * dim**-0.5
            first = torch.stack([later[g, j] @ k[h, s] for s in range(min(SINKS, tokens))]) * dim**-0.5
            total = torch.cat([copy.double(), near, first]).logsumexp(0)
            loudness = 0 if hidden is None else hidden[j].double().norm().log()
            for i, score in zip(band, near, strict=True):
                asked[i] = max(asked[i], score - total - loudness)
        weight = torch.stack([(output[:, g] @ v[h, i]).norm() for i in range(tokens)])
        found[h] = torch.maximum(found[h], asked.exp() * weight)
    return found


def scores(cache, layer, row=0):
    """What was asked [H, T], by position."""
    store = cache.strata[layer].store
    position, valid = store.column("position")[row], store.valid()[row]
    found = torch.zeros(position.shape[0], int(position.max()) + 1)
    for head in range(len(found)):
        found[head, position[head][valid[head]].long()] = store.column("asked")[row, head][valid[head]]
    return found


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["auto", "reference", "exact"])
def test_scores_are_those_of_the_definition(seen, kernels):
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, ALL_STAY, kernels=kernels) as cache:
        model(ids, **kv(cache))
        for layer in range(3):
            q, k, v = (part[0] for part in seen[layer][0])
            # the first tokens have hardly anything in their past but sinks, of which a rest that small is not exact
            true, got = defined(model, layer, q, k, v)[:, SINKS:], scores(cache, layer)[:, SINKS:]
            assert (got - true).abs().max() <= 2e-4 * true.max()
            assert torch.equal(got[:, -BAND:] > 0, true[:, -BAND:] > 0)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_u_plus_divides_by_the_norms_of_hidden_states(seen, kernels):
    model, ids, hidden = copy.deepcopy(tiny()), prompt(60), []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_hook(lambda _, __, out: hidden.append(out[0]))
    with kvstrata.compress(model, "echo:budget=100%,weight=u+", kernels=kernels) as cache:
        model(ids, **kv(cache))
        for layer in range(3):
            q, k, v = (part[0] for part in seen[layer][0])
            true = defined(model, layer, q, k, v, hidden[layer])[:, SINKS:]
            assert (scores(cache, layer)[:, SINKS:] - true).abs().max() <= 2e-4 * true.max()


@torch.no_grad()
@pytest.mark.parametrize(
    "lengths", [[30, 30, 30], [60, *[1] * 30], [20, *[1] * 20, 50], [90]], ids=["parts", "decode", "turns", "at-once"]
)
@pytest.mark.parametrize("weight", ["u*wov", "u+"])
def test_scores_do_not_depend_on_how_the_tokens_come(lengths, weight):
    ids, policy = prompt(110), f"echo:budget=100%,room=1,weight={weight}"
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(ids, **kv(cache))
        whole = [scores(cache, layer) for layer in range(3)]
    with kvstrata.compress(tiny(), policy) as cache:
        feed(tiny(), ids[:, :90], cache, lengths)
        feed(tiny(), ids[:, 90:], cache, [20])
        for layer in range(3):
            assert (scores(cache, layer) - whole[layer]).abs().max() <= 1e-4 * whole[layer].max()


@torch.no_grad()
@weights
def test_a_padded_row_asks_as_if_alone(policy):
    long, short = prompt(110), prompt(90, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 20, dtype=torch.long), short], dim=1)])
    mask = (torch.arange(110)[None] >= torch.tensor([[0], [20]])).long()
    with kvstrata.compress(tiny(), policy) as cache:
        feed(tiny(), ids, cache, [60, 30, 20], mask)
        both = [scores(cache, 1, row) for row in range(2)]
    for row, own in enumerate((long, short)):
        with kvstrata.compress(tiny(), policy) as alone:
            tiny()(own, **kv(alone))
            expected = scores(alone, 1)
            assert (both[row] - expected).abs().max() <= 1e-4 * expected.max()


@torch.no_grad()
@weights
def test_rows_that_are_all_padded_alike_ask_as_if_alone(policy):
    ids = prompt(60)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    with kvstrata.compress(tiny(), policy) as cache, kvstrata.compress(tiny(), policy) as alone:
        feed(tiny(), padded, cache, [67], (torch.arange(67)[None] >= 7).long())
        tiny()(ids, **kv(alone))
        expected = scores(alone, 1)
        assert (scores(cache, 1) - expected).abs().max() <= 1e-4 * expected.max()


@torch.no_grad()
@weights
def test_a_beam_a_crop_and_a_fork_ask_as_if_alone(policy):
    first, other, more = prompt(70), prompt(70, seed=2), prompt(30, seed=3)
    with kvstrata.compress(tiny(), policy) as alone:
        tiny()(torch.cat([other, more], dim=1), **kv(alone))
        expected = scores(alone, 1)
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(torch.cat([first, other]), **kv(cache))
        cache.reorder_cache(torch.tensor([1, 1]))
        feed(tiny(), prompt(6, 2, seed=9), cache, [])
        cache.crop(-6)
        twin = cache.fork()
        feed(tiny(), prompt(6, 2, seed=9), twin, [])
        twin.crop(-6)
        for one in (cache, twin):
            feed(tiny(), more.expand(2, 30), one, [30])
            for row in range(2):
                # the crop took back keys that the newest queries before it had not asked yet
                assert (scores(one, 1, row) - expected).abs().max() <= 1e-4 * expected.max()


@torch.no_grad()
@weights
def test_drafts_ask_once_they_are_taken(policy):
    ids, drafts = prompt(60), prompt(8, seed=4)
    with kvstrata.compress(tiny(), policy) as plain:
        tiny()(ids, **kv(plain))
        tiny()(torch.cat([drafts[:, :3], prompt(30, seed=5)], dim=1), **kv(plain))
        expected = scores(plain, 2)
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(ids, **kv(cache))
        cache.activate_past_recording()
        tiny()(drafts, **kv(cache))
        cache.crop(-5)
        cache.layers[0].record_past = False
        tiny()(prompt(30, seed=5), **kv(cache))
        assert (scores(cache, 2) - expected).abs().max() <= 1e-4 * expected.max()


@torch.no_grad()
def test_a_prompt_that_comes_with_drafts_asks_without_those_taken_back():
    ids, drafts = prompt(60), prompt(8, seed=4)
    with kvstrata.compress(tiny(), ALL_STAY) as plain:
        tiny()(ids, **kv(plain))
        expected = scores(plain, 2)
    with kvstrata.compress(tiny(), ALL_STAY) as cache:
        cache.activate_past_recording()
        tiny()(torch.cat([ids, drafts], dim=1), **kv(cache))
        cache.crop(-8)
        cache.layers[0].record_past = False
        assert (scores(cache, 2) - expected).abs().max() <= 1e-4 * expected.max()


def held(cache):
    return [sum(sum(row) for row in layer.store.lengths()) for layer in cache.strata.values()]


@torch.no_grad()
@pytest.mark.parametrize("policy", ["echo:budget=30,window=8,room=1", "echo:budget=30,window=8,room=6"])
def test_all_heads_share_one_budget_at_every_step(policy):
    ids = prompt(140)
    with kvstrata.compress(tiny(), policy) as cache:
        for start, stop in [(0, 100), *((i, i + 1) for i in range(100, 140))]:
            tiny()(ids[:, start:stop], **kv(cache))
            assert not cache.engine.waits
            assert sum(held(cache)) <= 30 * 3 * 2
        assert sum(held(cache)) > 24 * 3 * 2
        lengths = [n for layer in cache.strata.values() for n in layer.store.lengths()[0]]
        assert len(set(lengths)) > 2, "heads of different layers compete"
        assert cache.report().layers[0].evicted


@torch.no_grad()
def test_a_threshold_decides_each_layer_at_once_and_needs_no_other(monkeypatch):
    ids = prompt(120)
    with kvstrata.compress(tiny(), ALL_STAY) as cache:
        tiny()(ids, **kv(cache))
        asked = {layer: scores(cache, layer).log() for layer in range(3)}
    tau = float(torch.cat([table.flatten() for table in asked.values()]).quantile(0.6))
    most = []
    with kvstrata.compress(tiny(), f"echo:tau={tau},window=8") as cache:
        act = Layer.act
        monkeypatch.setattr(Layer, "act", lambda self, *a: (most.append(sum(held(cache))), act(self, *a))[1])
        tiny()(ids, **kv(cache))
        for head in range(2):
            kept = set(cache.entries(0, 0, head))
            assert kept == {i for i in range(120) if i < 4 or i >= 112 or asked[0][head, i] >= tau}, (
                "the first layer, which nothing was dropped before"
            )
        assert max(most) < sum(held(cache)) + 120 * 2, "one layer at a time is whole"
        feed(tiny(), prompt(60, seed=6), cache, [])
        assert 4 < len(cache.entries(1)) < 180


@torch.no_grad()
@pytest.mark.parametrize("weight", ["u*wov", "u+"])
def test_a_saved_cache_asks_on_where_it_was(tmp_path, weight):
    ids, policy = prompt(120), f"echo:budget=40,window=8,weight={weight}"
    with kvstrata.compress(tiny(), policy) as cache:
        tiny()(ids[:, :90], **kv(cache))
        feed(tiny(), ids[:, 90:100], cache, [])
        cache.save(tmp_path)
        with kvstrata.compress(tiny(), policy) as other:
            other.load(tmp_path)
            assert other.nbytes.live == cache.nbytes.live
            assert torch.allclose(
                feed(tiny(), ids[:, 100:], other, []), feed(tiny(), ids[:, 100:], cache, []), atol=1e-5
            )
            assert [cache.entries(1, 0, h) for h in (0, 1)] == [other.entries(1, 0, h) for h in (0, 1)]


@torch.no_grad()
def test_a_row_may_get_no_token_in_a_step():
    """Its part of a batch is over, so it is masked out."""
    model, ids, mask = tiny(), prompt(101, 2), torch.ones(2, 101, dtype=torch.long)
    mask[0, 100] = 0
    with kvstrata.compress(model, "echo:budget=50%,weight=u") as cache:
        model(ids[:, :100], **kv(cache))
        before = [cache.entries(layer) for layer in range(3)]
        model(ids[:, 100:], attention_mask=mask, **kv(cache))
        assert [cache.entries(layer) for layer in range(3)] == before


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {}], ids=str)
def test_generate(options):
    with kvstrata.compress(tiny(), "echo:budget=30,window=8") as cache:
        out = tiny().generate(prompt(80, 2), **kv(cache), max_new_tokens=20, **options)
        assert out.shape[1] == 100
        assert sum(held(cache)) <= 30 * 3 * 2 * cache.strata[0].store.batch_size
        if "num_beams" in options:  # whose cache has a row for every beam
            return
        more = tiny().generate(torch.cat([out, prompt(30, len(out), seed=8)], dim=1), **kv(cache), max_new_tokens=8)
        assert more.shape[1] == 138


@pytest.mark.parametrize("family", ["gpt2"])
def test_models_without_rotary_positions_are_refused(family):
    config, model, sizes, _ = FAMILIES[family]
    with (
        pytest.raises(UnsupportedModelError, match="rotary positions"),
        kvstrata.compress(build(config, model, frozen(sizes)), "echo"),
    ):
        pass


@torch.no_grad()
@pytest.mark.parametrize("rope", [None, "linear", "dynamic", "yarn", "llama3"])
def test_every_kind_of_rotary_positions_turns_as_the_model_does(rope, seen):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope == "llama3" else {}
    scaled = {"rope_type": rope, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64, **more}
    parameters = scaled if rope else {"rope_type": "default", "rope_theta": 1e4}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=parameters)).eval()
    ids = prompt(100)  # more than the dynamic kind was made for
    with kvstrata.compress(model, ALL_STAY) as cache:
        model(ids, **kv(cache))
        q = seen[1][0][0]
        turned = cache.engine.model.turn(3)(q)
        cos, sin = model.model.rotary_emb(q, torch.tensor([[3]]))
        scaling = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
    if rope != "dynamic":  # whose angles went back when it was asked about a short text
        assert torch.allclose(turned, apply_rotary_pos_emb(q, q, cos / scaling, sin / scaling)[0], atol=1e-4)
    assert scores(cache, 1)[:, 4:90].min() > 0


def test_outputs_give_the_norm_of_what_the_projection_makes_of_a_value():
    model, v = tiny(), torch.randn(7, 16)
    weight = model.model.layers[2].self_attn.o_proj.weight.detach().unflatten(1, (4, 16))
    found = outputs_of(model, [2])[2]
    for head in range(4):
        assert torch.allclose((v @ found[head]).norm(dim=-1), (v @ weight[:, head].T).norm(dim=-1), rtol=1e-4)


def test_a_model_whose_projection_is_not_found_is_told_what_to_do(monkeypatch):
    monkeypatch.setattr("kvstrata.hf.parts.OUTPUT", ("nothing",))
    with pytest.raises(UnsupportedModelError, match="echo:weight=u"), kvstrata.compress(tiny(), "echo"):
        pass
    with kvstrata.compress(tiny(), "echo:weight=u") as cache, torch.no_grad():
        tiny()(prompt(200), **kv(cache))
        assert sum(held(cache)) == 50 * 3 * 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("echo:band=40", "band of 1 to 64"),
        ("echo:shift=0", "1 or more"),
        ("echo:budget=20%,tau=-3", "not both"),
        ("echo:weight=v", "weight"),
        ("echo:heads=nowhere.json", "calibrate heads"),
        ("pyramidkv:heads=nowhere.json", "calibrate heads"),
    ],
)
def test_bad_options_say_what_is_wrong(spec, message):
    with pytest.raises(SpecError, match=message):
        kvstrata.policy.parse_policy(spec)


@torch.no_grad()
def test_phases_and_layers_weigh_as_they_say(tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text('layers:\n  0-: {prefill: "echo-head:weight=u", decode: "echo-head:weight=u+"}\n')
    with pytest.raises(SpecError, match="ask in two ways"), kvstrata.compress(tiny(), file):
        pass
    file.write_text('layers:\n  0: "echo-head:budget=100%,weight=u"\n  1-: "echo-head:budget=100%"\n')
    ids = prompt(60)
    with kvstrata.compress(tiny(), file) as mixed, kvstrata.compress(tiny(), "echo:budget=100%,weight=u") as plain:
        for cache in (mixed, plain):
            tiny()(ids, **kv(cache))
        assert torch.equal(scores(mixed, 0), scores(plain, 0))
        assert not torch.equal(scores(mixed, 1), scores(plain, 1))
