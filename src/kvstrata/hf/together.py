"""One prompt read once for several caches.

A policy acts after attention, so in one forward over a prompt every layer computes the same whatever the policy. The
model runs once; each cache takes the keys and values, makes the attention sums that its own policy reads, and is left
as if it had read the prompt alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvstrata.cache import Layer
from kvstrata.cache.fed import Fed
from kvstrata.core import InputError
from kvstrata.hf import compat
from kvstrata.hf.cache import StrataCache, StrataLayer
from kvstrata.hf.repeat import note_repetition
from kvstrata.kernels.attention import Softmax


class _SameLayer:
    """One layer of several caches that hold the same, in the place of one `Layer`."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._first, *self._others = layers

    @property
    def columns_fed(self) -> int:
        """Columns fed so far."""
        return self._first.columns_fed

    @property
    def seen(self) -> list[int]:
        """Real tokens of each row so far."""
        return self._first.seen

    @property
    def fed(self) -> Fed:
        """What was fed."""
        return self._first.fed

    @property
    def hidden(self) -> Tensor | None:
        """What the layers were given to read."""
        return self._first.hidden

    @hidden.setter
    def hidden(self, states: Tensor | None) -> None:
        for layer in (self._first, *self._others):
            layer.hidden = states

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Sequence[int] | None,
        softmax: Softmax,
        past: Tensor | None,
        own: Tensor | None,
    ) -> Tensor:
        """Attend once and let every layer store and settle."""
        out = self._first.attend(q, k, v, tokens, softmax, past, own)
        for layer in self._others:
            layer.attend(q, k, v, tokens, softmax, past, own, out)
        return out


@torch.no_grad()
def read_together(
    model: PreTrainedModel, caches: Sequence[StrataCache], ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Feed the prompt ids [B, T] to all caches in one forward. -> logits [B, V] of each row's last token

    The caches must be open and empty. Pads stand first, as everywhere. Raises `InputError` where something is stored
    already: what is left of a prompt after a policy differs, and with it all that follows.
    """
    first = caches[0]
    if any(cache.get_seq_length() for cache in caches):
        raise InputError("only empty caches can read a prompt together: reset() them first")
    shared = Cache(layers=[_shared(caches, i) for i in range(len(first.layers))])
    extra = under_padding(attention_mask, ids.shape[1])
    output = cast(Any, model)(ids, logits_to_keep=1, **{compat.CACHE_KEYWORD: shared}, **extra)
    logits = cast(Tensor, output.logits)
    repeated = [cache for cache in caches if cache.kin.request is not None]
    if repeated:
        note_repetition(model, repeated, ids, attention_mask, repeated[0].kin.request)
    for cache in caches:
        if cache is not first:
            for i in first.passed_through:
                cache.layers[i] = copy.deepcopy(first.layers[i])
        if "logits" in cache.policy.needs:
            cache.engine.end_step(logits)
        elif "end" in cache.policy.needs:
            cache.engine.end_forward()
    return logits[:, -1]


def _shared(caches: Sequence[StrataCache], index: int) -> Any:
    first = caches[0].layers[index]
    if not isinstance(first, StrataLayer):
        return first
    same = _SameLayer([cache.strata[index] for cache in caches])
    reader = next((cache for cache in caches if "hidden" in cache.policy.needs), caches[0])  # whose hook gives it them
    return StrataLayer(cast(Layer, same), caches[0].engine, reader.kin)


def under_padding(mask: Tensor | None, queries: int) -> dict[str, Tensor]:
    """What a forward of the newest columns must be told of a padding mask [B, columns]; nothing without pads."""
    if mask is None or bool(mask.all()):
        return {}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -queries:]}
