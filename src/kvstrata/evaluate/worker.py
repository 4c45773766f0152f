"""Running units: the same function in this process, in others beside it and on a cluster."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from kvstrata.bench.counting import KvShape
from kvstrata.bench.measure import provenance
from kvstrata.core import InputError
from kvstrata.evaluate.answers import run_answers
from kvstrata.evaluate.equal import resolve
from kvstrata.evaluate.grid import Asked, Job, Unit
from kvstrata.evaluate.probes import run_probes
from kvstrata.evaluate.runs import Caches, Outcome, Outcomes
from kvstrata.evaluate.steps import run_block, run_steps
from kvstrata.evaluate.task import Example
from kvstrata.evaluate.tasks import TASKS
from kvstrata.evaluate.turns import run_turns
from kvstrata.hf import compress
from kvstrata.hf.compat import kv_shape, not_compressed, query_group, stock_layers, text_config
from kvstrata.hf.models import load_model
from kvstrata.policy import Policy

Line = tuple[Asked, Outcome]


class Worker:
    """A loaded model and the examples of every task that it was asked for."""

    def __init__(self, job: Job) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job = job
        self.model, self.tokenizer = load_model(job.model, job.dtype, job.device)
        self._examples: dict[str, list[Example]] = {}

    def examples(self, task: str) -> list[Example]:
        """The examples of a task, made once."""
        if task not in self._examples:
            source = TASKS[task].source
            settings = source.resolve(self.job.settings)
            assert settings.contexts is not None
            assert settings.length is not None
            self._examples[task] = source.make(self.tokenizer, settings.contexts, settings.length, settings)
        return self._examples[task]

    @cached_property
    def shape(self) -> KvShape | None:
        """What bytes depend on, None where layers differ."""
        config = text_config(self.model)
        stock = stock_layers(config)
        skipped, found = not_compressed(config, stock), kv_shape(config)
        layers = tuple(i for i in range(len(stock)) if i not in skipped)
        return found and KvShape(layers, *found, self.model.dtype, query_group(config, found[0]))

    def policy(self, task: str, asked: Asked, part: list[Example]) -> Policy:
        """What was asked for, with the budget for these examples."""
        context = max(len(example.context) for example in part)
        new = max(len(example.continuation) for example in part)
        kind = TASKS[task].source.kind
        if kind == "turns":  # each of which is read as a prompt is
            context, new = max(example.tokens for example in part), 0
        elif kind == "block":  # which nothing is planned for
            new = 0
        policy = resolve(asked.policy, asked.budget, self.shape, context, new)
        if "processed-logits" in policy.needs:
            raise InputError(f"{asked.label} reads logits that `generate` has processed, and nothing is generated here")
        return policy

    def run(self, unit: Unit) -> list[Line]:
        """Outcomes of the examples that each policy lacks."""
        source = TASKS[unit.source].source
        part = self.examples(unit.source)[unit.first : unit.last]
        policies = {asked: self.policy(unit.source, asked, part) for asked in unit.asked}
        with ExitStack() as stack:
            options: dict[str, Any] = {"kernels": self.job.kernels, "tokenizer": self.tokenizer}
            caches = {
                asked.label: stack.enter_context(compress(self.model, policy, **options))
                for asked, policy in policies.items()
            }
            found = self._run(unit, source.kind, caches, part, source.new_tokens)
        where = ", ".join(f"{name} {value}" for name, value in provenance().items())
        return [
            (asked, replace(outcome, resolved=policies[asked].name + _budgets(policies[asked]), where=where))
            for asked, wanted in zip(unit.asked, unit.wanted, strict=True)
            for outcome in found[asked.label]
            if outcome.example in wanted
        ]

    def _run(self, unit: Unit, kind: str, caches: Caches, part: list[Example], new_tokens: int) -> Outcomes:
        if kind == "probes":
            return run_probes(self.model, caches, part, unit.scope)
        if kind == "steps":
            return run_steps(self.model, caches, part)
        if kind == "block":
            return run_block(self.model, caches, part)
        if kind == "turns":
            return run_turns(self.model, caches, part[0])
        return run_answers(self.model, self.tokenizer, caches, part[0], unit.scope, new_tokens)


def _budgets(policy: Policy) -> str:
    rule = next((rule for entry in policy.table for rule in (entry.prefill, entry.decode) if rule), None)
    return "" if rule is None else f" budget={rule.budget}"


@lru_cache(maxsize=1)
def worker(job: Job) -> Worker:
    """The worker of this process."""
    return Worker(job)


def run_unit(job: Job, unit: Unit) -> list[Line]:
    """Run a unit in this process, which loads the model the first time."""
    return worker(job).run(unit)


def weights_digest(model: Any, name: str) -> str:
    """What names the weights: a hub commit, or a hash of the files in a local folder."""
    commit = getattr(model.config, "_commit_hash", None)
    folder = Path(getattr(model.config, "_name_or_path", "") or "")
    if commit:
        return f"{name}@{commit[:12]}"
    total = hashlib.sha256()
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if folder.is_dir() else []
    for file in sorted(files):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return f"{os.path.basename(name.rstrip('/'))}@{total.hexdigest()[:12]}"
