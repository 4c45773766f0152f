"""All compressed layers of one model under one policy, and what they share."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from kvstrata.cache.across import settle_together
from kvstrata.cache.layer import Layer
from kvstrata.cache.model import NOTHING, Model
from kvstrata.cache.step import MOST_DRAFTS, Mode
from kvstrata.core import InputError
from kvstrata.kernels.attention import KernelName
from kvstrata.policy.confidence import confidence
from kvstrata.policy.policy import Policy
from kvstrata.store import Account, Arenas


class PolicyCache:
    """Layers by their number in the model. Everything a cache knows is in here; there is no state elsewhere."""

    def __init__(
        self, policy: Policy, layers: Sequence[int], kernels: KernelName = "auto", model: Model = NOTHING
    ) -> None:
        self.policy, self.model = policy, model
        self.account = Account()
        self.mode = Mode(steadied=policy.steadied)
        self.nan_logits = 0  # rows of logits with a NaN, which counted as unsure
        self.arenas = Arenas(self.account)
        self.layers = {
            layer: Layer(layer, depth, len(layers), policy, self.account, kernels, self.mode, self.arenas, model)
            for depth, layer in enumerate(layers)
        }

    @property
    def full_bytes(self) -> int:
        """Bytes that the same tokens take in an uncompressed cache of the same dtype."""
        return sum(layer.store.token_bytes * sum(layer.fed.real) for layer in self.layers.values())

    def end_step(self, logits: Tensor, join: bool = False) -> None:
        """Take the step's logits [B, K, V], those of its K newest columns, and settle what waited for them.

        With `join` they follow the ones given before for the same step. Drafts and unfinished prompts wait on.
        """
        first = next(iter(self.layers.values()))
        kept = logits[:, -MOST_DRAFTS if self.mode.drafting else -1 :]
        rows: list[list[float]] = confidence(kept).tolist()
        self.nan_logits += sum(c != c for row in rows for c in row)
        rows = [[0.0 if c != c else c for c in row] for row in rows]
        if join and self.mode.confidence is not None and self.mode.fed == first.columns_fed:
            self.mode.confidence = [before + now for before, now in zip(self.mode.confidence, rows, strict=True)]
        else:
            self.mode.take(rows, first.columns_fed)
        self.end_forward()

    def fork(self) -> PolicyCache:
        """A copy that shares all pages until one of both writes to them. Raises `InputError` inside prefilling()."""
        if self.mode.prefilling:
            raise InputError("fork() inside prefilling(): end that block first")
        memo: dict[int, Any] = {id(shared): shared for shared in (self.policy, self.model, self.arenas, *self.arenas)}
        twin = copy.deepcopy(self, memo)
        for layer in twin.layers.values():
            layer.store.share()
        self.arenas.join(twin.account)
        return twin

    @property
    def waits(self) -> bool:
        """Whether some layer has a forward that is not settled yet."""
        return any(layer.waits for layer in self.layers.values())

    def settle(self) -> None:
        """Let every layer act on the forward that waits, those together that depend on one another."""
        together = [layer for layer in self.layers.values() if layer.waits_for_others]
        for layer in self.layers.values():
            if not layer.waits_for_others:
                layer.settle()
        if together:
            settle_together(together)

    def accept(self) -> None:
        """Take drafts that wait for granted and settle, since the next forward is here."""
        if not self.mode.prefilling:
            for layer in self.layers.values():
                layer.accept()
            self.settle()

    def end_forward(self) -> None:
        """Settle what waited for the end of the forward, unless drafts or a prompt wait on."""
        if not self.mode.drafting and not self.mode.prefilling:
            self.settle()

    @contextmanager
    def prefilling(self) -> Generator[None]:
        """Feed one prompt in parts: what is dropped is decided once, after the last part (one-shot quality, full peak).

        Also after an exception the parts that were fed are settled.
        """
        if self.mode.prefilling:
            raise InputError("a prompt is being fed already: end that prefilling() block first")
        self.settle()
        self.mode.prefilling, self.mode.prompt_start = True, next(iter(self.layers.values())).columns_fed
        try:
            yield
        finally:
            self.mode.prefilling = False
            self.settle()
            for layer in self.layers.values():
                layer.step += 1  # one step, whatever the number of parts

    def activate_past_recording(self) -> None:
        """Take the entries of every later forward for drafts until `crop`, or until the next forward accepts them."""
        if not self.mode.drafting and not self.mode.prefilling:
            self.settle()
        self.mode.drafting = True

    def stop_past_recording(self) -> None:
        """Take forwards as they are again; what waits is accepted."""
        self.mode.drafting = False
        if not self.mode.prefilling:
            self.settle()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now."""
        if not self.mode.prefilling:
            self.settle()
        for layer in self.layers.values():
            layer.select_rows(rows)
        if self.mode.confidence is not None:
            self.mode.confidence = [self.mode.confidence[row] for row in rows]
            self.mode.moods = [self.mode.moods[row] for row in rows] if self.mode.moods else []

    def check_crop(self) -> None:
        """Raise `InputError` where nothing can be taken back."""
        if self.mode.prefilling:
            raise InputError("crop() inside prefilling(): scores of what was fed cannot be taken back; end it first")

    def crop(self, count: int) -> None:
        """Forget the newest `count` tokens of every row and settle drafts, also by crop(0).

        Drafts that stay count, those that go never did.
        """
        self.check_crop()
        if any(layer.judges(count) for layer in self.layers.values()):
            self.settle()
        for layer in self.layers.values():
            layer.forget(count)
        self.settle()
        if self.mode.confidence is not None and count > 0:  # what comes next must not find confidence of what went
            kept = [row[: max(0, len(row) - count)] for row in self.mode.confidence]
            self.mode.fed -= count
            self.mode.confidence = kept if kept[0] else None

    def reset(self) -> None:
        """Free everything and start anew."""
        for layer in self.layers.values():
            layer.reset()
        self.mode.drafting, self.mode.confidence, self.mode.fed, self.mode.moods = False, None, 0, []
        self.nan_logits = 0
