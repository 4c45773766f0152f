"""Which layers of a model are compressed, and which of them vLLM is asking about.

vLLM lets a backend change a layer's specification but does not say which layer it is. It asks for every layer in the
order of the model, so the calls are counted; the connector checks afterwards that every layer is where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvstrata.core import KvstrataError
from kvstrata_vllm.settings import read_settings
from kvstrata_vllm.spec import StrataSpec, strata_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def compressible(spec: Any) -> bool:
    """Whether a layer has plain causal full attention."""
    plain = type(spec) is FullAttentionSpec
    return plain and spec.sliding_window is None and spec.attention_chunk_size is None and not spec.non_causal


class Asked:
    """The compressible layers of one model, and whose turn it is."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        from vllm.model_executor.layers.attention import Attention

        self.vllm_config = vllm_config
        context = vllm_config.compilation_config.static_forward_context
        own = {n: m for n, m in context.items() if isinstance(m, Attention) and not m.kv_sharing_target_layer_name}
        self.names = [name for name, module in own.items() if compressible(module.get_kv_cache_spec(vllm_config))]
        self._next = 0

    def spec(self, base: FullAttentionSpec) -> StrataSpec:
        """The specification of the layer whose turn it is."""
        settings = read_settings(self.vllm_config.additional_config)
        assert settings is not None
        layer, self._next = self._next, (self._next + 1) % len(self.names)
        chunk = self.vllm_config.max_in_flight_tokens
        shards = self.vllm_config.parallel_config.tensor_parallel_size
        return strata_spec(base, settings, layer, len(self.names), shards, chunk)

    def check(self, spec: StrataSpec, names: Iterable[str]) -> None:
        """Raise `KvstrataError` if some layer of a table of blocks does not belong to its class."""
        wrong = [name for name in names if self.names.index(name) not in spec.layer_class.layers]
        if wrong:
            raise KvstrataError(
                f"vLLM asked for layers in another order than the model's ({wrong[0]} is not one of layers "
                f"{spec.layer_class.layers}): use one layer class, and report this with vLLM's version"
            )
