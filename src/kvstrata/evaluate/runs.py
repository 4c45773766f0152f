"""What every kind of run gives, and reading a context into all caches at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.hf import StrataCache
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.together import read_together

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
    whole = bool(mask.all())
    return read_together(model, list(caches.values()), ids, None if whole else mask), mask


@torch.no_grad()
def feed(model: PreTrainedModel, cache: StrataCache, ids: Tensor, mask: Tensor | None = None, keep: int = 1) -> Tensor:
    """Feed ids [B, Q] after what was read, under the mask [B, fed + Q] of all columns. -> logits [B, keep, V]"""
    extra: dict[str, Tensor] = {}
    if mask is not None and not bool(mask.all()):
        places = (mask.cumsum(dim=1) - 1).clamp_min(0)
        extra = {"attention_mask": mask, "position_ids": places[:, -ids.shape[1] :]}
    output = cast(Any, model)(ids, logits_to_keep=keep, **{CACHE_KEYWORD: cache}, **extra)
    return cast(Tensor, output.logits)


def scored(logits: Tensor, answer: Sequence[int]) -> tuple[list[float], list[bool]]:
    """nats and whether it is the likeliest, of every token of an answer, from logits [A, V]."""
    log_probs = logits.float().log_softmax(dim=-1).cpu()
    target = torch.tensor(list(answer))
    nats = -log_probs.gather(1, target[:, None])[:, 0]
    return nats.tolist(), (log_probs.argmax(dim=-1) == target).tolist()
