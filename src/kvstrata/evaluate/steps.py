"""A known continuation fed to all caches in turn, token by token or at once, compared with the full cache's."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean, median

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvstrata.core import InputError
from kvstrata.evaluate.runs import FULL, Caches, Outcome, Outcomes, bytes_per_row, feed, read
from kvstrata.evaluate.task import Example
from kvstrata.hf import StrataCache
from kvstrata.hf.parts import attention_modules

Given = tuple[Tensor, list[Tensor]]  # log-probabilities [B, Q, V]; outputs [B, Q, hidden] of the attention modules


@dataclass(slots=True)
class _Trace:
    """One policy. Lists have one item per forward of Q tokens; rows' items are [B, Q]."""

    nats: list[Tensor] = field(default_factory=list[Tensor])
    kl: list[Tensor] = field(default_factory=list[Tensor])
    same: list[Tensor] = field(default_factory=list[Tensor])
    error: list[Tensor] = field(default_factory=list[Tensor])
    held: list[int] = field(default_factory=list[int])
    live: list[int] = field(default_factory=list[int])
    ms: list[float] = field(default_factory=list[float])

    def weigh(self, cache: StrataCache) -> None:
        """Note what a row takes now."""
        held, live = bytes_per_row(cache)
        self.held.append(held)
        self.live.append(live)


def run_steps(model: PreTrainedModel, caches: Caches, examples: Sequence[Example]) -> Outcomes:
    """Rows of one batch: contexts and continuations must have the same lengths.

    The prompt's own logits are the same for all and not counted: step i feeds token i and foretells the next.
    """
    ids = _read(model, caches, examples)
    traces = {label: _Trace() for label in _in_turn(caches)}
    with attention_outputs(model) as outputs:
        for step in range(ids.shape[1] - 1):
            reference: Given | None = None
            for label, trace in traces.items():
                outputs.clear()
                start = time.perf_counter()
                logits = feed(model, caches[label], ids[:, step : step + 1]).cpu()
                trace.ms.append((time.perf_counter() - start) * 1e3)
                own = (logits.float().log_softmax(dim=-1), list(outputs))
                reference = reference or own
                _note(trace, reference, own, ids[:, step + 1 : step + 2].cpu())
                trace.weigh(caches[label])
    full = round(mean(traces[FULL].held))
    return {label: _outcomes(trace, examples, full) for label, trace in traces.items()}


def run_block(model: PreTrainedModel, caches: Caches, examples: Sequence[Example]) -> Outcomes:
    """The same in one forward: only what a policy did to the prompt counts. Bytes are the compressed prompt's."""
    ids = _read(model, caches, examples)
    traces = {label: _Trace() for label in _in_turn(caches)}
    reference: Given | None = None
    with attention_outputs(model) as outputs:
        for label, trace in traces.items():
            trace.weigh(caches[label])
            caches[label].engine.activate_past_recording()  # nothing is planned for tokens after which nothing comes
            outputs.clear()
            logits = feed(model, caches[label], ids[:, :-1], keep=ids.shape[1] - 1).cpu()
            own = (logits.float().log_softmax(dim=-1), list(outputs))
            reference = reference or own
            _note(trace, reference, own, ids[:, 1:].cpu())
    return {label: _outcomes(trace, examples, traces[FULL].held[0]) for label, trace in traces.items()}


def _read(model: PreTrainedModel, caches: Caches, examples: Sequence[Example]) -> Tensor:
    """Let all caches read the contexts. -> the continuations [B, T]"""
    lengths = {(len(e.context), len(e.continuation)) for e in examples}
    if len(lengths) > 1:
        raise InputError("examples with a continuation must have the same lengths in a batch")
    read(model, caches, [example.context for example in examples])
    return torch.tensor([example.continuation for example in examples], device=model.device)


def _in_turn(caches: Caches) -> list[str]:
    """Labels, the full cache's first, since the others are compared with it."""
    return [FULL, *(label for label in caches if label != FULL)]


def _note(trace: _Trace, reference: Given, own: Given, target: Tensor) -> None:
    """Compare one forward's log-probabilities [B, Q, V] and attention outputs with the full cache's. `target` [B, Q]"""
    full, mine = reference[0], own[0]
    trace.nats.append(-mine.gather(2, target[..., None])[..., 0])
    terms = torch.where(full > -torch.inf, full.exp() * (full - mine), 0.0)  # a token that cannot be costs nothing
    trace.kl.append(terms.sum(dim=-1).clamp_min(0))
    trace.same.append((full.argmax(dim=-1) == mine.argmax(dim=-1)).float())
    errors = [(b - a).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12) for a, b in zip(reference[1], own[1], strict=True)]
    trace.error.append(torch.stack(errors).mean(dim=0).cpu() if errors else torch.zeros(target.shape))


def _outcomes(trace: _Trace, examples: Sequence[Example], full: int) -> list[Outcome]:
    columns = {"nll": trace.nats, "kl": trace.kl, "agreement": trace.same, "attention_error": trace.error}
    tables = {name: torch.cat(parts, dim=1) for name, parts in columns.items()}  # [B, T]
    ms = median(trace.ms) / len(examples) if trace.ms else None
    found: list[Outcome] = []
    for row, example in enumerate(examples):
        values = {name: float(table[row].mean()) for name, table in tables.items()}
        items = [{name: [round(x, 5) for x in table[row].tolist()] for name, table in tables.items()}]
        held, live = round(mean(trace.held)), round(mean(trace.live))
        found.append(Outcome(example.name, values, held, live, max(trace.held), full, ms, items, len(examples)))
    return found


@contextmanager
def attention_outputs(model: PreTrainedModel) -> Generator[list[Tensor]]:
    """A list that every forward inside the block fills with what its attention modules return, [B, Q, hidden] each."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: object) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach().float())  # pyright: ignore

    handles = [module.register_forward_hook(keep) for module in attention_modules(model)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
