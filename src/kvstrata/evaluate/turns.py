"""Known turns of a conversation, each fed in one forward after which the policy acts; the assistant's are scored."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.evaluate.runs import FULL, Caches, Outcome, Outcomes, bytes_per_row, feed, read, scored
from kvstrata.evaluate.task import Example
from kvstrata.hf import StrataCache


def run_turns(model: PreTrainedModel, caches: Caches, example: Example) -> Outcomes:
    """Let all caches read the context, then replay the turns in each."""
    last, _ = read(model, caches, [example.context])
    found = {label: _replay(model, cache, example, last[0]) for label, cache in caches.items()}
    full = found[FULL].held
    for outcome in found.values():
        outcome.full = full
    return {label: [outcome] for label, outcome in found.items()}


def _replay(model: PreTrainedModel, cache: StrataCache, example: Example, last: Tensor) -> Outcome:
    """Bytes are those that each turn was fed upon; the last turn's own forward is not counted."""
    nats: list[float] = []
    right: list[bool] = []
    late: list[bool] = []
    sizes: list[tuple[int, int]] = []
    items: list[dict[str, object]] = []
    for turn in example.turns:
        sizes.append(bytes_per_row(cache))
        keep = len(turn.ids) if turn.scored else 1
        logits = feed(model, cache, torch.tensor([turn.ids], device=model.device), keep=keep)[0]
        if turn.scored:
            of_turn, hits = scored(torch.cat([last[None], logits[:-1]]), turn.ids)
            nats, right, late = nats + of_turn, right + hits, late + turn.late
            items.append({"nll": mean(of_turn), "tokens": len(of_turn), "late": sum(turn.late)})
        last = logits[-1]
    values = {"nll": mean(nats), "top1": mean(right)}
    if any(late):  # an example without late references has no such figure
        values["late_nll"] = mean(n for n, is_late in zip(nats, late, strict=True) if is_late)
    held, live = [s[0] for s in sizes], [s[1] for s in sizes]
    return Outcome(example.name, values, round(mean(held)), round(mean(live)), max(held), 0, items=items)
