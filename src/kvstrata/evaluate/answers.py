"""Questions answered in the model's own words, greedily, and whether the references are in what it says."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.cache.layer import PREFILL_ABOVE
from kvstrata.evaluate.runs import FULL, Caches, Outcome, Outcomes, bytes_per_row, feed, read
from kvstrata.evaluate.task import Example, Probe, Scope
from kvstrata.hf import StrataCache


def run_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    caches: Caches,
    example: Example,
    scope: Scope,
    new_tokens: int,
) -> Outcomes:
    """Read the context, with the question or before it, and let every cache answer."""
    probe = example.probes[0]
    visible = scope == "prompt"
    last, _ = read(model, caches, [example.context + probe.question if visible else example.context])
    found: Outcomes = {}
    sizes = {label: bytes_per_row(cache) for label, cache in caches.items()}
    for label, cache in caches.items():
        logits = last[0] if visible else _ask(model, cache, probe.question)
        tokens = _generate(model, cache, logits, new_tokens, _ends(model, tokenizer))
        text = cast(str, tokenizer.decode(tokens, skip_special_tokens=True))
        score = share_found(text, probe)
        item = {"answer": text, "references": list(probe.references), "found": score}
        held, live = sizes[label]
        found[label] = [Outcome(example.name, {"found": score}, held, live, held, sizes[FULL][0], items=[item])]
    return found


def _ask(model: PreTrainedModel, cache: StrataCache, question: list[int]) -> Tensor:
    """Logits [V] after a question, fed in pieces that are no prompt: it chooses nothing of the context."""
    pieces = torch.tensor([question], device=model.device).split(PREFILL_ABOVE, dim=1)
    return [feed(model, cache, piece) for piece in pieces][-1][0, -1]


def share_found(text: str, probe: Probe) -> float:
    """RULER's score of an answer: the share of the references in it, or 1 for any of them; case does not matter."""
    said = re.sub(r"[\x00-\x1f]", "\n", text.strip()).lower()
    hits = [reference.lower() in said for reference in probe.references]
    return float(any(hits)) if probe.any_of else sum(hits) / len(hits)


def _generate(model: PreTrainedModel, cache: StrataCache, logits: Tensor, limit: int, ends: set[int]) -> list[int]:
    """Greedy tokens [<= limit] after logits [V], without the one that ends them."""
    tokens: list[int] = []
    while True:
        token = int(logits.argmax())
        if token in ends:
            return tokens
        tokens.append(token)
        if len(tokens) == limit:
            return tokens
        logits = feed(model, cache, torch.tensor([[token]], device=model.device))[0, -1]


def _ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer."""
    ends: Any = cast(Any, model).generation_config.eos_token_id
    return {
        token
        for token in (cast(Any, tokenizer.eos_token_id), *(ends if isinstance(ends, list) else [ends]))
        if token is not None
    }
