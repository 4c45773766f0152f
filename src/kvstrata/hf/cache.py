"""Our cache as transformers sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstrata.cache import Layer, Report
from kvstrata.cache.report import build_report
from kvstrata.core import InputError, KvstrataError, UnsupportedModelError
from kvstrata.hf import compat
from kvstrata.hf.attention import Handoff
from kvstrata.kernels.attention import KernelName
from kvstrata.policy.policy import Policy
from kvstrata.store import Account, Bytes


class StrataLayer(CacheLayerMixin):
    """Gives our layer to the attention function in place of keys; everything else is answered by that layer."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.is_open = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the store lays itself out at the first append."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Hand over keys and values [B, H, Q, D]; they are stored when attention runs."""
        if not self.is_open:
            raise KvstrataError("this cache's compress() block has ended: run the model inside the block")
        return Handoff(self.layer, key_states), value_states

    def get_seq_length(self) -> int:
        """Columns fed so far, pads included."""
        return self.layer.columns_fed

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Size and offset of a mask over all columns fed; our attention reads the padding mask itself."""
        return self.layer.columns_fed + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reset(self) -> None:
        """Free everything."""
        self.layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens."""
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.layer.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding where the policy evicts: rejected drafts would have cost real entries."""
        if any(self.layer.rules.values()):
            raise UnsupportedModelError('assisted decoding works with the policy "full" only so far')

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row beam_idx[i] is now."""
        self.layer.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = range(self.layer.store.batch_size)
        self.layer.select_rows([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.layer.select_rows(indices.tolist())

    @property
    def batch_size(self) -> int:
        """Rows stored; -1 before the first forward."""
        return self.layer.store.batch_size or -1


class StrataCache(Cache):
    """A cache under a policy. Layers that are not ordinary full attention are transformers' own, uncompressed."""

    def __init__(self, model: PreTrainedModel, policy: Policy, kernels: KernelName) -> None:
        stock = compat.stock_layers(compat.text_config(model))
        ours = [index for index, layer in enumerate(stock) if compat.is_plain(layer)]
        if not ours:
            kinds = sorted({type(layer).__name__ for layer in stock})
            raise KvstrataError(f"{type(model).__name__} has no full-attention layer to compress, only {kinds}")
        self.policy = policy
        self.account = Account()
        self.strata = {i: Layer(i, policy, len(ours), self.account, kernels) for i in ours}
        self.passed_through = {i: type(layer).__name__ for i, layer in enumerate(stock) if i not in self.strata}
        super().__init__(
            layers=[StrataLayer(self.strata[i]) if i in self.strata else stock[i] for i in range(len(stock))]
        )

    def close(self) -> None:
        """Refuse further forwards; what is stored can still be read."""
        for layer in self.layers:
            if isinstance(layer, StrataLayer):
                layer.is_open = False

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the compressed layers now."""
        return self.account.now

    def entries(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """Positions stored for one layer, row and key-value head, ascending, among the row's real tokens."""
        store = self.strata[layer].store
        if store.is_empty:
            return []
        head = head if store.per_head else 0
        return store.column("position")[row, head, : store.lengths()[row][head]].sort().values.tolist()

    def report(self) -> Report:
        """What is held, what was dropped, and why not where nothing was."""
        return build_report(self.policy.name, list(self.strata.values()), self.account, self.passed_through)
