"""The mixins over vLLM's backends, on CPU tensors; the GPU's classes are put together but not run."""

import pytest
import torch
from kvstrata_vllm import gpu
from kvstrata_vllm.backend import compacted
from kvstrata_vllm.blocks import layer_classes
from kvstrata_vllm.cpu import StrataCPUBackend
from kvstrata_vllm.keys import PackedKeys, SplitKeys, find_packing
from kvstrata_vllm.layers import Asked
from kvstrata_vllm.messages import Step
from kvstrata_vllm.settings import Settings
from kvstrata_vllm.spec import strata_spec
from kvstrata_vllm.worker import Worker
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvstrata.core import KvstrataError

BACKENDS = [StrataCPUBackend, gpu.StrataFlashBackend, gpu.StrataTritonBackend]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.__name__)
def test_every_backend_is_vllm_s_with_ours_in_front(backend):
    own, theirs = backend.__mro__[0], backend.__mro__[2]
    assert issubclass(backend.get_impl_cls(), theirs.get_impl_cls())
    assert issubclass(backend.get_builder_cls(), theirs.get_builder_cls())
    assert own.get_name() == theirs.get_name()
    assert backend.get_builder_cls().supports_update_block_table is False
    assert backend.get_builder_cls().get_cudagraph_support(None, None) == AttentionCGSupport.NEVER


def test_metadata_over_the_kept_blocks_keeps_what_the_host_knows():
    (layer_class,) = layer_classes(Settings("streaming:budget=64"), 1, 32, 64)
    worker = Worker({0: layer_class}, 4, 20, 1, torch.device("cpu"))
    worker.begin(Step(tails=[{"a": 7, "b": 9}], fresh=["a", "b"], drops=[(0, "a", [1, 2])], width=[4]))
    worker.begin(Step(tails=[{"a": 7, "b": 9}], width=[4]))
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([100, 40], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=3,
        max_query_len=2,
        max_seq_len=100,
        block_table_tensor=torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([7 * 32 + 3, 9 * 32 + 6, 9 * 32 + 7]),
    )
    found = compacted(worker, 0, common)
    assert found.seq_lens.tolist() == [36, 40]
    assert found.block_table_tensor[0, :2].tolist() == [4, 7]
    assert found.block_table_tensor[1, :2].tolist() == [8, 9]
    assert found.max_seq_len == 100
    assert found.slot_mapping is common.slot_mapping
    assert common.seq_lens.tolist() == [100, 40]  # vLLM's own tensors are as they were


def test_layers_that_came_in_another_order_are_noticed():
    base = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    asked = object.__new__(Asked)
    asked.names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    spec = strata_spec(base, Settings("streaming", classes=2), 2, 4, 1, 128)
    asked.check(spec, asked.names[2:])
    with pytest.raises(KvstrataError, match=r"layers\.1\.self_attn\.attn is not one of layers \(2, 3\)"):
        asked.check(spec, asked.names[1:3])


def kept(reader, cache, keys, tables):
    expected = keys[tables].transpose(1, 2).flatten(2, 3).float()
    torch.testing.assert_close(reader.read(cache, tables), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("isa", "dtype", "block", "width"),
    [("vec", torch.float32, 32, 64), ("vec", torch.bfloat16, 64, 32), ("vec16", torch.float32, 16, 80)],
)
def test_keys_come_back_from_the_cpu_kernel_s_packing(isa, dtype, block, width):
    reader = find_packing(isa, dtype, "auto", block, width)
    keys = torch.randn(5, 2, block, width).to(dtype)  # [B, H, T, D]
    cache = torch.zeros(5, 2, block, 2 * width, dtype=dtype)
    key, value = cache.view(5, 2, 2 * block, width).chunk(2, dim=2)
    flat = keys.transpose(1, 2).flatten(0, 1).contiguous()
    ops.cpu_attn_reshape_and_cache(flat, flat, key, value, torch.arange(5 * block), isa, 1.0, 1.0, "auto")
    kept(reader, cache, keys, torch.tensor([[3, 1], [0, 4]]))


def test_keys_come_back_from_any_order_of_a_block():
    place = torch.randperm(16 * 12).view(16, 12)
    keys = torch.randn(5, 2, 16, 12)
    cache = torch.zeros(5, 2, 16, 24)
    cache.flatten(-2)[..., place] = keys
    assert not PackedKeys(place, None).transposed
    kept(PackedKeys(place, None), cache, keys, torch.tensor([[3, 1], [0, 4]]))


def test_keys_stand_in_the_first_half_of_a_gpu_s_rows():
    cache = torch.randn(5, 2, 16, 24)
    kept(SplitKeys(), cache, cache[..., :12], torch.tensor([[3, 1], [0, 4]]))


def test_keys_of_eight_bits_are_scaled():
    keys = torch.randn(5, 2, 16, 12).to(torch.float8_e4m3fn)
    cache = torch.cat([keys, keys], dim=-1).view(torch.uint8)
    kept(SplitKeys(torch.float8_e4m3fn, 0.5), cache, keys.float() * 0.5, torch.tensor([[3, 1], [0, 4]]))
