"""The lines in the log at start: what is compressed, and what of vLLM is off or untested with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvstrata_vllm.spec import StrataSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvstrata_vllm.settings import Settings

logger = init_logger("vllm.kvstrata")  # a child of vLLM's, so that its settings hold

OFF = (
    "speculative decoding, other KV connectors, pipeline, data and context parallelism, full CUDA graphs, "
    "model runner V2"
)


def start_line(
    settings: Settings, specs: Mapping[int, StrataSpec], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> None:
    """Write them."""
    groups = kv_cache_config.kv_cache_groups
    layers = sum(len(groups[number].layer_names) for number in specs)
    others = sum(len(group.layer_names) for group in groups) - layers
    spec = next(iter(specs.values()))
    longest = vllm_config.model_config.max_model_len
    most = sum(found.longest(longest) for found in specs.values())
    logger.info(
        "kvstrata: %s in blocks of %d tokens, %d of %d layers in %d table(s) of blocks, freed %d step(s) after they "
        "are announced. A request of %d tokens holds at most %d blocks of the pool's %d (%d without kvstrata).",
        settings.policy,
        spec.block_size,
        layers,
        layers + others,
        len(specs),
        settings.lag,
        longest,
        most,
        kv_cache_config.num_blocks - 1,
        -(-longest // spec.block_size) * len(specs),
    )
    logger.info("kvstrata: off: %s. What it would code in fewer bits stays in the cache's own dtype.", OFF)
