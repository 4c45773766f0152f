"""The backend on vLLM's CPU build, where it takes the place of CPU_ATTN."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvstrata_vllm.backend import StrataBackend, StrataBuilder, StrataImpl
from kvstrata_vllm.keys import PackedKeys, find_packing


class StrataCPUBuilder(StrataBuilder, CPUAttentionMetadataBuilder):
    """Builds the CPU kernel's metadata over the kept blocks."""


class StrataCPUImpl(StrataImpl, CPUAttentionBackendImpl):
    """The CPU kernel, looked at."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.dtype = get_current_vllm_config().model_config.dtype  # in which keys come to the cache

    def key_reader(self, layer: Any, kv_cache: Tensor) -> PackedKeys:
        """The packing depends on the processor; it is found once for each layer."""
        block_size, width = kv_cache.shape[2], kv_cache.shape[3] // 2
        found = find_packing(layer.isa, self.dtype, self.kv_cache_dtype, block_size, width)
        return PackedKeys(found.place, found.dtype, layer._k_scale_float if found.dtype else 1.0)


class StrataCPUBackend(StrataBackend, CPUAttentionBackend):
    """Its name stays CPU_ATTN: vLLM looks it up among its own backends."""

    @staticmethod
    def get_impl_cls() -> type[StrataCPUImpl]:
        """Attention."""
        return StrataCPUImpl

    @staticmethod
    def get_builder_cls() -> type[StrataCPUBuilder]:
        """Metadata."""
        return StrataCPUBuilder
