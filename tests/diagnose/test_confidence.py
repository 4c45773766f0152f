"""What hiding a part of the past does, and how figures are related."""

import copy
import math

import pytest
import torch

from kvstrata.core import InputError, SpecError
from kvstrata.diagnose.confidence import ABLATIONS, Ablation, pearson, samples, spearman
from kvstrata.diagnose.isolation import isolate, variants
from kvstrata.diagnose.traces import trace

from ..contract.runs import prompt, tiny


def test_what_an_ablation_hides():
    assert Ablation(0, 256).hidden(300) == slice(44, 300)
    assert Ablation(32, 256).hidden(300) == slice(12, 268)
    assert Ablation(32, None, 4).hidden(300) == slice(4, 268)
    assert Ablation(32, None, 4).hidden(20) == slice(4, 4), "nothing"


def test_correlations():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(pearson([1, 1], [1, 2]))
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert spearman([1, 1, 2, 2], [5, 5, 7, 7]) == pytest.approx(1)


@torch.no_grad()
def test_hiding_equals_a_forward_in_which_the_newest_query_sees_less():
    """Against one forward of the whole text under a mask of its own, with eager attention."""
    ids = prompt(60)[0].tolist()
    [sample] = samples(tiny(), [ids], 1, first=50)
    t = sample.position
    given = torch.tensor(ids[: t + 1])[None]
    allowed = torch.ones(t + 1, t + 1, dtype=torch.bool).tril()
    full = tiny()(given).logits[0, -1].log_softmax(-1)
    for name, ablation in ABLATIONS.items():
        seen = allowed.clone()
        seen[-1, ablation.hidden(t)] = False
        mask = torch.zeros(1, 1, t + 1, t + 1).masked_fill(~seen, torch.finfo(torch.float32).min)
        other = tiny()(given, attention_mask=mask).logits[0, -1].log_softmax(-1)
        expected = float((full.exp() * (full - other)).sum())
        assert sample.kl[name] == pytest.approx(expected, abs=1e-4), name


def test_samples_are_spread_and_the_same_every_time():
    texts = [prompt(80, seed=1)[0].tolist(), prompt(80, seed=2)[0].tolist()]
    found = samples(tiny(), texts, 6, first=40)
    assert [s.document for s in found] == [0, 0, 0, 1, 1, 1]
    assert all(40 <= s.position < 80 for s in found)
    assert found == samples(tiny(), texts, 6, first=40)
    with pytest.raises(InputError, match="longer texts"):
        samples(tiny(), texts, 6)


def test_every_variant_drops_as_many_at_the_same_steps():
    ids = prompt(90)[0].tolist()
    rows = isolate(tiny(), "confkv:high=12,low=24,recent=4,tau=0.31,window=8", [ids], 40)
    drops = {(row.evicted, row.evicting) for row in rows if row.variant != "full"}
    assert len(drops) == 1
    assert drops.pop()[0] > 0
    nats = {row.variant: row.nats for row in rows}
    assert len(set(nats.values())) == 5, "and yet they choose differently"


def test_isolation_needs_a_policy_that_follows_confidence():
    for policy in ("h2o", "echo"):  # the latter waits for the other layers
        with pytest.raises(SpecError, match="does not follow confidence"):
            variants(policy)
    assert set(variants("confkv-l")) == {"as it is", "random", "recency", "attention"}


@torch.no_grad()
def test_a_trace_has_the_attention_of_a_full_cache():
    ids = prompt(30)[0].tolist()
    found = trace(tiny(), ["window:budget=8"], ids, 20, every=4)["window:budget=8"]
    assert len(found) == 3
    assert found[0].mass.shape == (10, 2, 30)
    assert torch.allclose(found[0].mass.sum(dim=2), torch.ones(10, 2), atol=1e-4)
    eager = tiny().__class__(copy.deepcopy(tiny().config))
    eager.load_state_dict(tiny().state_dict())
    eager.eval().set_attn_implementation("eager")
    weights = eager(torch.tensor(ids)[None], output_attentions=True).attentions
    for layer in range(3):
        of_groups = weights[layer][0].unflatten(0, (2, -1)).mean(dim=1).transpose(0, 1)[20:]  # [S, H, T]
        assert torch.allclose(found[layer].mass, of_groups, atol=1e-4)
        assert found[layer].events.tolist() == [0, 4, 8]
        kept = found[layer].tier[1].nonzero().flatten().tolist()
        assert kept == list(range(16, 24))
