"""The type of cache that compressed layers ask of vLLM, and the manager that gives blocks back while requests run.

vLLM puts layers into one table of blocks when their specifications have the same type, so every layer class has a type
of its own. They are module-level classes because specifications are pickled from workers to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from kvstrata_vllm.blocks import BlockRule, LayerClass, layer_classes
from kvstrata_vllm.ledger import Eviction, Ledger
from kvstrata_vllm.settings import MOST_CLASSES, Settings


@dataclass(frozen=True, kw_only=True)
class StrataSpec(FullAttentionSpec):
    """Full attention over blocks of which some may be gone."""

    settings: Settings
    number: int  # of the layer class
    num_layers: int  # compressed layers of the model
    token_bytes: int  # key and value of one token in one layer, over all its heads on all ranks
    chunk: int  # the most tokens that one step feeds

    @property
    def layer_class(self) -> LayerClass:
        """What the policy does with these layers."""
        return layer_classes(self.settings, self.num_layers, self.block_size, self.token_bytes)[self.number]

    def longest(self, tokens: int) -> int:
        """The most blocks that a request of so many tokens ever holds."""
        return self.layer_class.longest(tokens, self.chunk, self.settings.lag)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of one layer for the longest request: as many as its budget lets it hold, not its whole length."""
        return self.longest(vllm_config.model_config.max_model_len) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """The one specification that all layers of a class have. Raises `AssertionError`, which keeps others apart."""
        assert all(spec == specs[0] for spec in specs)
        return specs[0]


class Strata0(StrataSpec):
    """The first layer class."""


class Strata1(StrataSpec):
    """The second layer class."""


class Strata2(StrataSpec):
    """The third layer class."""


class Strata3(StrataSpec):
    """The fourth layer class."""


CLASSES: tuple[type[StrataSpec], ...] = (Strata0, Strata1, Strata2, Strata3)
assert len(CLASSES) == MOST_CLASSES


class StrataManager(FullAttentionManager):
    """Chooses whole blocks to evict, and frees them when no worker reads them any more.

    A freed block leaves vLLM's null block in its place, so the table stays as long as the request: logical blocks =
    physical ones + evicted ones.
    """

    kv_cache_spec: StrataSpec

    def __init__(self, kv_cache_spec: StrataSpec, **rest: Any) -> None:
        super().__init__(kv_cache_spec, **rest)
        self.ledger = Ledger(kv_cache_spec.settings.lag)  # its own until the connector gives all groups the same

    @cached_property
    def layer_class(self) -> LayerClass:
        """What the policy does in this group."""
        return self.kv_cache_spec.layer_class

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free what was announced, then choose anew among the blocks whose tokens are all computed."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        if num_prompt_tokens:
            self.ledger.note_prompt(request_id, num_prompt_tokens)
        state = self.ledger.eviction(self.kv_cache_group_id, request_id)
        if state.chosen:  # not announced yet, since the request was not scheduled
            return
        if state.announced:
            if not self.ledger.may_free(state):
                return
            self._free(blocks, state, state.announced)
            state.announced = []
        state.chosen = self._choose(request_id, blocks, state, processed_computed_tokens, num_prompt_tokens or 0)
        if not self.ledger.lag:
            self._free(blocks, state, state.chosen)

    def _choose(
        self, request_id: str, blocks: Sequence[KVCacheBlock], state: Eviction, processed: int, prompt: int
    ) -> list[int]:
        """Logical numbers of the blocks that go now; none while the workers' measurements are missing."""
        rule = self._rule(state)
        chosen: list[int] = []
        if rule is not None and self._due(rule, state, processed):
            live = [i for i in range(processed // self.block_size) if not blocks[i].is_null]
            measured = self._measured(rule, state, live)
            if rule.measured and measured is None:
                return []
            chosen = rule.victims(live, processed, self.ledger.confidence(request_id), measured)
        state.looked = processed // self.block_size
        state.measured.clear()
        state.prefilled = state.prefilled or processed >= prompt
        return chosen

    def _rule(self, state: Eviction) -> BlockRule | None:
        return self.layer_class.rule("decode" if state.prefilled else "prefill")

    def _due(self, rule: BlockRule, state: Eviction, processed: int) -> bool:
        """Whether something may go: by a budget when there is too much, by a threshold when a block has filled."""
        whole = processed // self.block_size
        if rule.rule.budget.threshold is not None:
            return whole > state.looked
        return whole - self.ledger.out(state) > rule.least(processed)

    def wanted(self, request_id: str, processed: int) -> int | None:
        """Number of the scorer whose measurements are needed once `processed` tokens are computed; None for none."""
        state = self.ledger.eviction(self.kv_cache_group_id, request_id)
        rule = self._rule(state)
        if rule is None or not rule.measured or not self._due(rule, state, processed):
            return None
        return self.layer_class.number(rule)

    def held(self, request_id: str) -> tuple[int, int]:
        """(blocks there, blocks in all) of a request."""
        blocks = len(self.req_to_blocks.get(request_id, ()))
        return blocks - self.ledger.evicted(request_id, self.kv_cache_group_id), blocks

    def _measured(self, rule: BlockRule, state: Eviction, live: Sequence[int]) -> Sequence[float] | None:
        if not rule.measured:
            return None
        found = state.measured.get(self.layer_class.number(rule))
        return found if found is not None and live[-1] < len(found) else None

    def _free(self, blocks: list[KVCacheBlock], state: Eviction, numbers: Sequence[int]) -> None:
        going = [blocks[i] for i in numbers]
        for i in numbers:
            blocks[i] = self._null_block
        self.block_pool.free_blocks(going)
        self.ledger.freed(state, len(going))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request's blocks, of which none is on its way out any more."""
        self.ledger.forget(self.kv_cache_group_id, request_id)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Publish blocks for other requests with the same prefix, unless they were computed after an eviction."""
        if not self.ledger.approximate(request.request_id):
            super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **options: Any) -> int:
        """Blocks that are missing; to admit a request, no more than it may ever hold at once."""
        if options.get("apply_admission_cap"):
            spec, prompt = self.kv_cache_spec, self.ledger.prompt(request_id, num_tokens)
            peak = self.layer_class.peak(prompt, num_tokens - prompt, spec.chunk, spec.settings.lag)
            self.max_admission_blocks_per_request = peak
        return super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **options)


def strata_spec(
    base: FullAttentionSpec, settings: Settings, layer: int, num_layers: int, shards: int, chunk: int
) -> StrataSpec:
    """The specification of a layer, the `layer`-th of those that are compressed, on one of `shards` ranks."""
    token_bytes = base.page_size_bytes // base.block_size * shards
    classes = layer_classes(settings, num_layers, base.block_size, token_bytes)
    number = next(i for i, found in enumerate(classes) if layer in found.layers)
    given = {field.name: getattr(base, field.name) for field in fields(base) if field.init}
    own = {"settings": settings, "number": number, "num_layers": num_layers, "token_bytes": token_bytes, "chunk": chunk}
    return CLASSES[number](**given, **own)


def register_specs() -> None:
    """Tell vLLM of our types. Its own come first: it registers none of them once it finds any there."""
    KVCacheSpecRegistry._ensure_registered()
    for spec in CLASSES:
        KVCacheSpecRegistry.register(spec, StrataManager, uniform_type_base_spec=spec)
