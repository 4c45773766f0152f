"""transformers' own cache with its two slow parts repaired: what is left is what kvstrata has to beat.

Entries are appended in place, into buffers made once, instead of by a copy of everything at every step. At one query
sdpa gets the query group folded into the query length, so that one pass over the keys serves it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvstrata.core import UnsupportedModelError
from kvstrata.hf import compat

NAME = "kvstrata-repaired"  # of the attention function


class RepairedLayer(DynamicLayer):
    """Keys and values [B, H, capacity, D], of which the first entries are filled; doubled when they are full."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity, self._buffers = capacity, list[Tensor]()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, Q, D] in place; return views of all entries."""
        fresh, old = (key_states, value_states), self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = old + key_states.shape[-2]
        if not self._buffers or new > self._capacity:
            self._capacity = max(self._capacity, 2 * new if self._buffers else new)
            grown = [x.new_empty(*x.shape[:2], self._capacity, x.shape[3]) for x in fresh]
            for now, before in zip(grown, self._buffers, strict=False):
                now[:, :, :old] = before[:, :, :old]
            self._buffers = grown
        for buffer, entries in zip(self._buffers, fresh, strict=True):
            buffer[:, :, old:new] = entries
        self.keys, self.values = (buffer[:, :, :new] for buffer in self._buffers)
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)


def repaired_cache(model: PreTrainedModel, capacity: int) -> Cache:
    """An empty cache with room for `capacity` tokens, to be used while the model's attention is called `NAME`.

    Raises `UnsupportedModelError` for a model with other than ordinary attention layers.
    """
    config = compat.text_config(model)
    stock = compat.stock_layers(config)
    if other := sorted(set(compat.not_compressed(config, stock).values())):
        raise UnsupportedModelError(f"the repaired baseline has ordinary attention only, not {', '.join(other)}")
    AttentionInterface.register(NAME, repaired_attention)
    AttentionMaskInterface.register(NAME, compat.original_mask("sdpa"))
    return Cache(layers=[RepairedLayer(capacity) for _ in stock])


def repaired_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H*G, Q, D] -> out [B, Q, H*G, D]; as transformers' sdpa but for one query without a mask."""
    if query.shape[2] > 1 or attention_mask is not None:
        stock = compat.original_attention("sdpa", module)
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    folded = query.view(query.shape[0], key.shape[1], -1, query.shape[3])  # [B, H, G, D]
    out = scaled_dot_product_attention(folded, key, value, scale=scaling)
    return out.reshape(query.shape[0], 1, -1, value.shape[3]), None
