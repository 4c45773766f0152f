"""What layers share about the step that runs, and what one layer keeps of a forward that waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata.cache.fed import Fed
from kvstrata.core import UnsupportedModelError
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.mass import ALL_ROWS, Moments
from kvstrata.policy.confidence import Mood, Steady
from kvstrata.policy.policy import Rule

INTERRUPTED = "a forward was interrupted half-way, so layers hold different tokens: reset() the cache"
MOST_DRAFTS = 64  # tokens that one verdict may reject


@dataclass(slots=True)
class Mode:
    """What the layers of one cache share: how forwards are settled now, and how sure the model was."""

    drafting: bool = False  # new entries are tentative until crop
    prefilling: bool = False  # the prompt's plan waits for its last part
    prompt_start: int = 0  # columns fed before that prompt
    fed: int = 0  # columns fed when the logits came
    confidence: list[list[float]] | None = None  # [B][K] of the K newest columns of those
    steadied: tuple[float, Steady] | None = None
    moods: list[Mood | None] = field(default_factory=list[Mood | None])  # [B] before those columns
    clocks: list[Fed] = field(default_factory=list[Fed])  # of all layers, which agree between forwards

    def confidence_at(self, fed: int) -> list[float] | None:
        """Confidence [B] after the column number `fed`, if its logits came; 1 or 0 where it is steadied."""
        back = self.fed - fed
        if self.confidence is None or not 0 <= back < len(self.confidence[0]):
            return None
        if self.steadied is None:
            return [row[-1 - back] for row in self.confidence]
        return [float(mood.sure) for mood in self._moods(back)]

    def take(self, rows: list[list[float]], fed: int) -> None:
        """Note the confidence [B][K] of the K newest of `fed` columns."""
        part = self.prefilling and self.fed > self.prompt_start  # of a prompt, whose last part alone counts
        if self.steadied is not None and not part:
            alike = self.confidence is not None and len(self.confidence) == len(rows)
            self.moods = list(self._moods(0)) if alike else [None] * len(rows)
        self.fed, self.confidence = fed, rows

    def _moods(self, back: int) -> list[Mood]:
        """Of every row, `back` columns before the newest."""
        assert self.steadied is not None
        assert self.confidence is not None
        (tau, steady), found = self.steadied, list[Mood]()
        for mood, row in zip(self.moods, self.confidence, strict=True):
            for c in row[: len(row) - back]:
                mood = steady.follow(mood, c, tau)
            found += [mood] if mood else []
        return found


@dataclass(slots=True)
class Events:
    """What happened in a layer that a user should know of."""

    evicted: int = 0  # entries freed, per head where heads differ
    overruns: int = 0  # plans whose protected tokens exceeded the budget
    nan_scores: Tensor | int = 0  # a tensor on the layer's device until the report reads it
    plans: int = 0
    no_logits: int = 0  # forwards whose logits, or whose end, a rule waited for in vain
    lost: float = 0.0  # squared error of coded keys over the variance of keys, as far as it was looked at


@dataclass(slots=True)
class Pending:
    """A forward that is not settled yet."""

    rule: Rule | None
    step: int  # number of the forward
    columns: int  # fed by it, pads included
    tokens: list[int]  # real ones of each row
    mass: Tensor | None = None
    softmax: Softmax | None = None
    queries: list[Tensor] = field(default_factory=list[Tensor])  # per row [H*G, R, D], where mass is made later
    observed: bool = False  # whether the scorer has seen it
    draft: bool = False
    unjudged: Rule | None = None  # the rule of a draft that turns out to be a prompt
    begins: Rule | None = None  # the decode rule whose sums begin with a draft that turns out to be a prompt

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what is row `rows[i]` now, of a forward whose mass is made later."""
        self.tokens = [self.tokens[row] for row in rows]
        self.queries = [self.queries[row] for row in rows] if self.queries else []

    def shorten(self, count: int) -> None:
        """Leave out its newest `count` columns."""
        self.columns -= count
        gone = [min(count, n) for n in self.tokens]
        self.tokens = [n - less for n, less in zip(self.tokens, gone, strict=True)]
        self.queries = [q[:, : max(0, q.shape[1] - less)] for q, less in zip(self.queries, gone, strict=False)]


def newest_queries(q: Tensor, tokens: list[int], rows: int) -> list[Tensor]:
    """The newest `rows` real queries of every row of q [B, H*G, Q, D], or all, as tensors of their own."""
    counts = tokens if rows == ALL_ROWS else [min(n, rows) for n in tokens]
    return [q[row, :, q.shape[2] - n :].clone() for row, n in enumerate(counts)]


def joined_queries(before: Tensor, now: Tensor, rows: int) -> Tensor:
    """Queries [H*G, R, D] of two parts of a prompt, the newest `rows` of them."""
    missing = before.shape[1] if rows == ALL_ROWS else min(before.shape[1], rows - now.shape[1])
    return torch.cat([before[:, before.shape[1] - missing :], now], dim=1) if missing > 0 else now


def check_own(mode: Mode, rule: Rule | None, rules: Iterable[Rule | None], seeds: bool) -> None:
    """Refuse image masks where attention is summed later, when they are gone, or begins sums (`seeds`)."""
    if rule is not None and isinstance(rule.scorer.mass, Moments):
        raise UnsupportedModelError(
            "a prompt whose tokens see later ones (images) cannot come under a policy that reads how attention is "
            "spread over queries, as cake does: take another"
        )
    late = seeds or mode.drafting or (mode.prefilling and rule is not None and not rule.scorer.columns)
    if late and any(other.scorer.mass for other in rules if other):
        raise UnsupportedModelError(
            "a prompt whose tokens see later ones (images) cannot come with drafts, in parts with prefilling(), or "
            "where decoding begins with its attention, under a policy that reads attention: feed it at once, then "
            "draft, with one rule for prompt and decoding"
        )
