"""How sure a model is of its next token (CONF-KV, arXiv:2605.24786, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

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
