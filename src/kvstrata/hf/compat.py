"""The only file that knows transformers' versions and private names."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, cast

import transformers
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask

from kvstrata.core import UnsupportedModelError

OLDEST, NEWEST = Version("5.17"), Version("5.24")  # the tests run on both ends
# how forward() and generate() call the cache: newer releases renamed it and still take the old name
CACHE_KEYWORD = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
# attention arguments that change the result and that our attention does not know
REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "sliding_window")


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


def check_model(model: object) -> None:
    """Refuse a model whose attention cannot be selected by name; raises `UnsupportedModelError` with the reason."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"compress() takes a transformers model, not {type(model).__name__}")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{type(model).__name__} is an encoder-decoder; kvstrata compresses decoders")
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if causal and not any(causal):
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


def is_plain(layer: object) -> bool:
    """Whether a stock cache layer is ordinary full attention, which is what we replace."""
    return type(layer) is DynamicLayer
