"""What there is to run: cells of tasks and policies, and the units of work that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstrata.core import InputError, SpecError
from kvstrata.evaluate.result import Run
from kvstrata.evaluate.runs import FULL, labelled
from kvstrata.evaluate.task import TASKS, Example, Scope, Settings, Source, Task
from kvstrata.policy import parse_policy
from kvstrata.policy.budget import Tokens, parse_budget
from kvstrata.policy.spec import YAML, names_budget

CONTROL = "random"


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy as it was asked for; the budget is None where its text has its own."""

    policy: str
    budget: str | None

    @property
    def label(self) -> str:
        """As tables name it."""
        return labelled(self.policy, self.budget)


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker must know to run any unit."""

    model: str | None
    dtype: str | None
    device: str
    kernels: str
    settings: Settings
    batch: int | None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """One batch of examples under all policies that still lack them."""

    source: str  # name of a task that has this source
    scope: Scope
    first: int  # numbers of the examples
    last: int
    asked: tuple[Asked, ...]
    wanted: tuple[tuple[str, ...], ...]  # for each policy the names of examples whose outcomes are missing


@dataclass(frozen=True, slots=True)
class Planned:
    """A unit and what it costs."""

    unit: Unit
    prompt_tokens: int  # read once for all policies
    fed_tokens: int  # for every policy


def ask(policies: Sequence[str], budgets: Sequence[str], controls: bool = True) -> list[Asked]:
    """Every policy at every budget, the full cache first, and with controls `random` at every budget.

    Raises `SpecError` for a policy or budget that cannot be.
    """
    found = [Asked(FULL, None)]
    for policy in policies:
        parse_policy(policy)
        own = policy.endswith(YAML) or names_budget(policy) or _unmoved(policy)
        found += [Asked(policy, None)] if own or not budgets else [Asked(policy, budget) for budget in budgets]
    if controls:
        found += [Asked(CONTROL, budget) for budget in budgets]
    for one in found:
        if one.budget is not None:
            _check_budget(one)
    return list(dict.fromkeys(found))


def _unmoved(policy: str) -> bool:
    """Whether a budget changes nothing, as where everything is kept or a score decides."""
    made = parse_policy(policy)
    return made.only_codes or made.with_budget(Tokens(1 << 20)) == made.with_budget(Tokens(1 << 21))


def _check_budget(asked: Asked) -> None:
    try:
        parse_policy(asked.policy).with_budget(parse_budget(asked.budget or ""))
    except SpecError as error:
        raise SpecError(f"{asked.label}: {error}") from error


def sources_of(tasks: dict[str, Task]) -> dict[str, Source]:
    """The sources of tasks, each once, by the name of a task that has it."""
    found: dict[str, Source] = {}
    for name, task in tasks.items():
        if task.source.name not in {source.name for source in found.values()}:
            found[name] = task.source
    return found


def tasks_of(source: Source, tasks: dict[str, Task]) -> dict[str, Task]:
    """Those of the tasks that read their figures off a run of this source."""
    return {name: task for name, task in tasks.items() if task.source.name == source.name}


def check_scope(tasks: dict[str, Task], scope: Scope) -> None:
    """Refuse a question that is visible where there is none. Raises `InputError`."""
    for name, task in tasks.items():
        if scope == "prompt" and task.source.kind not in ("probes", "answers"):
            raise InputError(f"--scope prompt: task {name} asks no question, so there is none to be visible")


def check_lengths(name: str, examples: list[Example], most: int | None) -> None:
    """Refuse examples that are longer than the model's positions. Raises `InputError`."""
    longest = max(example.tokens + TASKS[name].source.new_tokens for example in examples)
    if most is not None and longest > most:
        raise InputError(
            f"task {name} has {longest} tokens in one cache, but the model is made for {most}: give a smaller --length"
        )


def units_of(
    task: str, source: Source, scope: Scope, examples: list[Example], batch: int | None, missing: dict[Asked, set[str]]
) -> list[Planned]:
    """Batches of examples; `missing` says for every policy the names of examples that have no outcome yet.

    The full cache runs in every unit, since the others are compared with it.
    """
    size, found = batch or source.batch, list[Planned]()
    if source.kind in ("turns", "answers"):
        size = 1
    for first in range(0, len(examples), size):
        part = examples[first : first + size]
        names = {example.name for example in part}
        lack = {asked: names & gone for asked, gone in missing.items() if names & gone}
        if not lack:
            continue
        full = Asked(FULL, None)
        lack = {full: lack.get(full, set()), **lack}
        unit = Unit(task, scope, first, first + len(part), tuple(lack), tuple(tuple(sorted(n)) for n in lack.values()))
        context, after = zip(*(_tokens(example, source, scope) for example in part), strict=True)
        found.append(Planned(unit, sum(context), sum(after) * len(lack)))
    return found


def _tokens(example: Example, source: Source, scope: Scope) -> tuple[int, int]:
    """Tokens that are read once for all policies, and those that every policy is fed."""
    asked = [(len(p.question), len(p.answer) + source.new_tokens) for p in example.probes]
    follow = len(example.continuation) + sum(len(turn.ids) for turn in example.turns)
    if scope == "prompt":
        return sum(len(example.context) + q for q, _ in asked), sum(a for _, a in asked)
    return len(example.context), follow + sum(q + a for q, a in asked)


def run_of(
    job: Job,
    source: Source,
    asked: Asked,
    scope: Scope,
    about: dict[str, str],
    files: dict[str, str],
    said: str | None,
) -> Run:
    """What outcomes of one policy on one source depend on. `about`: model, dtype, haystack; `said`: by its files."""
    settings = source.resolve(job.settings)
    return Run(
        source=source.name,
        version=source.version,
        policy=asked.policy,
        content=said,
        budget=asked.budget,
        scope=scope,
        seed=settings.seed,
        contexts=settings.contexts or source.contexts,
        length=settings.length or source.length,
        model=about["model"],
        dtype=about["dtype"],
        kernels=job.kernels,
        device=job.device,
        haystack=about.get("haystack"),
        data=files,
    )
