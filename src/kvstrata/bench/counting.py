"""Bytes of a policy on a model that is not there: the engine itself, with payload that takes no memory.

Layers, stores and accounts are the real ones; keys and values live on torch's meta device, attention returns at once,
and scorers are replaced by recency with the same columns, since how much is kept does not depend on what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvstrata.cache.asking import Asking
from kvstrata.cache.layer import Layer
from kvstrata.cache.step import Mode
from kvstrata.core import Column, Signals
from kvstrata.kernels.attention import Attended, Softmax
from kvstrata.kernels.codec.ref import Packed
from kvstrata.kernels.echo import Band
from kvstrata.kernels.pages import PAGE
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.scorers import Stateless
from kvstrata.store import Account, Bytes, LayerStore
from kvstrata.store.coded import PageTier
from kvstrata.store.codes import Codes, Moves
from kvstrata.store.columns import Columns
from kvstrata.store.exact import ExactTier
from kvstrata.store.table import PageTable
from kvstrata.store.units import UnitTier


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one model: what a policy's bytes depend on."""

    layers: tuple[int, ...]  # compressed ones, by number
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    group: int = 1  # query heads per key-value head

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in an uncompressed cache, over these layers."""
        return len(self.layers) * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bill:
    """Bytes over one prompt and its continuation, for the whole batch."""

    after_prompt: Bytes
    at_end: Bytes
    peak: Bytes


@dataclass(frozen=True, slots=True)
class _Stand(Stateless):
    """Recency in place of another scorer, with its columns."""

    kept: tuple[Column, ...]
    band: Band | None = None

    @property
    def asks(self) -> Band | None:
        """As the scorer it stands for."""
        return self.band

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those of the scorer it stands for."""
        return self.kept

    def score(self, signals: Signals) -> Tensor:
        """Position."""
        return signals.position.float()


class _CountingTier(ExactTier):
    """Pages without memory."""

    def write(self, k: Tensor, v: Tensor, tokens: Sequence[int]) -> None:
        pass

    def restore(self, counts: Sequence[Sequence[int]], k: Tensor, v: Tensor, columns: Mapping[str, Tensor]) -> None:
        self._make_room([n for row in counts for n in row for _ in range(self._served)])

    def _move(self, source: PageTable, target: PageTable, segment: Tensor, at: Tensor, to: Tensor) -> None:
        pass


class _CountingPageTier(PageTier):
    """Coded pages without memory."""

    def _pack(self, source: PageTable, segment: Tensor, at: Tensor, account: Account) -> Packed:
        f, pages = self.arena.format, len(at) // PAGE
        account.note_copies(len(at) * (f.k_dim + f.v_dim) * f.dtype.itemsize)
        empty = torch.empty(pages, 0, device="meta")
        return Packed(empty, empty, empty, 0)

    def _write(self, pages: Sequence[int], packed: Packed) -> None:
        pass

    def _shuffle(self, places: Sequence[tuple[int, int]], order: Tensor) -> None:
        pass


class _CountingCodes(Codes):
    """Pages of units without memory."""

    def change(self, moves: Moves, wanted: Sequence[int], exact: ExactTier, account: Account) -> None:
        f = self.arena.format
        if not self._codec.running:
            copied = moves.at.numel() * self.served * (f.k_dim + f.v_dim)
            account.note_copies(copied * (f.dtype if self._codec.plain else torch.float32).itemsize)
        self._resize([n for n in wanted for _ in range(self.served)])


class _CountingUnitTier(UnitTier):
    """Coded units without memory."""

    _codes = _CountingCodes

    def at(self, segment: int, at: Tensor) -> tuple[Tensor, Tensor]:
        f = self.arena.format
        k, v = (torch.empty(len(at), dim, dtype=f.dtype, device="meta") for dim in (f.k_dim, f.v_dim))
        return k, v


class _CountingStore(LayerStore):
    """Payload on the meta device, columns on the CPU."""

    _exact_tier, _page_tier, _unit_tier = _CountingTier, _CountingPageTier, _CountingUnitTier

    def _new_columns(self, device: torch.device) -> Columns:
        return super()._new_columns(torch.device("cpu"))


def _not_computed(store: LayerStore, q: Tensor, *_: object) -> Attended:
    return Attended(q, None, None)


class _CountingAsking(Asking):
    """Queries that wait and get no answer."""

    def ask(self, store: LayerStore, seen: Sequence[int], softmax: Softmax) -> Tensor:
        """Nobody is worth anything."""
        self.keep_newest(self.lse)
        return torch.zeros(store.batch_size, store.num_kv_heads, store.width)


class _CountingLayer(Layer):
    """A layer whose attention is not computed."""

    _attention = staticmethod(_not_computed)
    _asking = _CountingAsking

    def __init__(self, index: int, depth: int, num_layers: int, policy: Policy, mode: Mode) -> None:
        self.account = Account()
        super().__init__(index, depth, num_layers, policy, self.account, mode=mode)
        columns, per_head = policy.columns(index), policy.per_head(index)
        self.trusted = True  # there are no keys to judge codes by
        self.store = _CountingStore(index, columns, per_head, self.account, codecs=self._codecs)


@dataclass(frozen=True, slots=True)
class _Forward:
    """Bytes of one layer in one forward: while its entries stand beside the old ones, and after its plan."""

    most: Bytes
    after: Bytes


def count_bytes(
    policy: Policy,
    shape: KvShape,
    *,
    context: int,
    new_tokens: int,
    batch: int = 1,
    chunk: int | None = None,
    confidence: float = 0.0,
    tick: Callable[[], object] = lambda: None,
) -> Bill:
    """Bytes of a prompt of `context` tokens, in chunks of `chunk`, and `new_tokens` - 1 steps after it.

    The last of the new tokens is never fed. Every step is taken to have the same confidence. Exact for rows without
    pads, but where lengths depend on the scores: `pooled` heads, and layers that divide a
    budget, which are counted with its mean. What merges copy is not in the peak.
    """
    lengths = _chunks(context, chunk) + [1] * max(0, new_tokens - 1)
    runs: dict[object, list[_Forward]] = {}
    traces: list[list[_Forward]] = []
    for depth, layer in enumerate(shape.layers):
        key = _alike(policy, shape, depth, layer, context + new_tokens, batch, confidence)
        if key not in runs:
            runs[key] = _trace(policy, shape, depth, layer, lengths, batch, confidence)
        traces.append(runs[key])
        tick()
    return _bill(traces, len(lengths) - max(0, new_tokens - 1), policy.at_step_end)


def _chunks(context: int, chunk: int | None) -> list[int]:
    size = chunk or context
    return [min(size, context - start) for start in range(0, context, size)]


def _alike(
    policy: Policy, shape: KvShape, depth: int, layer: int, tokens: int, batch: int, confidence: float
) -> object:
    """What two layers must share to hold the same bytes at every step."""
    probe = _CountingLayer(layer, depth, len(shape.layers), _stand_in(policy), Mode())
    k = torch.empty(batch, shape.num_kv_heads, 1, shape.head_dim, dtype=shape.dtype, device="meta")
    limits = [
        rule and tuple(rule.budget.limits(n, confidence, probe.shape_of(k, k)))
        for rule in probe.rules.values()
        for n in (1, tokens // 2, tokens)
    ]
    return tuple(probe.rules.values()), tuple(limits)


def _trace(
    policy: Policy, shape: KvShape, depth: int, layer: int, lengths: list[int], batch: int, confidence: float
) -> list[_Forward]:
    mode = Mode()
    counted = _CountingLayer(layer, depth, len(shape.layers), _stand_in(policy), mode)
    forwards: list[_Forward] = []
    for queries in lengths:
        k = torch.empty(batch, shape.num_kv_heads, queries, shape.head_dim, dtype=shape.dtype, device="meta")
        counted.account.restart_peak()
        counted.attend(k.repeat(1, shape.group, 1, 1), k, k, None, Softmax(1.0))
        mode.fed, mode.confidence = counted.columns_fed, [[confidence]] * batch
        counted.settle()
        forwards.append(_Forward(counted.account.peak, counted.account.now))
    return forwards


def _stand_in(policy: Policy) -> Policy:
    def stand(rule: Rule) -> Rule:
        budget = replace(rule.divided, preference=None) if rule.divided else rule.budget
        return replace(rule, scorer=_Stand(rule.columns, rule.scorer.asks), budget=budget, merge=None)

    return policy.map_rules(stand)


def _bill(traces: list[list[_Forward]], prompt_forwards: int, waits: bool) -> Bill:
    """Add layers up; within a forward they grow one after the other, or all of them before the first plan."""
    peak, after_prompt, before = Bytes(), Bytes(), [Bytes()] * len(traces)
    now = Bytes()
    for number, forwards in enumerate(zip(*traces, strict=True)):
        grown = now
        for old, forward in zip(before, forwards, strict=True):
            peak = peak.most((grown if waits else now).swapped(old, forward.most))
            grown = grown.swapped(old, forward.most)
            now = now.swapped(old, forward.after)
        before = [forward.after for forward in forwards]
        if number == prompt_forwards - 1:
            after_prompt = now
    return Bill(after_prompt, now, peak)
