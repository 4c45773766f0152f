"""Asking a model to repeat its context, and what each entry of the context gets of that pass's attention (KVzip).

The pass reads what a cache holds and stores nothing. Scores are maxima over the pass's queries of a softmax over the
first tokens, one chunk of the context and the pass itself; no matrix of queries by keys is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvstrata.cache import Layer
from kvstrata.cache.fed import Fed
from kvstrata.cache.model import Model, loudness
from kvstrata.core import InputError
from kvstrata.hf import compat
from kvstrata.hf.cache import StrataCache, StrataLayer
from kvstrata.hf.framing import encode, frame_of
from kvstrata.kernels.attention import Softmax, attend
from kvstrata.kernels.dispatch import Implementation
from kvstrata.kernels.mass.ref import block_scores, query_blocks
from kvstrata.kernels.norms import output_norms
from kvstrata.policy.scorers.learned import REPEATED, REPEATED_PLUS

CHUNK = 2000  # tokens repeated at a time (KVzip, appendix)
LEAD = 8  # last tokens of a chunk that the request for the next one names
SINKS = 4
LEAST = 1e-12  # of a score, so that its logarithm is a number and 0 means that nobody asked
FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids of the two requests, and of what stands between a request and the answer."""

    first: list[int]
    later: list[int]
    after: list[int]


def request_of(tokenizer: PreTrainedTokenizerBase) -> Request:
    """The requests in a model's own tokens, and what its chat template puts behind a user's words."""
    return Request(*(encode(tokenizer, text) for text in (FIRST, LATER, frame_of(tokenizer).after)))


class _Asked:
    """One layer of one row, in the place of a `Layer`: attends over its entries and the pass, and notes the scores."""

    def __init__(self, layer: Layer, row: int, model: Model) -> None:
        self.fed, self.index, self.seen = Fed(), layer.index, [layer.seen[row]]
        self._kernels: Implementation = layer.store.kernels
        self._outputs = model.outputs.get(layer.index)
        blocks = [block for block in layer.store.blocks(split_rows=True) if block.rows.start == row]
        if layer.store.coded or len({block.k.shape[2] for block in blocks}) > 1:
            raise InputError("only a whole context can be repeated: nothing may be dropped or coded before")
        self.k = torch.cat([block.k for block in blocks], dim=1)  # [1, H, T, D]
        self.v = torch.cat([block.v for block in blocks], dim=1)
        self.chunk = slice(0, 0)
        self.hidden: Tensor | None = None
        self.scores = torch.full((2, *self.k.shape[1:3]), LEAST, device=self.k.device)  # KVzip's and KVzip+'s [H, T]

    @property
    def columns_fed(self) -> int:
        """Tokens of the row."""
        return self.seen[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: object, softmax: Softmax, *_: object) -> Tensor:
        """Attend over the context and the pass so far, as if these were its newest entries."""
        every = (torch.cat(pair, dim=2) for pair in ((self.k, k), (self.v, v)))
        out = attend(q, *every, softmax=softmax, kernels=self._kernels).out
        self._note(q, k, softmax)
        return out

    def _note(self, q: Tensor, own: Tensor, softmax: Softmax) -> None:
        """Take in what queries q [1, H*G, R, D] give the chunk beside the first tokens and their own keys."""
        first = self.k[:, :, : min(SINKS, self.chunk.start)]
        keys = torch.cat([first, self.k[:, :, self.chunk], own], dim=2).float()
        heads, rows, size = keys.shape[1], q.shape[2], self.chunk.stop - self.chunk.start
        place = slice(first.shape[2], first.shape[2] + size)
        norm = None if self.hidden is None else loudness(self.hidden[0])
        best = torch.full((2, heads, q.shape[1] // heads, size), -torch.inf, device=q.device)
        for start, stop in query_blocks(rows, q.shape[1] * keys.shape[2]):
            own_first, end = keys.shape[2] - rows + start, keys.shape[2] - rows + stop
            scores = block_scores(q[:, :, start:stop], keys[:, :, :end], own_first, softmax.scale, softmax.softcap)[0]
            found = scores[..., place] - scores.logsumexp(dim=-1, keepdim=True)  # [H, G, r, chunk]
            best[0] = torch.maximum(best[0], found.amax(dim=2))
            if norm is not None:
                best[1] = torch.maximum(best[1], (found - norm[start:stop, None]).amax(dim=2))
        worth = best.exp_()
        if self._outputs is not None and norm is not None:
            worth[1] *= output_norms(self._outputs, self.v[:, :, self.chunk], self._kernels)[0]
        self.scores[:, :, self.chunk] = torch.maximum(self.scores[:, :, self.chunk], worth.amax(dim=2))


@torch.no_grad()
def repeat(model: PreTrainedModel, cache: StrataCache, ids: Sequence[int], row: int, request: Request) -> list[Tensor]:
    """Scores [2, H, T] of every layer of `cache`, which holds the tokens `ids` in `row`: KVzip's and KVzip+'s.

    Those of KVzip+ are there where the policy reads hidden states and output projections. Raises `InputError` where the
    cache holds less than `ids`.
    """
    layers = {i: _Asked(layer, row, cache.engine.model) for i, layer in cache.strata.items()}
    if any(layer.k.shape[2] != len(ids) for layer in layers.values()):
        raise InputError(f"a context of {len(ids)} tokens can be repeated only while all of them are stored")
    for start in range(0, len(ids), CHUNK):
        chunk = list(ids[start : start + CHUNK])
        lead = [*request.later, *ids[max(0, start - LEAD) : start]] if start else request.first
        fed = torch.tensor([[*lead, *request.after, *chunk]], device=model.device)
        for layer in layers.values():
            layer.chunk = slice(start, start + len(chunk))
        # a copy of what is passed through, since that is written to
        twin = Cache(layers=[_beside(cache, layers, i, row) for i in range(len(cache.layers))])
        cast(Any, model)(fed, logits_to_keep=1, **{compat.CACHE_KEYWORD: twin})
    return [layer.scores for layer in layers.values()]


def _beside(cache: StrataCache, layers: dict[int, _Asked], index: int, row: int) -> Any:
    if index in layers:
        return StrataLayer(cast(Layer, layers[index]), cache.engine, cache.kin)
    layer = copy.deepcopy(cast(Any, cache.layers[index]))
    if layer.is_initialized:
        layer.batch_select_indices(torch.tensor([row]))
    return layer


def note_repetition(
    model: PreTrainedModel, caches: Sequence[StrataCache], ids: Tensor, mask: Tensor | None, request: Request
) -> None:
    """Let the model repeat the prompts ids [B, T] that all caches hold, and write the scores into their columns."""
    fullest = max(caches, key=lambda cache: len(cache.policy.needs & {"hidden", "outputs"}))
    for row in range(ids.shape[0]):
        own = ids[row] if mask is None else ids[row][mask[row].bool()]
        scores = repeat(model, fullest, own.tolist(), row, request)
        for cache in caches:
            for layer, found in zip(cache.strata.values(), scores, strict=True):
                for kind, column in enumerate((REPEATED, REPEATED_PLUS)):
                    if column.name in {c.name for c in layer.store.columns}:
                        whole = layer.store.column(column.name).clone()
                        shared = whole.shape[1] < found.shape[1]
                        whole[row, :, : len(own)] = found[kind].amax(dim=0, keepdim=True) if shared else found[kind]
                        layer.store.set_column(column.name, whole)
