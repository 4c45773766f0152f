"""`torch.compile` of a model around our attention: graphs break at our calls, and the results are the same."""

import pytest
import torch

import kvstrata

from ..contract.runs import TWO_LEVELS, kv, prompt, stock, tiny

STEPS = 6
POLICIES = ("full", "h2o:budget=12", TWO_LEVELS)


@pytest.fixture(scope="module")
def compiled():
    """The tiny model, compiled by tracing alone: as every backend does, but without generating code."""
    torch.compiler.reset()
    yield torch.compile(tiny(), backend="eager")
    torch.compiler.reset()


@torch.no_grad()
def decode(model, cache, ids):
    """Greedy tokens [B, STEPS], and the entries kept."""
    tokens = []
    for _ in range(STEPS):
        ids = model(ids, **kv(cache)).logits[:, -1:].argmax(-1)
        tokens.append(ids)
    return torch.cat(tokens, dim=1)


def run(model, policy, ids):
    with kvstrata.compress(tiny(), policy) as cache:
        tokens = decode(model, cache, ids)
        return tokens, [cache.entries(layer, row) for layer in cache.strata for row in range(len(ids))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_model_decodes_as_before(policy, compiled):
    ids = prompt(30, 2)
    tokens, kept = run(tiny(), policy, ids)
    again, kept_again = run(compiled, policy, ids)
    assert torch.equal(again, tokens)
    assert kept_again == kept


def test_it_then_decodes_with_transformers_own_cache(compiled):
    ids = prompt(30, 2)
    ours, _ = run(compiled, "full", ids)
    assert torch.equal(decode(compiled, stock(tiny()), ids), ours)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of modules that the code generator imports
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_compiled_to_machine_code_decodes_as_before(policy):
    ids = prompt(30, 2)
    tokens, kept = run(tiny(), policy, ids)
    torch.compiler.reset()
    again, kept_again = run(torch.compile(tiny()), policy, ids)
    torch.compiler.reset()
    assert torch.equal(again, tokens)
    assert kept_again == kept
