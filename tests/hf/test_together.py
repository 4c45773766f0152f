"""One forward over a prompt for several caches leaves each as if it had read the prompt alone."""

from contextlib import ExitStack
from fractions import Fraction

import pytest
import torch
import yaml

import kvstrata
from kvstrata.core import InputError
from kvstrata.hf.together import read_together
from kvstrata.policy import PRESETS, parse_policy
from kvstrata.policy.budget import Share
from kvstrata.policy.shares import Shares
from kvstrata.policy.surrogate import write_surrogate

from ..contract.families import family
from ..contract.runs import ALL, Tokenizer, feed, kv, prompt, spec, tiny

TOKENS, BUDGET = 40, 12


def specs():
    return [*(spec(name, BUDGET) for name in ALL), "h2o:budget=100%,codec=int8,exact=0"]


def opened(stack, model, policies, kernels="auto"):
    return [stack.enter_context(kvstrata.compress(model, policy, kernels=kernels)) for policy in policies]


def held(cache):
    return [[cache.entries(i, row, head) for head in range(2)] for i in cache.strata for row in range(2)], cache.nbytes


@pytest.mark.parametrize("kernels", ["auto", "reference", "exact"])
def test_every_policy_reads_together_what_it_reads_alone(kernels):
    model, ids = tiny(), prompt(TOKENS + 3, rows=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with ExitStack() as stack, torch.no_grad():
        caches = opened(stack, model, specs(), kernels)
        first = read_together(model, caches, ids[:, :TOKENS], mask[:, :TOKENS])
        for policy, cache in zip(specs(), caches, strict=True):
            with kvstrata.compress(model, policy, kernels=kernels) as alone:
                logits = feed(model, ids, alone, [TOKENS], mask)
                for step in range(3):
                    positions = (mask[:, : TOKENS + step + 1].cumsum(1) - 1)[:, -1:]
                    options = {"attention_mask": mask[:, : TOKENS + step + 1], "position_ids": positions}
                    together = model(ids[:, TOKENS + step, None], **kv(cache), **options).logits[:, -1]
                    torch.testing.assert_close(together, logits[:, TOKENS + step], rtol=0, atol=1e-4, msg=policy)
                torch.testing.assert_close(first, logits[:, TOKENS - 1], rtol=0, atol=1e-4)
                assert held(cache) == held(alone), policy


OTHERS = sorted(set(PRESETS) - set(ALL))


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_other_presets_read_together_what_they_read_alone(tmp_path, turned):
    """Those that read hidden states, repeat the prompt, choose over all heads, sample or code, in either order."""
    weights = [[torch.randn(2, 64, generator=torch.Generator().manual_seed(i)), torch.zeros(2)] for i in range(3)]
    write_surrogate(tmp_path / "zap", weights, {"thresholds": {"0.75": 0.5}})
    heads = Shares("", ((0.25, ((0.4, 0.1), (0.2, 0.3), (0.25, 0.25))),))
    policies = {name: _smaller(name, tmp_path / "zap", heads) for name in OTHERS}
    parts = [{"weight": 1.0, "scorer": scorer} for scorer in ("repetition", "echo")]  # as many needs as kvzip+ has
    rule = {"scorer": {"mix": {"parts": parts}}, "budget": 12, "heads": "each"}
    repeats = {"layers": {"0-": {"prefill": rule, "decode": None}}}
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(repeats))
    policies["asks-twice"] = parse_policy(tmp_path / "mixed.yaml")
    names = sorted(policies, reverse=turned)
    model, ids, options = tiny(), prompt(TOKENS), {"tokenizer": Tokenizer()}
    with ExitStack() as stack, torch.no_grad():
        caches = [stack.enter_context(kvstrata.compress(model, policies[name], **options)) for name in names]
        read_together(model, caches, ids)
        for name, cache in zip(names, caches, strict=True):
            with kvstrata.compress(model, policies[name], **options) as alone:
                model(ids, **kv(alone))
                for layer in range(3):
                    for head in range(2):
                        assert cache.entries(layer, 0, head) == alone.entries(layer, 0, head), name
                assert cache.nbytes == alone.nbytes, name


def _smaller(name, surrogate, heads):
    """A preset so small that it drops something of a short prompt, if it drops anything."""
    text = f"{name}:file={surrogate},window=8" if name.startswith("kvzap") else name
    policy = parse_policy(text)
    policy = policy.with_heads(heads) if name == "duo" else policy
    return policy if policy.only_codes else policy.with_protect(2, 4).with_budget(Share(Fraction(1, 2)))


def test_layers_that_are_passed_through_are_each_caches_own():
    model, ids = family("gemma3"), prompt(24)
    with ExitStack() as stack, torch.no_grad():
        caches = opened(stack, model, ["full", "window:budget=8"])
        read_together(model, caches, ids)
        assert caches[0].passed_through
        other = model(ids[:, :1], **kv(caches[1])).logits
        again = model(ids[:, :1], **kv(caches[0])).logits
        assert other.isfinite().all()
        assert again.isfinite().all()
        for i in caches[0].passed_through:
            assert caches[0].layers[i] is not caches[1].layers[i]


def test_a_cache_that_holds_something_is_refused():
    model, ids = tiny(), prompt(20)
    with ExitStack() as stack:
        caches = opened(stack, model, ["full", "full"])
        feed(model, ids, caches[1], [20])
        with pytest.raises(InputError, match="only empty caches"):
            read_together(model, caches, ids)
