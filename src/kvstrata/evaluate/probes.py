"""Questions asked of a compressed context, all of them as rows of one batch, scored by the likelihood of the answers.

The rows are copies of the context's row that share its pages, so nothing is read twice and nothing is compressed on
account of another question. Scope "context": the question comes after compression. "prompt": it is read with the
context, before anything is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstrata.evaluate.runs import (
    FULL,
    Answered,
    Caches,
    Outcome,
    Outcomes,
    bytes_per_row,
    continued,
    feed,
    figures,
    item,
    padded,
    read,
    scored,
)
from kvstrata.evaluate.task import Example, Probe, Scope
from kvstrata.hf import StrataCache


def run_probes(model: PreTrainedModel, caches: Caches, examples: Sequence[Example], scope: Scope) -> Outcomes:
    """Read the contexts as rows of one batch, then ask every cache everything."""
    owners = [i for i, example in enumerate(examples) for _ in example.probes]
    probes = [probe for example in examples for probe in example.probes]
    if scope == "prompt":
        rows = [examples[owner].context + probe.question for owner, probe in zip(owners, probes, strict=True)]
    else:
        rows = [example.context for example in examples]
    last, mask = read(model, caches, rows)
    sizes = {label: bytes_per_row(cache) for label, cache in caches.items()}
    answers = {
        label: continued(model, cache, last, mask, [probe.answer for probe in probes])
        if scope == "prompt"
        else _with_question(model, cache, mask, owners, probes)
        for label, cache in caches.items()
    }
    return {
        label: [
            _outcome(example, [a for a, owner in zip(found, owners, strict=True) if owner == i], sizes[label], full)
            for i, example in enumerate(examples)
        ]
        for label, found in answers.items()
        for full in [sizes[FULL][0]]
    }


def _with_question(
    model: PreTrainedModel, cache: StrataCache, mask: Tensor, owners: list[int], probes: list[Probe]
) -> list[Answered]:
    """Ask a compressed context: question and answer in one forward, from copies of the context's row."""
    cache.batch_select_indices(torch.tensor(owners, device=mask.device))
    ids, asked = padded([probe.question + probe.answer[:-1] for probe in probes], mask.device)
    keep = max(len(probe.answer) for probe in probes)
    cache.engine.activate_past_recording()  # nothing is planned for tokens after which nothing comes
    logits = feed(model, cache, ids, torch.cat([mask[owners], asked], dim=1), keep)
    return [scored(row[keep - len(p.answer) :], p.answer) for row, p in zip(logits, probes, strict=True)]


def _outcome(example: Example, answered: list[Answered], size: tuple[int, int], full: int) -> Outcome:
    items = [item(probe.tags, one) for probe, one in zip(example.probes, answered, strict=True)]
    held, live = size
    return Outcome(example.name, figures(answered), held, live, held, full, items=items)
