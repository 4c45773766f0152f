"""Methods that write values, through a model: coded entries, heads of other lengths, layers that divide a budget."""

import pytest
import torch

import kvstrata
from kvstrata.core import Tier

from .runs import feed, kv, prompt, tiny

POOLED = (
    "layers:\n"
    "  0-:\n"
    "    prefill: &rule {{scorer: accumulated-mass, budget: 12, heads: pooled, sinks: 2, recent: 2, merge: {merge}}}\n"
    "    decode: *rule\n"
)


@pytest.fixture
def merged(monkeypatch):
    """Every plan's merges, and the tiers of what they read and wrote."""
    seen = []
    apply = kvstrata.cache.layer.LayerStore.apply

    def note(self, plan):
        if plan.merges is not None and len(plan.merges.source):
            names, m = self.tier(), plan.merges
            tiers = [[] if names is None else names[m.row, m.head, at].tolist() for at in (m.source, m.target)]
            seen.append((len(m.source), *tiers))
        return apply(self, plan)

    monkeypatch.setattr(kvstrata.cache.layer.LayerStore, "apply", note)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize(
    "policy",
    ["cam:budget=60%,against=mean,codec=int8-running,exact=16", "d2o:budget=60%,alpha=0,codec=int8-running,exact=16"],
)
def test_coded_entries_are_merged_into_exact_ones(policy, kernels, merged):
    ids = prompt(260, 2)
    with kvstrata.compress(tiny(), policy, kernels=kernels) as cache:
        logits = feed(tiny(), ids, cache, (220,))
        assert logits.isfinite().all()
        assert cache.report().layers[0].tiers["int8"] > 0
    sources = [tier for _, of, _ in merged for tier in of]
    targets = [tier for _, _, of in merged for tier in of]
    assert int(Tier.INT8) in sources
    assert set(targets) == {int(Tier.EXACT)}


@torch.no_grad()
@pytest.mark.parametrize("merge", ["d2o", "{cam: {window: 3, against: mean}}"])
def test_heads_of_different_lengths_merge(merge, merged, tmp_path):
    path = tmp_path / "pooled.yaml"
    path.write_text(POOLED.format(merge=merge))
    ids = prompt(60, 2)
    found = []
    for kernels in ("reference", "exact", "native"):
        with kvstrata.compress(tiny(), path, kernels=kernels) as cache:
            found.append(feed(tiny(), ids, cache, (40,)))
            lengths = {n for row in cache.report().layers[1].stored for n in row}
    assert len(lengths) > 1
    assert merged
    assert all((other - found[0]).abs().max() <= 1e-4 * found[0].abs().max() for other in found[1:])


@torch.no_grad()
@pytest.mark.parametrize("policy", ["cake:budget={}", "d2o:budget={}"])
@pytest.mark.parametrize("budget", [24, "30%"])
def test_layers_divide_a_budget_and_keep_their_shares(policy, budget):
    ids, first = prompt(150), []
    with kvstrata.compress(tiny(), policy.format(budget)) as cache:
        for start, stop in ((0, 100), *((t, t + 1) for t in range(100, 150))):
            tiny()(ids[:, start:stop], **kv(cache))
            sizes = [len(cache.entries(layer)) for layer in range(3)]
            mean = 24 if budget == 24 else int(stop * 0.3)
            assert 3 * mean - 3 <= sum(sizes) <= 3 * mean
            assert len(set(sizes)) > 1
            shares = [n / mean for n in sizes]
            first = first or shares
            assert shares == pytest.approx(first, abs=0.1)
        assert cache.account.peak.live >= 3 * 100 * (2 * 2 * 16 * 4), "all layers are whole until the prompt ends"


@torch.no_grad()
def test_a_prompt_that_fits_is_not_divided():
    with kvstrata.compress(tiny(), "cake:budget=24") as cache:
        feed(tiny(), prompt(40), cache, (20,))
        assert [len(cache.entries(layer)) for layer in range(3)] == [24] * 3


@torch.no_grad()
def test_one_file_may_hold_two_divided_budgets(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text('layers: {0-1: "cake:budget=20", 2: "cake:budget=30"}')
    with kvstrata.compress(tiny(), path) as cache:
        feed(tiny(), prompt(90), cache, (80,))
        sizes = [len(cache.entries(layer)) for layer in range(3)]
    assert sizes[0] + sizes[1] == 40
    assert sizes[0] != sizes[1]
    assert sizes[2] == 30
