"""What layers share about the step that runs, and what one layer keeps of a forward that waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstrata.cache.fed import Fed
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.mass import ALL_ROWS
from kvstrata.policy.policy import Rule

MOST_DRAFTS = 64  # tokens that one verdict may reject


@dataclass(slots=True)
class Mode:
    """What the layers of one cache share: how forwards are settled now, and how sure the model was."""

    drafting: bool = False  # new entries are tentative until crop
    prefilling: bool = False  # the prompt's plan waits for its last part
    prompt_start: int = 0  # columns fed before that prompt
    fed: int = 0  # columns fed when the logits came
    confidence: list[list[float]] | None = None  # [B][K] of the K newest columns of those
    clocks: list[Fed] = field(default_factory=list[Fed])  # of all layers, which agree between forwards

    def confidence_at(self, fed: int) -> list[float] | None:
        """Confidence [B] after the column number `fed`, if its logits came."""
        back = self.fed - fed
        if self.confidence is None or not 0 <= back < len(self.confidence[0]):
            return None
        return [row[-1 - back] for row in self.confidence]


@dataclass(slots=True)
class Events:
    """What happened in a layer that a user should know of."""

    evicted: int = 0  # entries freed, per head where heads differ
    overruns: int = 0  # plans whose protected tokens exceeded the budget
    nan_scores: Tensor | int = 0  # a tensor on the layer's device until the report reads it
    plans: int = 0
    no_logits: int = 0  # forwards whose logits were needed and never came


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


def newest_queries(q: Tensor, tokens: list[int], rows: int) -> list[Tensor]:
    """The newest `rows` real queries of every row of q [B, H*G, Q, D], or all, as tensors of their own."""
    counts = tokens if rows == ALL_ROWS else [min(n, rows) for n in tokens]
    return [q[row, :, q.shape[2] - n :].clone() for row, n in enumerate(counts)]


def joined_queries(before: Tensor, now: Tensor, rows: int) -> Tensor:
    """Queries [H*G, R, D] of two parts of a prompt, the newest `rows` of them."""
    missing = before.shape[1] if rows == ALL_ROWS else min(before.shape[1], rows - now.shape[1])
    return torch.cat([before[:, before.shape[1] - missing :], now], dim=1) if missing > 0 else now
