"""CONF-KV: the logits of a step decide how much may stay, row by row; checked against the paper's algorithm."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessorList, TemperatureLogitsWarper
from transformers.masking_utils import sdpa_mask

import kvstrata
from kvstrata.hf import SignalLogits
from kvstrata.policy.confidence import confidence

from .runs import TWO_LEVELS, feed, kv, prompt, stock, tiny

LAMBDA, ALPHA = 0.9, 0.65


class Oracle:
    """Algorithm 1 over lists of positions, one row, on a full cache with masks; nothing of the package is used."""

    def __init__(self, high, low, recent, tau):
        self.high, self.low, self.recent, self.tau = high, low, recent, tau
        self.kept = [[] for _ in range(3)]
        self.ema = [{} for _ in range(3)]
        self.sure = []

    def attention(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer, queries, keys = module.layer_idx, query.shape[2], key.shape[2]
        new = range(keys - queries, keys)
        visible = torch.zeros(queries, keys, dtype=torch.bool)
        visible[:, self.kept[layer]] = True
        visible[:, keys - queries :] = torch.ones(queries, queries, dtype=torch.bool).tril()
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        p = (query @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -torch.inf).softmax(-1)
        self.kept[layer] += new
        for row in p[0].mean(0):  # over the heads, query after query
            for position in self.kept[layer]:
                self.ema[layer][position] = LAMBDA * self.ema[layer].get(position, 0.0) + (1 - LAMBDA) * float(
                    row[position]
                )
        return (p @ value).transpose(1, 2), None

    def end_step(self, logits):
        log_p = logits.double().log_softmax(-1)
        p, top = log_p.exp(), log_p.topk(2).values
        entropy = -(p * log_p).sum() / torch.tensor(float(len(p))).log()
        c = float(0.4 * (1 - entropy) + 0.3 * (top[0] - top[1]).sigmoid() + 0.3 * top[0].exp())
        self.sure.append(c)
        limit = self.high if c >= self.tau else self.low
        for layer, kept in enumerate(self.kept):
            if len(kept) > limit:
                candidates = kept[: -self.recent]
                ema, age = [self.ema[layer][j] for j in candidates], [float(j) for j in candidates]
                score = [ALPHA * a + (1 - ALPHA) * r for a, r in zip(minmax(ema), minmax(age), strict=True)]
                order = sorted(range(len(candidates)), key=lambda i: (score[i], candidates[i]))
                gone = {candidates[i] for i in order[: len(kept) - limit]}
                self.kept[layer] = [j for j in kept if j not in gone]


def minmax(values):
    low, high = min(values), max(values)
    return [0.0] * len(values) if high == low else [(v - low) / (high - low) for v in values]


@torch.no_grad()
def test_every_step_is_that_of_the_paper_s_algorithm():
    model, ids = tiny(), prompt(100)
    oracle, full = Oracle(high=20, low=32, recent=4, tau=0.31), stock(tiny())
    AttentionInterface.register("confkv-oracle", oracle.attention)
    AttentionMaskInterface.register("confkv-oracle", sdpa_mask)
    expected, kept = [], []
    model.config._attn_implementation = "confkv-oracle"
    try:
        for start, stop in [(0, 40), *((t, t + 1) for t in range(40, 100))]:
            expected.append(model(ids[:, start:stop], **kv(full)).logits)
            oracle.end_step(expected[-1][0, -1])
            kept.append([list(layer) for layer in oracle.kept])
    finally:
        model.config._attn_implementation = "sdpa"
    levels = [c >= 0.31 for c in oracle.sure]
    assert 15 < sum(levels) < 46, "both levels must be reached often"
    with kvstrata.compress(model, "confkv:high=20,low=32,recent=4,tau=0.31") as cache:
        for step, (start, stop) in enumerate([(0, 40), *((t, t + 1) for t in range(40, 100))]):
            logits = model(ids[:, start:stop], **kv(cache)).logits
            assert (logits - expected[step]).abs().max() <= 1e-5 * expected[step].abs().max()
            assert cache.confidence[0] == pytest.approx(oracle.sure[step], abs=1e-5)
            assert [cache.entries(layer) for layer in range(3)] == kept[step]


@torch.no_grad()
def test_the_length_is_a_sawtooth_between_the_two_levels():
    model, ids = tiny(), prompt(120)
    with kvstrata.compress(model, TWO_LEVELS) as cache:
        model(ids[:, :40], **kv(cache))
        length = len(cache.entries(1))
        for step in range(40, 120):
            model(ids[:, step : step + 1], **kv(cache))
            length = 7 if cache.confidence[0] >= 0.31 else min(length + 1, 14)
            assert [len(cache.entries(layer)) for layer in range(3)] == [length] * 3


def test_deeper_layers_keep_less():
    with torch.no_grad(), kvstrata.compress(tiny(), "confkv-l:high=24,low=48,recent=4,at_least=10,tau=0.99") as cache:
        tiny()(prompt(60), **kv(cache))
    assert [len(cache.entries(layer)) for layer in range(3)] == [int(48 * 0.5 ** (layer / 3)) for layer in range(3)]


@torch.no_grad()
def test_temperature_changes_the_signal_only_where_asked():
    model, ids, seen = tiny(), prompt(30), {}
    for signal in ("raw", "processed"):
        with kvstrata.compress(model, f"confkv:high=7,low=14,recent=3,tau=0.31,signal_logits={signal}") as cache:
            processors = LogitsProcessorList([TemperatureLogitsWarper(5.0), Spy(cache, seen.setdefault(signal, []))])
            options = {"do_sample": True, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
            out = model.generate(ids, **kv(cache), logits_processor=processors, **options)
        logits = torch.stack(out.logits)[:, 0]
        expected = confidence(logits / 5.0 if signal == "processed" else logits)
        assert torch.allclose(torch.tensor(seen[signal]), expected, atol=1e-6)
        assert not cache.strata[0].events.no_logits


class Spy(SignalLogits):
    """Notes the confidence that the cache has right after it was shown the scores."""

    def __init__(self, cache, into):
        super().__init__(cache)
        self.into = into

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores)
        self.into.append(self.cache.confidence[0])
        return scores


def test_processed_logits_that_never_come_count_as_unsure():
    model = tiny()
    with kvstrata.compress(model, "confkv:high=7,low=14,recent=3,signal_logits=processed") as cache:
        model.generate(prompt(30), **kv(cache), max_new_tokens=5, do_sample=False)
        assert len(cache.entries(0)) == 15, "the last forward still waits"
    assert cache.strata[0].events.no_logits == 4
    assert "forwards without logits" in str(cache.report())


def test_a_step_without_logits_is_settled_by_the_next_forward_as_unsure():
    model, ids = tiny(), prompt(60)
    with torch.no_grad(), kvstrata.compress(model, "confkv:high=7,low=14,recent=3,tau=0.16") as cache:
        model(ids[:, :40], **kv(cache))
        assert len(cache.entries(0)) == 7
        for step in range(40, 50):
            model.model(ids[:, step : step + 1], **kv(cache))
        assert len(cache.entries(0)) == 15, "14 allowed, and one that waits"
        assert "waits" not in str(cache.report()), "plans were made, so there is nothing to explain"
        model(ids[:, 50:51], **kv(cache))
        assert len(cache.entries(0)) == 7
    assert cache.report().layers[0].no_logits == 10


def test_logits_go_to_the_cache_of_the_call_and_not_to_the_last_one_opened():
    model, ids = tiny(), prompt(50)
    with torch.no_grad(), kvstrata.compress(model, TWO_LEVELS) as alone:
        feed(model, ids, alone, (40,))
    with (
        torch.no_grad(),
        kvstrata.compress(model, TWO_LEVELS) as one,
        kvstrata.compress(model, TWO_LEVELS.replace("0.31", "0.9")) as two,
    ):
        model(ids[:, :40], **kv(one))
        model(prompt(33, seed=7), **kv(two))
        for step in range(40, 50):
            model(prompt(1, seed=step), **kv(two))
            model(ids[:, step : step + 1], **kv(one))
            model(prompt(5), use_cache=False)
    assert [one.entries(layer) for layer in range(3)] == [alone.entries(layer) for layer in range(3)]
    assert not one.strata[0].events.no_logits
    assert not two.strata[0].events.no_logits
    assert not model._forward_hooks


@pytest.mark.parametrize("form", ["tuple", "loss", "positional"])
def test_logits_are_found_in_any_form_of_output(form):
    model, ids = tiny(), prompt(40)
    with torch.no_grad(), kvstrata.compress(model, TWO_LEVELS) as cache:
        if form == "positional":
            model.forward  # noqa: B018  (the third parameter of every causal model is position_ids, the fourth the cache)
            model(ids, None, None, cache)
        else:
            model(ids, **kv(cache), return_dict=False, **({"labels": ids} if form == "loss" else {}))
        assert cache.confidence is not None
        assert len(cache.entries(0)) in (7, 14)


def test_nan_in_the_logits_means_unsure_and_is_counted():
    model, ids = tiny(), prompt(40)
    weight = model.lm_head.weight
    with torch.no_grad(), kvstrata.compress(model, "confkv:high=7,low=14,recent=3,tau=0.16") as cache:
        model(ids[:, :39], **kv(cache))
        assert len(cache.entries(0)) == 7
        kept, weight.data = weight.data, weight.data * float("nan")
        try:
            model(ids[:, 39:], **kv(cache))
        finally:
            weight.data = kept
        assert len(cache.entries(0)) == 8
    assert cache.report().nan_logits == 1
    assert "NaN counted as unsure" in str(cache.report())
