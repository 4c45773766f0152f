"""The backends on a GPU, over FlashAttention (registered as CUSTOM) and over Triton's. Not run on a GPU so far.

They keep the names of vLLM's own, by which it knows what they can do. Everything that happens at a step is an operator
on the device; what is asked for by the scheduler is read back when the step has been launched.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvstrata.core import UnsupportedModelError
from kvstrata_vllm.backend import StrataBackend, StrataBuilder, StrataImpl
from kvstrata_vllm.keys import SplitKeys


class _SplitImpl(StrataImpl):
    """Keys and values stand beside each other in every row of the cache."""

    kv_cache_dtype: str

    def key_reader(self, layer: Any, kv_cache: Tensor) -> SplitKeys:
        """Plain floats, or 8-bit ones in bytes."""
        if "per_token_head" in self.kv_cache_dtype:
            raise UnsupportedModelError(
                f"keys cannot be read back from a cache in {self.kv_cache_dtype}: use a policy that measures nothing, "
                "as streaming:budget=25%"
            )
        if is_quantized_kv_cache(self.kv_cache_dtype):
            return SplitKeys(current_platform.fp8_dtype(), layer._k_scale_float)
        return SplitKeys()


class StrataFlashBuilder(StrataBuilder, FlashAttentionMetadataBuilder):
    """FlashAttention's metadata over the kept blocks."""


class StrataFlashImpl(_SplitImpl, FlashAttentionImpl):
    """FlashAttention, looked at."""


class StrataFlashBackend(StrataBackend, FlashAttentionBackend):
    """FlashAttention over the kept blocks."""

    @staticmethod
    def get_impl_cls() -> type[StrataFlashImpl]:
        """Attention."""
        return StrataFlashImpl

    @staticmethod
    def get_builder_cls() -> type[StrataFlashBuilder]:
        """Metadata."""
        return StrataFlashBuilder


class StrataTritonBuilder(StrataBuilder, TritonAttentionMetadataBuilder):
    """Triton's metadata over the kept blocks."""


class StrataTritonImpl(_SplitImpl, TritonAttentionImpl):
    """Triton's attention, looked at."""


class StrataTritonBackend(StrataBackend, TritonAttentionBackend):
    """Triton's attention over the kept blocks, which can hold them in 8 bits a number."""

    @staticmethod
    def get_impl_cls() -> type[StrataTritonImpl]:
        """Attention."""
        return StrataTritonImpl

    @staticmethod
    def get_builder_cls() -> type[StrataTritonBuilder]:
        """Metadata."""
        return StrataTritonBuilder
