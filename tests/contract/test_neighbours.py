"""Methods that ask what entries add, or what queries to come will ask for: against the same said in plain torch."""

from fractions import Fraction

import pytest
import torch

import kvstrata
from kvstrata.calibrate.duo import looking_back, shares_of
from kvstrata.calibrate.heads import calibrate_heads, write_heads
from kvstrata.core import InputError, UnsupportedModelError
from kvstrata.policy.shares import read_shares

from . import families
from .runs import feed, kv, prompt, stock, tiny
from .test_masking import compressed, replay
from .test_padding import padded_batch

POLICIES = ["criticalkv:budget=16,window=4", "expected:budget=16,positions=32", "lagkv:budget=16,lag=6"]
POLICIES += ["defensivekv:budget=16,window=4", "defensivekv-layer:budget=16,window=4"]
POLICIES += ["expected-ada:budget=16,positions=32", "duo:budget=16"]


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_compaction_equals_masking(policy):
    model, ids = tiny(), prompt(80, 2)
    logits, schedule = compressed(model, ids, policy)
    assert min(len(kept) for layer in schedule[1] for row in layer for kept in row) < 40
    assert (logits - replay(model, ids, schedule)).abs().max() <= 1e-5 * logits.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_a_padded_row_equals_the_row_alone(policy):
    ids, mask, rows = padded_batch(new=4)
    with kvstrata.compress(tiny(), policy) as together:
        batch = feed(tiny(), ids, together, (40,), mask)
    for index, row in enumerate(rows):
        with kvstrata.compress(tiny(), policy) as alone:
            solo = feed(tiny(), row[None], alone, (len(row) - 4,))
        assert (batch[index, -len(row) :] - solo[0]).abs().max() <= 1e-5 * solo.abs().max()
        for layer in together.strata:
            assert together.entries(layer, index, 1) == alone.entries(layer, 0, 1)


@torch.no_grad()
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_in_parts_keeps_what_the_prompt_at_once_keeps(policy):
    ids = prompt(70)
    with kvstrata.compress(tiny(), policy) as once:
        tiny()(ids, **kv(once))
    with kvstrata.compress(tiny(), policy) as parts, parts.prefilling():
        for chunk in ids.split(30, dim=1):
            tiny()(chunk, **kv(parts))
    for layer in once.strata:
        assert [once.entries(layer, 0, h) for h in (0, 1)] == [parts.entries(layer, 0, h) for h in (0, 1)]


def seen_by(model, ids):
    """What each layer's attention has: queries before rotary positions [H*G, T, D], keys after it, values [H, T, D]."""
    queries, cache = {}, stock(model)

    def note(module, args, kwargs):
        q = module.q_proj(kwargs["hidden_states"])
        queries[module.layer_idx] = q[0].unflatten(-1, (-1, module.head_dim)).transpose(0, 1)

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in model.model.layers]
    model(ids, **kv(cache))
    for hook in hooks:
        hook.remove()
    return [(queries[i], layer.keys[0], layer.values[0]) for i, layer in enumerate(cache.layers)]


def expected_by_hand(model, q, k, v, positions, sinks):
    """Expected Attention [H, T - sinks] with the model's own rotation, position by position."""
    length, dim = q.shape[1], q.shape[2]
    q = q[:, sinks:]
    mean, covariance = q.mean(dim=1), torch.stack([head.T.cov(correction=0) for head in q])
    at = torch.arange(length, length + positions)[None]
    cos, sin = (t[0] for t in model.model.rotary_emb(q, at))
    half = torch.eye(dim // 2)
    turn = torch.zeros(dim, dim)
    turn[dim // 2 :, : dim // 2], turn[: dim // 2, dim // 2 :] = half, -half
    matrix = (cos[:, :, None] * torch.eye(dim) + sin[:, :, None] * turn).mean(dim=0)
    mean, covariance = mean @ matrix.T, matrix @ covariance @ matrix.T
    group, found = q.shape[0] // k.shape[0], []
    for head, keys in enumerate(k[:, sinks:]):
        shares = []
        for of in range(head * group, (head + 1) * group):
            logits = [keys_i @ mean[of] / dim**0.5 + keys_i @ covariance[of] @ keys_i / dim / 2 for keys_i in keys]
            shares.append(torch.stack(logits).softmax(dim=0))
        found.append(torch.stack(shares).mean(dim=0) * v[head, sinks:].norm(dim=-1))
    return torch.stack(found)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_expected_attention_is_that_of_its_formula(kernels):
    model, ids = tiny(), prompt(60)
    with kvstrata.compress(model, "expected:budget=20,positions=24,sinks=4", kernels=kernels) as cache:
        model(ids, **kv(cache))
    for layer, (q, k, v) in enumerate(seen_by(model, ids)):
        z = expected_by_hand(model, q, k, v, 24, 4)
        for head in range(2):
            best = sorted((z[head].topk(16).indices + 4).tolist())
            assert cache.entries(layer, 0, head) == [0, 1, 2, 3, *best]


def attention_of_the_newest(model, ids, rows):
    """Of the last queries, by layer [H*G, rows, T]."""
    model.set_attn_implementation("eager")
    try:
        return [p[0, :, -rows:] for p in model(ids, output_attentions=True).attentions]
    finally:
        model.set_attn_implementation("sdpa")


@torch.no_grad()
def test_defensivekv_is_that_of_its_formula():
    model, ids, window, budget = tiny(), prompt(60), 4, 20
    with kvstrata.compress(model, f"defensivekv-layer:budget={budget},window={window},pool=1") as cache:
        model(ids, **kv(cache))
    ranked, newest = {}, attention_of_the_newest(model, ids, window)
    for layer, (p, (_, _, v)) in enumerate(zip(newest, seen_by(model, ids), strict=True)):
        project = model.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, 16))
        norms = (
            torch.stack([(v[of // 2] @ project[:, of].T).norm(dim=-1) for of in range(4)]).view(2, 2, 60).mean(dim=1)
        )
        for head in range(2):
            mine = p[2 * head : 2 * head + 2]
            largest, mean = mine.amax(dim=(0, 1))[:56], mine.mean(dim=(0, 1))
            z = largest.clamp_min(largest.mean()) * (norms[head] / norms.sum(dim=0))[:56]
            share, taken = mean[:56] / mean[:56].sum(), 0.0
            for rank, i in enumerate(sorted(range(56), key=lambda i: -float(share[i]))):
                taken += float(share[i])
                if taken >= 0.9 - float(mean[56:].sum()) or rank >= budget - window:
                    break
                z[i] = torch.inf
            ranked |= {(layer, head, i): (float(z[i]), i) for i in range(56)}
    best = sorted(ranked, key=ranked.get, reverse=True)[: 6 * (budget - window)]
    for layer in range(3):
        for head in range(2):
            kept = sorted(i for one, of, i in best if (one, of) == (layer, head))
            assert cache.entries(layer, 0, head) == [*kept, 56, 57, 58, 59]


@torch.no_grad()
def test_criticalkv_is_that_of_its_formula():
    model, ids, window, budget = tiny(), prompt(60), 4, 20
    with kvstrata.compress(model, f"criticalkv:budget={budget},window={window},pool=1") as cache:
        model(ids, **kv(cache))
    with kvstrata.compress(model, "h2o:budget=100%") as asked:  # attention of the last four queries alone
        model(ids[:, :-window], **kv(asked))
        before = [layer.store.column("mass").clone() for layer in asked.strata.values()]
        model(ids[:, -window:], **kv(asked))
        after = [layer.store.column("mass") for layer in asked.strata.values()]
    for layer, (_, _, v) in enumerate(seen_by(model, ids)):
        mass = after[layer][0].clone()
        mass[:, : 60 - window] -= before[layer][0]
        project = model.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (4, 16))  # [hidden, H*G, D]
        for head in range(2):
            norms = [(v[head] @ project[:, of].T).norm(dim=-1) for of in (2 * head, 2 * head + 1)]
            free = range(60 - window)
            by_mass = sorted(free, key=lambda i: -float(mass[head, i]))
            first, rest = by_mass[: budget // 2 - window], by_mass[budget // 2 - window :]
            worth = (mass[head] + 1e-4) * torch.stack(norms).mean(dim=0)
            then = sorted(rest, key=lambda i: -float(worth[i]))[: budget // 2]
            assert cache.entries(layer, 0, head) == sorted([*first, *then, *range(56, 60)])


@torch.no_grad()
@pytest.mark.parametrize(("family", "message"), [("gpt2", "none that"), ("smollm3", "some of"), ("gemma2", "caps its")])
def test_models_without_what_expected_attention_needs_are_refused_by_name(family, message):
    model = families.family(family)
    with pytest.raises(UnsupportedModelError, match=message), kvstrata.compress(model, "expected:budget=10") as cache:
        model(torch.arange(1, 30)[None], **kv(cache))


@torch.no_grad()
def test_heads_that_look_back_are_kept_whole(tmp_path):
    model, file = tiny(), tmp_path / "duo.json"
    documents = [prompt(100, seed=seed)[0].tolist() for seed in range(2)]
    worth = looking_back(model, documents)
    assert worth.shape == (3, 2)
    assert torch.equal(worth, looking_back(model, documents)), "the same draws"
    assert 0 < float(worth.min()) <= float(worth.max()) < 1
    found = calibrate_heads(model, "duo", documents, [Fraction(1, 2)])
    write_heads(file, model, "duo", {"a.txt": "text"}, found)
    assert read_shares(file).levels[0][1] == tuple(map(tuple, found[Fraction(1, 2)].kept))
    with kvstrata.compress(model, f"duo:budget=50%,heads={file}") as cache:
        model(prompt(120, seed=5), **kv(cache))
        lengths = {(i, h): len(cache.entries(i, 0, h)) for i in range(3) for h in range(2)}
    best = sorted(lengths, key=lambda at: -float(worth[at]))
    assert [lengths[at] for at in best[:2]] == [120, 120], "two of six, since the others keep something"
    assert len({lengths[at] for at in best[2:]}) <= 2
    assert sum(lengths.values()) == 60 * 6
    with pytest.raises(InputError, match="every head the same"):
        calibrate_heads(model, "snapkv", documents, [Fraction(1, 2)])


@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_shares_of_heads_have_the_mean_that_was_asked_for(share):
    worth = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor(shares_of(worth, Fraction(share)))
    assert float(kept.double().mean()) == pytest.approx(share, abs=1e-6)
    assert float(kept.min()) > 0
    whole = kept == 1
    assert not bool(whole.any()) or float(worth[whole].min()) >= float(worth[~whole].max() if (~whole).any() else 0)
