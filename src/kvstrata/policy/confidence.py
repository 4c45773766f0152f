"""How sure a model is of its next token (CONF-KV, arXiv:2605.24786, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstrata.core import SpecError

ENTROPY, MARGIN, TOP = 0.4, 0.3, 0.3  # weights, grid-searched on GPT-2 by the authors
LEAST, MOST = 0.15, 1.0  # of the uniform distribution (for many tokens) and of certainty


def confidence(logits: Tensor) -> Tensor:
    """logits [..., V] -> fp32 [...] in 0 .. 1: 0.4 (1 - entropy / ln V) + 0.3 sigmoid(margin) + 0.3 top probability.

    The margin is the difference of the two largest log-probabilities (natural logarithm). Tokens masked with -inf
    do not count in V. NaN where a row of logits has a NaN: whoever asks treats that as unsure and counts it.
    """
    log_p = logits.float().log_softmax(dim=-1)
    p = log_p.exp()
    tokens = (log_p > -torch.inf).sum(dim=-1)
    entropy = -(p * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(dim=-1)
    spread = torch.where(tokens > 1, entropy / tokens.clamp_min(2).float().log(), 0.0)
    best = log_p.topk(min(2, log_p.shape[-1]), dim=-1).values
    margin = best[..., 0] - best[..., 1] if log_p.shape[-1] > 1 else torch.full_like(entropy, torch.inf)
    c = ENTROPY * (1 - spread) + MARGIN * margin.sigmoid() + TOP * best[..., 0].exp()
    return c.clamp(0.0, 1.0)


class Mood(NamedTuple):
    """How sure a row has been of late: the average, whether it counts as sure, and for how many steps it has."""

    average: float
    sure: bool
    steps: int


@dataclass(frozen=True, slots=True)
class Steady:
    """Keeps a budget from following every twitch of confidence; as it is, it changes nothing.

    smooth: what a moving average of confidence keeps of itself at a step. band: a row becomes sure at tau + band and
    unsure below tau - band. dwell: steps that it stays so at least.
    """

    smooth: float = 0.0
    band: float = 0.0
    dwell: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.smooth < 1:
            raise SpecError(f"smooth={self.smooth}: give 0 (off) up to less than 1")
        if self.band < 0 or self.dwell < 0:
            raise SpecError(f"band={self.band}, dwell={self.dwell}: give 0 (off) or more")

    def follow(self, before: Mood | None, c: float, tau: float) -> Mood:
        """The mood after a step with confidence c."""
        if before is None:
            return Mood(c, c >= tau, 1)
        average = self.smooth * before.average + (1 - self.smooth) * c
        sure = average >= (tau - self.band if before.sure else tau + self.band)
        if sure == before.sure or before.steps < self.dwell:
            return Mood(average, before.sure, before.steps + 1)
        return Mood(average, sure, 1)
