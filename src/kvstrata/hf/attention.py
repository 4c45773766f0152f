"""The attention and mask functions that transformers calls by name, and putting that name on a model and off again."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from kvstrata.cache import Layer
from kvstrata.core import InputError, UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.kernels.attention import Logits

NAME = "kvstrata"


class Handoff(NamedTuple):
    """What our cache layer gives the attention function in place of keys."""

    layer: Layer
    keys: Tensor  # [B, H, Q, D], of this forward only


class Padding(NamedTuple):
    """What a padding mask says of one forward."""

    tokens: list[int] | None  # real tokens of each row, standing last; None: no pads
    past: Tensor | None  # [B, columns fed before] bool, where it hides tokens that were stored


NO_PADDING = Padding(None, None)


class LazyMask:
    """The padding mask of one forward as the caller gave it; the stock mask is made of it only if somebody needs it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._stock: dict[str | None, Tensor | None] = {}
        self._padding: Padding | None = None

    def stock(self, name: str | None) -> Tensor | None:
        """The mask that the attention implementation `name` would have got."""
        if name not in self._stock:
            self._stock[name] = compat.original_mask(name)(**self._arguments)
        return self._stock[name]

    def padding(self, queries: int, layer: Layer) -> Padding:
        """What the mask says of this forward's columns; read once, since all layers have seen the same.

        Raises `InputError` for a mask that does not put the pads first.
        """
        if self._padding is None:
            if self._arguments["mask_function"] is not causal_mask_function:
                raise UnsupportedModelError(
                    "this model's attention is not plainly causal, which kvstrata cannot mask yet"
                )
            mask = cast("Tensor | None", self._arguments["attention_mask"])
            self._padding = NO_PADDING if mask is None else _read_padding(mask, queries, layer)
        return self._padding


def _read_padding(mask: Tensor, queries: int, layer: Layer) -> Padding:
    columns = layer.columns_fed + queries
    if mask.shape[1] not in (columns, queries):
        raise InputError(
            f"attention_mask has {mask.shape[1]} columns, but {columns} tokens were fed with these: "
            "pass the mask of all tokens, past ones included"
        )
    new = mask[:, -queries:].bool()
    tokens: list[int] = new.sum(dim=1).tolist()
    past = None
    if mask.shape[1] == columns and any(layer.seen):
        known = [real + more for real, more in zip(layer.fed.real, tokens, strict=True)]
        past = mask[:, :-queries].bool() if mask.sum(dim=1).tolist() != known else None
    if min(tokens) == queries:
        return Padding(None, past)
    if bool((new[:, 1:] < new[:, :-1]).any()):
        raise InputError(
            "pads stand after real tokens (right padding): set tokenizer.padding_side = 'left', "
            "so that every row ends with its newest token"
        )
    return Padding(tokens, past)


def mask_function(**arguments: Any) -> LazyMask:
    """Keep what is needed to make a mask; runs before `update`, so it knows no layer yet."""
    return LazyMask(arguments)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | Handoff,
    value: Tensor,
    attention_mask: Tensor | LazyMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend through our layer when the keys are a handoff; anything else goes where it went before us.

    query [B, H*G, Q, D] -> out [B, Q, H*G, D].
    """
    if not isinstance(key, Handoff):
        name = _original_name(module)
        mask = attention_mask.stock(name) if isinstance(attention_mask, LazyMask) else attention_mask
        attention = compat.original_attention(name, module)
        return attention(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    for name in compat.REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} needs {name!r}, which kvstrata does not compute yet")
    if isinstance(attention_mask, Tensor):
        raise InputError("a custom 4-D attention mask cannot follow evictions: pass the 2-D padding mask")
    padding = attention_mask.padding(query.shape[2], key.layer) if attention_mask is not None else NO_PADDING
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = Logits(scale, kwargs.get(compat.SOFTCAP), _detached(kwargs.get(compat.SINKS)))
    q, k, v = query.detach(), key.keys.detach(), value.detach()
    out = key.layer.attend(q, k, v, padding.tokens, logits, padding.past)
    return out.transpose(1, 2).contiguous(), None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


@dataclass(slots=True)
class _Attachment:
    """A config that has our name on it, for as many caches as are open. Models may share one config."""

    config: PretrainedConfig
    original: str | None
    caches: int = 0


# Which configs are attached now, by id. Not state of a cache: blocks may end in any order, and the last one restores.
_attached: dict[int, _Attachment] = {}
_lock = threading.Lock()


def _original_name(module: torch.nn.Module) -> str | None:
    """The attention implementation that was in force for this module before any block was opened."""
    attachment = _attached.get(id(getattr(module, "config", None)))
    return "sdpa" if attachment is None else attachment.original


@contextmanager
def attached(model: PreTrainedModel) -> Generator[None]:
    """Let the model call our attention inside the block; the last block to end puts back what was there."""
    config = compat.text_config(model)
    with _lock:
        AttentionInterface.register(NAME, attention_function)
        AttentionMaskInterface.register(NAME, mask_function)
        attachment = _attached.setdefault(id(config), _Attachment(config, compat.attention_name(config)))
        attachment.caches += 1
        compat.set_attention_name(config, NAME)
    try:
        yield
    finally:
        with _lock:
            attachment.caches -= 1
            if attachment.caches == 0:
                compat.set_attention_name(config, attachment.original)
                del _attached[id(config)]
