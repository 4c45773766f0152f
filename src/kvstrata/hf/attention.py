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
from kvstrata.kernels.attention import Softmax

NAME = "kvstrata"


class _Touched(UnsupportedModelError, AttributeError):
    """Keys were used between cache and attention; an AttributeError too, so that `hasattr` stays a question."""


class Handoff:
    """What our cache layer gives the attention function in place of keys.

    A model that works on keys between its cache and its attention cannot be compressed, and says so on the first touch.
    """

    __slots__ = ("keys", "layer")

    def __init__(self, layer: Layer, keys: Tensor) -> None:
        self.layer = layer
        self.keys = keys  # [B, H, Q, D], of this forward only

    def __getattr__(self, name: str) -> Any:
        raise _Touched(
            f"this model reads {name!r} of its keys between cache and attention, so what is stored cannot be "
            "left out there: kvstrata does not support it"
        )

    def __getitem__(self, index: object) -> Any:
        return self.__getattr__("[...]")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every torch function."""
        raise _Touched(
            f"this model applies {getattr(function, '__name__', function)!r} to its keys between cache and attention: "
            "kvstrata does not support it"
        )


class Padding(NamedTuple):
    """What a padding mask says of one forward."""

    tokens: list[int] | None  # real tokens of each row, standing last; None: no pads
    past: Tensor | None  # [B, columns fed before] bool, where it hides tokens that were stored
    own: Tensor | None = None  # [B, Q, Q] bool, where this forward's tokens do not see each other causally


NO_PADDING = Padding(None, None)


class LazyMask:
    """The padding mask of one forward as the caller gave it; the stock mask is made of it only if somebody needs it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._stock: dict[str | None, Tensor | None] = {}
        self._padding: Padding | None = None

    def __getattr__(self, name: str) -> Any:
        raise _Touched(f"this model works on its mask ({name!r}) before attention: kvstrata does not support it")

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
            mask = cast("Tensor | None", self._arguments["attention_mask"])
            self._padding = NO_PADDING if mask is None else _read_padding(mask, queries, layer)
            if self._arguments["mask_function"] is not causal_mask_function:
                self._padding = self._padding._replace(own=self._own(queries))
        return self._padding

    def _own(self, queries: int) -> Tensor | None:
        """Which tokens of this forward see which, [B, Q, Q] bool; None where that is causal.

        Raises `UnsupportedModelError` where tokens may not see all that came before.
        """
        every = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        whole = compat.original_mask("sdpa")(**{**self._arguments, **every})
        assert whole is not None
        whole = whole[:, 0]
        padding = cast("Tensor | None", self._arguments["attention_mask"])
        before = whole.shape[2] - queries
        shown = torch.ones_like(whole[:, :, :before])
        if padding is not None:
            shown &= padding[:, None, :before].bool()
        real = slice(None) if padding is None else padding[:, -queries:].bool()
        if not torch.equal(whole[:, :, :before][real], shown[real]):
            raise UnsupportedModelError(
                "this model's attention hides some of what came before (chunks or packed sequences), "
                "which kvstrata cannot follow"
            )
        own = whole[:, :, before:]
        causal = torch.ones(queries, queries, dtype=torch.bool, device=own.device).tril_()
        if padding is not None:
            causal = causal & padding[:, None, -queries:].bool()
        return None if bool((own == causal)[real].all()) else own


def _read_padding(mask: Tensor, queries: int, layer: Layer) -> Padding:
    columns = layer.columns_fed + queries
    if mask.shape[1] != columns:
        raise InputError(
            f"attention_mask has {mask.shape[1]} columns, but {columns} tokens were fed with these: "
            "pass the mask of all tokens, past ones included"
        )
    new = mask[:, -queries:].bool()
    tokens: list[int] = new.sum(dim=1).tolist()
    past = None
    if any(layer.seen):
        known = [real + more for real, more in zip(layer.fed.real, tokens, strict=True)]
        changed = any(layer.fed.hidden) or mask.sum(dim=1).tolist() != known
        past = mask[:, :-queries].bool() if changed else None
    if min(tokens) == queries:
        return Padding(None, past)
    if bool((new[:, 1:] < new[:, :-1]).any()):
        raise InputError(
            "pads stand after real tokens (right padding): set tokenizer.padding_side = 'left', "
            "so that every row ends with its newest token"
        )
    return Padding(tokens, past)


@compat.not_compiled
def mask_function(**arguments: Any) -> LazyMask:
    """Keep what is needed to make a mask; runs before `update`, so it knows no layer yet."""
    return LazyMask(arguments)


@compat.not_compiled
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
        original = _attached.get(id(getattr(module, "config", None)))
        name = "sdpa" if original is None else original.name
        mask = attention_mask.stock(name) if isinstance(attention_mask, LazyMask) else attention_mask
        mask = mask if mask is None else mask.to(query.device)  # nobody moved a lazy one
        attention = compat.original_attention(name, module)
        module = module if original is None else compat.under(module, original.twin)
        return attention(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    for name in compat.REFUSED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} needs {name!r}, which kvstrata does not compute yet")
    if isinstance(attention_mask, Tensor):
        raise InputError("a custom 4-D attention mask cannot follow evictions: pass the 2-D padding mask")
    padding = attention_mask.padding(query.shape[2], key.layer) if attention_mask is not None else NO_PADDING
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = Softmax(scale, kwargs.get(compat.SOFTCAP), _detached(kwargs.get(compat.SINKS)))
    q, k, v = query.detach(), key.keys.detach(), value.detach()
    own = None if padding.own is None else padding.own.to(query.device)
    out = key.layer.attend(q, k, v, padding.tokens, softmax, padding.past, own)
    return out.transpose(1, 2).contiguous(), None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


@dataclass(slots=True)
class _Attachment:
    """A config that has our name on it, for as many caches as are open. Models may share one config."""

    config: PretrainedConfig
    name: str | None  # the attention implementation before
    twin: PretrainedConfig  # a copy of the config that still says so
    caches: int = 0


# Which configs are attached now, by id. Not state of a cache: blocks may end in any order, and the last one restores.
_attached: dict[int, _Attachment] = {}
_lock = threading.Lock()


def _attach(config: PretrainedConfig) -> _Attachment:
    name = compat.attention_name(config)
    if name == NAME:  # a copy of a model made inside a block
        name = "sdpa"
    made = _attached[id(config)] = _Attachment(config, name, compat.renamed(config, name))
    return made


@contextmanager
def attached(model: PreTrainedModel) -> Generator[None]:
    """Let the model call our attention inside the block; the last block to end puts back what was there."""
    config = compat.text_config(model)
    with _lock:
        AttentionInterface.register(NAME, attention_function)
        AttentionMaskInterface.register(NAME, mask_function)
        attachment = _attached.get(id(config)) or _attach(config)
        attachment.caches += 1
        compat.set_attention_name(config, NAME)
    try:
        yield
    finally:
        with _lock:
            attachment.caches -= 1
            if attachment.caches == 0:
                compat.set_attention_name(config, attachment.name)
                del _attached[id(config)]
