"""What every kind of run gives, and reading a context into all caches at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.evaluate.task import Tags
from kvstrata.hf import StrataCache
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.together import read_together, under_padding

Caches = dict[str, StrataCache]  # by the label of the policy; "full" is always among them
FULL = "full"


@dataclass(slots=True)
class Outcome:
    """One policy on one example. Bytes are per row: the mean over the steps, and the most between two forwards."""

    example: str
    values: dict[str, float]
    held: int
    live: int
    peak: int
    full: int  # what the full cache holds then
    ms_per_token: float | None = None
    items: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rows: int = 1  # of the batch that it was measured in
    resolved: str = ""  # the policy with the budget that was found for it
    where: str = ""  # versions, processor and threads

    def to_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


Answered = tuple[list[float], list[bool]]  # nats and hits of an answer's tokens
Outcomes = dict[str, list[Outcome]]  # by label, in the order of the examples


def bytes_per_row(cache: StrataCache) -> tuple[int, int]:
    """Held and live bytes of one row; stock layers that the policy passes through are not counted in either."""
    rows = next(iter(cache.strata.values())).store.batch_size
    return cache.nbytes.held // rows, cache.nbytes.live // rows


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and mask [B, T] of rows of different lengths, pads first."""
    length = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :], mask[i, length - len(row) :] = torch.tensor(row), 1
    return ids.to(device), mask.to(device)


def read(model: PreTrainedModel, caches: Caches, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Let all caches read the same prompts. -> logits [B, V] of the last tokens, mask [B, T]"""
    ids, mask = padded(rows, model.device)
    return read_together(model, list(caches.values()), ids, mask), mask


@torch.no_grad()
def feed(model: PreTrainedModel, cache: StrataCache, ids: Tensor, mask: Tensor | None = None, keep: int = 1) -> Tensor:
    """Feed ids [B, Q] after what was read, under the mask [B, fed + Q] of all columns. -> logits [B, keep, V]"""
    extra = under_padding(mask, ids.shape[1])
    output = cast(Any, model)(ids, logits_to_keep=keep, **{CACHE_KEYWORD: cache}, **extra)
    return cast(Tensor, output.logits)


def continued(
    model: PreTrainedModel, cache: StrataCache, last: Tensor, mask: Tensor, answers: Sequence[Sequence[int]]
) -> list[Answered]:
    """Score answers that follow what was read, a row each.

    `last` [B, V] foretells their first tokens, one forward the rest; `mask` [B, fed] is that of the columns read.
    """
    keep, rows = max(map(len, answers)) - 1, [row[None] for row in last]
    if keep:
        ids, more = padded([list(answer[:-1]) or [0] for answer in answers], mask.device)
        logits = feed(model, cache, ids, torch.cat([mask, more], dim=1), keep)
        rest = [row[keep + 1 - len(answer) :] for row, answer in zip(logits, answers, strict=True)]
        rows = [torch.cat(pair) for pair in zip(rows, rest, strict=True)]
    return [scored(row, answer) for row, answer in zip(rows, answers, strict=True)]


def labelled(policy: str, budget: str | None) -> str:
    """A policy and its budget, as tables name them."""
    return policy if budget is None else f"{policy} @ {budget}"


def figures(answered: Sequence[Answered]) -> dict[str, float]:
    """Means over answers, each counting the same."""
    return {
        "nll": mean(mean(nats) for nats, _ in answered),
        "token_accuracy": mean(mean(right) for _, right in answered),
        "exact": mean(all(right) for _, right in answered),
    }


def item(tags: Tags, answered: Answered) -> dict[str, Any]:
    """One answer, for the raw outcomes."""
    nats, right = answered
    return {**tags, "nll": mean(nats), "tokens": nats, "right": right, "exact": all(right)}


def scored(logits: Tensor, answer: Sequence[int]) -> Answered:
    """nats and whether it is the likeliest, of every token of an answer, from logits [A, V]."""
    log_probs = logits.float().log_softmax(dim=-1).cpu()
    target = torch.tensor(list(answer))
    nats = -log_probs.gather(1, target[:, None])[:, 0]
    return nats.tolist(), (log_probs.argmax(dim=-1) == target).tolist()
