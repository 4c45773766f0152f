"""The only file that knows transformers' versions and private names."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvstrata.core import UnsupportedModelError

F = TypeVar("F", bound=Callable[..., Any])

OLDEST, NEWEST = Version("5.17"), Version("5.24")  # the tests run on both ends
# how forward() and generate() call the cache: newer releases renamed it and still take the old name
CACHE_KEYWORD = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
SOFTCAP, SINKS = "softcap", "s_aux"  # attention arguments that our attention computes
# attention arguments that change the result and that our attention does not know
REFUSED_ARGUMENTS = ("position_bias", "sliding_window", "chunk_size")


# families that pass every general check and still cannot work, and why
REFUSED_FAMILIES = {
    "paligemma": "its prompt's mask is built in two places, each of which needs the whole matrix",
}


# families that turn keys in their sliding layers only
UNTURNED = ("cohere2", "exaone4", "exaone_moe")


def not_compiled(function: F) -> F:
    """The same function, at which `torch.compile` breaks a graph: what it does depends on what is stored."""
    return cast(F, torch.compiler.disable(function))


def check_version() -> None:
    """Warn about a transformers release that is newer than those tested."""
    version = Version(transformers.__version__)
    if (version.major, version.minor) > (NEWEST.major, NEWEST.minor):
        warnings.warn(
            f"kvstrata was tested with transformers {OLDEST} to {NEWEST}; this is {version}. "
            "If something breaks, install an older one.",
            stacklevel=4,
        )


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """The config object that the language part of the model reads its attention implementation from."""
    return model.config.get_text_config(decoder=True)


def attention_name(config: PretrainedConfig) -> str | None:
    """Name of the attention implementation in force."""
    return cast("str | None", getattr(config, "_attn_implementation_internal", None))


def set_attention_name(config: PretrainedConfig, name: str | None) -> None:
    """Set the name on this config object alone, without the checks and side effects of the public setter."""
    config._attn_implementation_internal = name  # pyright: ignore


def original_attention(name: str | None, module: torch.nn.Module) -> Callable[..., Any]:
    """The attention function that `module` would call under its own implementation `name`."""
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", sdpa_attention_forward)
    return cast(Callable[..., Any], cast(Any, ALL_ATTENTION_FUNCTIONS).get_interface(name or "eager", eager))


def under(module: torch.nn.Module, config: PretrainedConfig) -> torch.nn.Module:
    """The same module, parameters shared, that reads another config; some implementations look their name up there."""
    twin = copy.copy(module)
    twin.__dict__["config"] = config
    return twin


def renamed(config: PretrainedConfig, name: str | None) -> PretrainedConfig:
    """A copy of a config under another attention implementation."""
    twin = copy.copy(config)
    set_attention_name(twin, name)
    return twin


def original_mask(name: str | None) -> Callable[..., Tensor | None]:
    """The mask function of the implementation `name`."""
    masks = cast(Any, ALL_MASK_ATTENTION_FUNCTIONS)
    return cast("Callable[..., Tensor | None]", masks.get(name or "eager", _no_mask))


def _no_mask(**arguments: Any) -> None:
    """What an implementation without a mask function of its own gets."""


def check_model(model: object) -> None:
    """Refuse a model whose attention cannot be selected by name; raises `UnsupportedModelError` with the reason."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"compress() takes a transformers model, not {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; kvstrata compresses decoders")
    if reason := REFUSED_FAMILIES.get(model.config.model_type):
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if causal and not any(causal) and not cast(Any, model).can_generate():
        raise UnsupportedModelError(f"{type(model).__name__}'s attention is not causal; kvstrata compresses decoders")
    selectable = cast(Any, model)._can_set_attn_implementation()
    if not selectable:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not call attention through transformers' AttentionInterface, "
            "so kvstrata cannot take its place"
        )


def stock_layers(config: PretrainedConfig) -> list[Any]:
    """The cache layers that transformers itself would use for this model."""
    return cast("list[Any]", DynamicCache(config=config).layers)


def empty(layer: Any) -> None:
    """Let go of what a growing layer holds: `reset` of older releases only fills it with zeros."""
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        for made in ("is_initialized", "is_indexer_initialized"):
            if hasattr(layer, made):
                setattr(layer, made, False)  # the next forward begins with new tensors


def not_compressed(config: PretrainedConfig, stock: list[Any]) -> dict[int, str]:
    """Layers that stay with transformers' own cache, and why, in a few words."""
    found = {i: _KINDS.get(type(layer).__name__, type(layer).__name__) for i, layer in enumerate(stock)}
    found = {i: kind for i, kind in found.items() if kind}
    if option(config, "kv_lora_rank"):  # keys and values are made from what is cached, after the cache
        found = {i: found.get(i, "latent attention") for i in range(len(stock))}
    shared: int = option(config, "num_kv_shared_layers") or 0
    if shared:  # later layers read the keys of the last layer of their kind before them
        kinds: list[str] = option(config, "layer_types") or []
        donors = {kind: i for i, kind in enumerate(kinds[: len(kinds) - shared])}
        for i in donors.values():
            found.setdefault(i, "shared with later layers")
    return found


def option(config: PretrainedConfig, name: str) -> Any:
    """An entry of a config, None where there is none or where it differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception as error:  # a class of its own, which older releases lack
        if type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError":
            return None
        raise


def kv_shape(config: PretrainedConfig) -> tuple[int, int] | None:
    """Key-value heads and head_dim that every layer has, if the config says so plainly."""
    if any(option(config, name) for name in ("kv_lora_rank", "global_head_dim", "num_global_key_value_heads")):
        return None
    query_heads: int = option(config, "num_attention_heads") or 0
    heads: int = option(config, "num_key_value_heads") or query_heads
    dim: int = option(config, "head_dim") or (config.hidden_size // query_heads if query_heads else 0)
    return (heads, dim) if heads and dim else None


def some_unturned(config: PretrainedConfig) -> bool:
    """Whether some full-attention layers have no rotary positions while others have."""
    kept = option(config, "no_rope_layers")  # 1 where a layer has them
    return config.model_type in UNTURNED or (isinstance(kept, list) and not all(cast("list[int]", kept)))


def query_group(config: PretrainedConfig, num_kv_heads: int) -> int:
    """Query heads per key-value head."""
    return max(1, (option(config, "num_attention_heads") or num_kv_heads) // num_kv_heads)


_KINDS = {
    "DynamicLayer": "",
    "DynamicSlidingWindowLayer": "sliding window",
    "LinearAttentionLayer": "recurrent state",
    "LinearAttentionAndFullAttentionLayer": "recurrent state and attention",
    "LinearAttentionAndSlidingWindowAttentionLayer": "recurrent state and sliding window",
    "DynamicIndexedLayer": "indexed sparse attention",
    "DummyLayer": "no cache",
}
