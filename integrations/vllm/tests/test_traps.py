"""Places where vLLM 0.32 lets a plug-in walk into a trap, each kept shut by a test."""

import subprocess
import sys

import pytest
from kvstrata_vllm import register
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kvstrata.core import SpecError
from kvstrata.hf.demo import demo_model

from . import tiny

FRESH = """
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry as Registry
{first}
import torch
size = dict(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
specs = FullAttentionSpec(**size), SlidingWindowSpec(**size, sliding_window=4)
print(*map(Registry.get_manager_class, specs))
"""
NAIVE = "from kvstrata_vllm.spec import Strata0, StrataManager; Registry.register(Strata0, StrataManager)"


def managers(first):
    """What a new process finds for vLLM's own specifications after it ran `first`."""
    done = subprocess.run([sys.executable, "-c", FRESH.format(first=first)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_registering_ours_leaves_vllm_its_own_specifications():
    found = managers("import kvstrata_vllm; kvstrata_vllm.register()")
    assert "FullAttentionManager" in found
    assert "SlidingWindowManager" in found


def test_the_registry_still_forgets_its_own_if_another_comes_first():
    assert managers(NAIVE) == "None None"  # once this fails, `register_specs` need not come first any more


@pytest.fixture
def model(tmp_path):
    tiny.make(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_a_cache_that_only_a_gpu_understands_is_refused_on_a_cpu(model, dtype):
    args = EngineArgs(
        model, kv_cache_dtype=dtype, additional_config={"kvstrata": "streaming"}, skip_tokenizer_init=True
    )
    with pytest.raises(SpecError, match=rf"--kv-cache-dtype {dtype} needs a GPU .* generates garbage.*use auto or fp8"):
        args.create_engine_config()


def test_every_backend_has_the_name_of_one_of_vllm_s():
    register()
    for member in ("CPU_ATTN", "CUSTOM", "KVSTRATA_TRITON"):
        backend = AttentionBackendEnum[member].get_class()
        assert backend.__module__.startswith("kvstrata_vllm")
        assert AttentionBackendEnum[backend.get_name()] is not None  # as vLLM's layers look it up
    assert AttentionBackendEnum["CPU_ATTN"].get_class().get_name() == "CPU_ATTN"


def test_the_demo_model_s_tokenizer_reads_words_here():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    text = "The capital of France is Paris, in 1889."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert ids[:5] == [504, 3575, 282, 4649, 314]
