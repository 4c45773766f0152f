"""The plug-in for transformers' own tests really puts our cache under `generate`, and nobody can tell."""

import pytest
import torch

from tests import upstream
from tests.contract.families import family
from tests.contract.runs import prompt, tiny

MODES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "chunks": {"do_sample": False, "prefill_chunk_size": 7},
    "dict": {"do_sample": False, "return_dict_in_generate": True, "output_logits": True},
}


@pytest.fixture
def ours():
    uninstall = upstream.install()
    upstream.replaced.clear()
    upstream.left.clear()
    yield upstream
    uninstall()


def run(model, options):
    torch.manual_seed(0)
    out = model.generate(prompt(30), max_new_tokens=8, **options)
    return out if isinstance(out, torch.Tensor) else torch.stack(out.logits)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_generate_gives_the_same_on_our_cache(options, request):
    expected = run(tiny(), options)
    ours = request.getfixturevalue("ours")
    assert torch.equal(run(tiny(), options), expected)
    assert ours.replaced == ["LlamaForCausalLM"]
    assert tiny().config._attn_implementation == "sdpa"


def test_a_model_that_cannot_be_compressed_keeps_its_own_cache(ours):
    run(family("bloom"), MODES["greedy"])
    assert not ours.replaced
    assert "AttentionInterface" in ours.left[0]
