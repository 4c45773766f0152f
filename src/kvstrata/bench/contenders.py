"""Caches that decode side by side on one model, each stepped by hand and measured in bytes.

One row is prefilled, then repeated with memory of its own in every row, so that a step reads as much as with prompts
that differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvstrata.bench import repaired
from kvstrata.hf import StrataCache, compress
from kvstrata.hf.attention import NAME as OURS
from kvstrata.hf.compat import CACHE_KEYWORD, attention_name, set_attention_name, text_config
from kvstrata.hf.together import read_together
from kvstrata.kernels.attention import KernelName
from kvstrata.policy import parse_policy


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt that one row has been fed with transformers' own cache."""

    ids: Tensor  # [1, T]
    cache: DynamicCache
    first: int  # the most likely token after it


@torch.no_grad()
def read_prompt(model: PreTrainedModel, ids: Tensor) -> Prompt:
    """Feed ids [1, T]."""
    cache = DynamicCache(config=model.config)
    with attention_of(model, "sdpa"):
        logits = cast(Any, model)(ids, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits
    return Prompt(ids, cache, int(logits[0, -1].argmax()))


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Generator[None]:
    """Call attention by another name inside the block."""
    config = text_config(model)
    before = attention_name(config)
    set_attention_name(config, name)
    try:
        yield
    finally:
        set_attention_name(config, before)


class Contender:
    """One cache and the attention that goes with it."""

    def __init__(
        self, name: str, model: PreTrainedModel, cache: Cache, attention: str, nbytes: Callable[[], int]
    ) -> None:
        self.name, self.cache, self.nbytes = name, cache, nbytes
        self._model, self._attention = model, attention

    @torch.no_grad()
    def step(self, token: int, rows: int) -> Tensor:
        """Feed one token to every row. -> logits [rows, V] in fp32 on the CPU, so that the clock stops there."""
        ids = torch.full((rows, 1), token, device=self._model.device)
        with attention_of(self._model, self._attention):
            output = cast(Any, self._model)(ids, logits_to_keep=1, **{CACHE_KEYWORD: self.cache})
        return cast(Tensor, output.logits)[:, -1].float().cpu()


def stock(model: PreTrainedModel, prompt: Prompt, rows: int) -> Contender:
    """transformers' DynamicCache with sdpa."""
    cache = copy.deepcopy(prompt.cache)
    cache.batch_repeat_interleave(rows)
    return Contender("hf", model, cache, "sdpa", lambda: tensor_bytes(cache.layers))


def repaired_stock(model: PreTrainedModel, prompt: Prompt, rows: int, steps: int) -> Contender:
    """The same, repaired; see `bench.repaired`."""
    cache = repaired.repaired_cache(model, prompt.ids.shape[1] + steps)
    _fill(cache, prompt, rows)
    layers = cast("list[repaired.RepairedLayer]", cache.layers)
    return Contender("repaired", model, cache, repaired.NAME, lambda: sum(layer.nbytes for layer in layers))


def ours(
    model: PreTrainedModel,
    prompt: Prompt,
    rows: int,
    policy: str,
    stack: ExitStack,
    kernels: KernelName = "auto",
    read: StrataCache | None = None,
) -> Contender:
    """A cache of kvstrata's, open as long as `stack` is: `read` if it has read one row already, else one that does."""
    cache = read or stack.enter_context(compress(model, policy, kernels=kernels))
    if read is None and keeps_all(policy, cache):
        for index, layer in cache.strata.items():
            k, v = _entries(prompt, index, rows)
            layer.fill(k, v, seen=k.shape[2])
    else:
        if read is None:
            read_together(model, [cache], prompt.ids)
        cache.batch_repeat_interleave(rows)
        for layer in cache.strata.values():
            layer.store.unshare()
    return Contender(policy, model, cache, OURS, lambda: _held(cache))


def keeps_all(policy: str, cache: StrataCache) -> bool:
    """Whether the cache will hold the prompt's own keys and values, so that nothing needs to be read."""
    rules = (rule for layer in cache.strata for rule in parse_policy(policy).rules(layer).values())
    return not any(rules) and not cache.passed_through


def read_for(
    model: PreTrainedModel, ids: Tensor, wanted: Sequence[tuple[str, KernelName, ExitStack]]
) -> list[StrataCache | None]:
    """Open caches and let them read ids [1, T] in one forward; None for one that keeps all, which need not."""
    found: list[StrataCache | None] = []
    for policy, kernels, stack in wanted:
        cache = stack.enter_context(compress(model, policy, kernels=kernels))
        found.append(None if keeps_all(policy, cache) else cache)
    if reading := [cache for cache in found if cache is not None]:
        read_together(model, reading, ids)
    return found


def _held(cache: StrataCache) -> int:
    other = [cache.layers[index] for index in cache.passed_through]
    return cache.nbytes.held + tensor_bytes(other)


def _fill(cache: Cache, prompt: Prompt, rows: int) -> None:
    for index in range(len(prompt.cache.layers)):
        cache.update(*_entries(prompt, index, rows), index)


def _entries(prompt: Prompt, layer: int, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, H, T, D] of one layer, every row with memory of its own."""
    stored = cast(Any, prompt.cache.layers[layer])
    k, v = cast(Tensor, stored.keys), cast(Tensor, stored.values)
    return k.repeat(rows, 1, 1, 1), v.repeat(rows, 1, 1, 1)


def tensor_bytes(layers: Sequence[object]) -> int:
    """Bytes of all tensors that cache layers hold."""
    return sum(value.nbytes for layer in layers for value in vars(layer).values() if isinstance(value, Tensor))
