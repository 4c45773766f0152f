"""Our cache as transformers sees it."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import LongTensor, Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvstrata.cache import Layer, PolicyCache, Report
from kvstrata.cache.report import build_report
from kvstrata.cache.step import INTERRUPTED
from kvstrata.core import InputError, KvstrataError, SpecError, UnsupportedModelError
from kvstrata.hf import compat, files
from kvstrata.hf.attention import Handoff
from kvstrata.hf.files import fingerprint, identity
from kvstrata.hf.parts import parts_for
from kvstrata.kernels.attention import KernelName
from kvstrata.policy.policy import Policy
from kvstrata.store import Account, Bytes


class Kin:
    """What a cache and its copies share: their model, and whether its compress() block is open."""

    def __init__(self, model: PreTrainedModel, request: Any = None) -> None:
        self.model, self.is_open = model, True
        self.request = request  # a `repeat.Request`, where the policy has the model repeat the prompt

    def __deepcopy__(self, memo: dict[int, Any]) -> Kin:
        return self


class StrataLayer(CacheLayerMixin):
    """Gives our layer to the attention function in place of keys; everything else is answered by that layer."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, layer: Layer, engine: PolicyCache, kin: Kin) -> None:
        super().__init__()
        self.layer, self._engine, self.kin = layer, engine, kin

    @property
    def record_past(self) -> bool:
        """Whether new entries are tentative; transformers sets it to False when it is done with drafts."""
        return self._engine.mode.drafting

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value:
            self._engine.activate_past_recording()
        else:
            self._engine.stop_past_recording()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the store lays itself out at the first append."""

    @compat.not_compiled
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        """Hand over keys and values [B, H, Q, D]; they are stored when attention runs."""
        if not self.kin.is_open:
            raise KvstrataError("this cache's compress() block has ended: run the model inside the block")
        return Handoff(self.layer, key_states), value_states

    @compat.not_compiled
    def get_seq_length(self) -> int:
        """Columns fed so far, pads included."""
        return self.layer.columns_fed

    @compat.not_compiled
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
        """Do nothing; see `StrataCache.crop`."""

    # rows are selected for all layers at once, by the cache

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing; see `StrataCache.reorder_cache`."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Do nothing; see `StrataCache.batch_repeat_interleave`."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing; see `StrataCache.batch_select_indices`."""

    @property
    def batch_size(self) -> int:
        """Rows stored; -1 before the first forward."""
        return self.layer.store.batch_size or -1


class StrataCache(Cache):
    """A cache under a policy. Layers that are not ordinary full attention are transformers' own, uncompressed."""

    def __init__(self, model: PreTrainedModel, policy: Policy, kernels: KernelName, request: Any = None) -> None:
        config = compat.text_config(model)
        stock = compat.stock_layers(config)
        self.passed_through = compat.not_compressed(config, stock)
        ours = [index for index in range(len(stock)) if index not in self.passed_through]
        if not ours:
            kinds = ", ".join(sorted(set(self.passed_through.values())))
            raise UnsupportedModelError(f"{type(model).__name__} has no full-attention layer to compress, only {kinds}")
        if policy.models and any(known not in ("", identity(model)) for known in policy.models):
            raise SpecError("this policy was calibrated on another model: calibrate it on this one")
        if policy.layers not in (None, len(stock)):
            raise SpecError(f"this policy is for {policy.layers} layers, but the model has {len(stock)}")
        self.engine = PolicyCache(policy, ours, kernels, parts_for(policy, model, ours))
        if shape := compat.kv_shape(config):  # so that a budget that cannot be met is refused here already
            like = torch.empty(1, shape[0], 1, shape[1], dtype=model.dtype, device="meta")
            for layer in self.strata.values():
                layer.check(like, like)
        self.kin = Kin(model, request)
        layers = list(stock)
        for i, layer in self.strata.items():
            layers[i] = StrataLayer(layer, self.engine, self.kin)
        super().__init__(layers=layers)

    @property
    def policy(self) -> Policy:
        """What decides."""
        return self.engine.policy

    @property
    def account(self) -> Account:
        """The bytes of the compressed layers."""
        return self.engine.account

    @property
    def strata(self) -> dict[int, Layer]:
        """The compressed layers by number."""
        return self.engine.layers

    def close(self) -> None:
        """Refuse further forwards; what is stored can still be read."""
        self.kin.is_open = False

    # -- transformers' cache contract, where layers must act together -------------------------------------------

    def get_mask_sizes(self, *arguments: Any, **named: Any) -> tuple[int, int]:
        """What transformers asks before every forward. Raises `InputError` after one that ended half-way."""
        fed = next(iter(self.strata.values())).columns_fed
        others = (getattr(self.layers[index], "get_seq_length", None) for index in self.passed_through)
        if any(ask is not None and ask() > fed for ask in others):
            raise InputError(INTERRUPTED)
        return super().get_mask_sizes(*arguments, **named)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest -tokens_to_remove tokens of every row and settle drafts; crop(0) accepts them all."""
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        self.engine.check_crop()  # before a passed-through layer has forgotten anything
        super().crop(tokens_to_remove)
        self.engine.crop(-int(tokens_to_remove))  # older releases give a tensor

    def activate_past_recording(self) -> None:
        """Hold every later forward tentative until `crop`, as assisted decoding needs it."""
        super().activate_past_recording()
        self.engine.activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row beam_idx[i] is now."""
        super().reorder_cache(cast(LongTensor, beam_idx))
        self.engine.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        rows = next(iter(self.strata.values())).store.batch_size
        self.engine.select_rows([row for row in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.engine.select_rows(indices.tolist())

    def reset(self) -> None:
        """Free everything and start anew."""
        for index in self.passed_through:
            compat.empty(self.layers[index])
        super().reset()
        self.engine.reset()

    def prefilling(self) -> AbstractContextManager[None]:
        """Feed one prompt in parts and let the policy act once, after the last: one-shot quality at the full peak."""
        return self.engine.prefilling()

    # -- copies and files ---------------------------------------------------------------------------------------

    def fork(self) -> StrataCache:
        """A copy that goes its own way, in the same compress() block; memory is shared until one of both writes.

        Raises `InputError` inside prefilling().
        """
        engine = self.engine.fork()
        memo: dict[int, Any] = {id(self.engine): engine}
        memo |= {id(layer): engine.layers[i] for i, layer in self.strata.items()}
        return copy.deepcopy(self, memo)

    def save(self, folder: str | Path) -> Path:
        """Write what is stored into a folder, as safetensors and JSON, whole or not at all.

        Raises `InputError` while a forward waits, and where layers are passed through uncompressed.
        """
        if self.passed_through:
            raise InputError("layers that are passed through uncompressed cannot be saved: kvstrata has only its own")
        return files.save(self.engine, Path(folder), fingerprint(self.kin.model))

    def load(self, folder: str | Path) -> None:
        """Fill this empty cache from a folder that `save` wrote, under the same policy and model.

        Raises `InputError` for another policy or model, a cache that holds something, and files that are damaged.
        """
        files.load(self.engine, Path(folder), self.kin.model)

    # -- what users read ----------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> Bytes:
        """Bytes of the compressed layers now."""
        return self.account.now

    @property
    def confidence(self) -> list[float] | None:
        """How sure the model was at the newest column, row by row, if the policy reads logits."""
        return self.engine.mode.confidence_at(self.get_seq_length())

    def entries(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """Positions stored for one layer, row and key-value head, ascending, among the row's real tokens."""
        return self.strata[layer].entries(row, head)

    def report(self) -> Report:
        """What is held, what was dropped, and why not where nothing was."""
        return build_report(self.engine, self.passed_through)


class SignalLogits(LogitsProcessor):
    """Shows a cache the logits that reach it among `generate`'s processors, for `signal_logits=processed`.

    Give it last in `logits_processor`, after warpers of your own: those that `generate` makes of `temperature`,
    `top_k` and `top_p` come later still.
    """

    def __init__(self, cache: StrataCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Read scores [B, V] and return them unchanged."""
        engine = self.cache.engine
        if "processed-logits" in engine.policy.needs and engine.waits:  # an assistant model calls it too
            engine.end_step(scores[:, None], join=engine.mode.drafting)
        return scores
