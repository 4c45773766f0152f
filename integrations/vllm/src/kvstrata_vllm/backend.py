"""An attention backend whose kernels read only the blocks that are kept: mixins over the platform's own classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from kvstrata.core import UnsupportedModelError
from kvstrata_vllm.blocks import read_policy
from kvstrata_vllm.connector import this_worker
from kvstrata_vllm.hidden import watch_parents
from kvstrata_vllm.keys import KeyReader
from kvstrata_vllm.layers import Asked, compressible
from kvstrata_vllm.measure import Softmax
from kvstrata_vllm.settings import read_settings
from kvstrata_vllm.worker import Worker


class StrataBuilder:
    """Takes what is gone out of the block tables before the platform's builder sees them."""

    supports_update_block_table = False  # a table that vLLM swaps in later would not have passed through here
    layer_names: list[str]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The platform's metadata over the kept blocks."""
        connector = this_worker()
        if connector is not None and connector.worker is not None:
            number = connector.group_of_layer.get(self.layer_names[0])
            if number is not None:
                common_attn_metadata = compacted(connector.worker, number, common_attn_metadata)
                common_prefix_len = 0  # rows that share a prefix may keep different parts of it
        return super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Attention runs between graphs, not in them: its tables are new tensors at every step."""
        return AttentionCGSupport.NEVER


def compacted(worker: Worker, number: int, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """`common` with the group's kept blocks; lengths that vLLM knows on the host stay what they are, upper bounds."""
    rows = worker.compact(
        number,
        common.block_table_tensor,
        common.seq_lens,
        common.slot_mapping,
        common.query_start_loc,
        common.query_start_loc_cpu,
    )
    return replace(common, block_table_tensor=rows.table, seq_lens=rows.lengths)


class StrataBackend:
    """Gives compressible layers their own specification of the cache."""

    config: ClassVar[VllmConfig | None] = None  # of the model whose layers were made last
    asked: ClassVar[Asked | None] = None
    watched: ClassVar[Any] = None  # the handle of the hook that finds modules around attention layers

    @classmethod
    def begin(cls, config: VllmConfig) -> None:
        """A layer of a model with this configuration is being made."""
        if StrataBackend.config is config:
            return
        StrataBackend.config = config
        if StrataBackend.watched is not None:
            StrataBackend.watched.remove()
            StrataBackend.watched = None
        settings = read_settings(config.additional_config)
        if settings is not None and read_policy(settings)[1].surrogates:
            StrataBackend.watched = watch_parents(is_ours, saw_hidden)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Called for every layer in turn, without its name and when no configuration is current any more."""
        spec = super().customize_spec(spec)  # type: ignore[misc]
        config = StrataBackend.config
        if config is None or read_settings(config.additional_config) is None or not compressible(spec):
            return spec
        if StrataBackend.asked is None or StrataBackend.asked.vllm_config is not config:
            StrataBackend.asked = Asked(config)
        return StrataBackend.asked.spec(spec)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Ours moves no keys or values, so any layout will do."""
        return True


def is_ours(part: Any) -> bool:
    """Whether a module is an attention layer that runs our backend."""
    return isinstance(getattr(part, "impl", None), StrataImpl)


def saw_hidden(attention: Any, hidden: Tensor) -> None:
    """Let the worker know the hidden states that an attention layer is about to get."""
    connector = this_worker()
    if connector is not None and connector.worker is not None:
        connector.saw_hidden(attention.layer_name, hidden)


class StrataImpl:
    """Runs the platform's attention, then lets the worker look at it."""

    scale: float
    logits_soft_cap: float | None

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        StrataBackend.begin(get_current_vllm_config())
        self._reader: KeyReader | None = None

    def key_reader(self, layer: Any, kv_cache: Tensor) -> KeyReader:
        """What reads the keys that this platform's kernel wrote."""
        raise NotImplementedError

    @property
    def softcap(self) -> float | None:
        """Where scores are capped, if they are; vLLM says 0 for none."""
        return self.logits_soft_cap or None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        """As the platform's; query [tokens, H*G, D]."""
        arguments = (layer, query, key, value, kv_cache, attn_metadata, output)
        out = super().forward(*arguments, *rest, **options)  # type: ignore[misc]
        connector = this_worker()
        if attn_metadata is None or connector is None or connector.worker is None:
            return out
        number = connector.group_of_layer.get(layer.layer_name)
        if number is not None and connector.worker.groups[number].layer_class.measured:
            if self._reader is None:
                self._check()
                self._reader = self.key_reader(layer, kv_cache)
            softmax = Softmax(self.scale, self.softcap)
            connector.worker.measure(number, query, kv_cache, self._reader, softmax)
        return out

    def _check(self) -> None:
        for what in ("sinks", "alibi_slopes"):
            if getattr(self, what, None) is not None:
                raise UnsupportedModelError(
                    f"this model's attention has {what}, without which attention cannot be measured: use a policy that "
                    "measures nothing, as streaming:budget=25%"
                )
