"""What a task is: examples made of token ids, how they are run, and which of the figures counts.

An example begins with a context, which is read and compressed. Then one of five things follows:

probes    questions with known answers, each asked of the same compressed context and scored by likelihood
steps     a known continuation, fed token by token, so that a policy acts at every step
block     a known continuation, fed in one forward, so that a policy acts on the context alone
turns     known turns of a conversation, fed one after the other, some of them scored
answers   questions that the model answers in its own words
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.registry import Registry

Kind = Literal["probes", "steps", "block", "turns", "answers"]
Scope = Literal["context", "prompt"]
SCOPES: tuple[Scope, ...] = ("context", "prompt")
Tags = Mapping[str, str | float]


@dataclass(frozen=True, slots=True)
class Probe:
    """One question. `question` ends where the answer begins."""

    question: list[int]
    answer: list[int]
    tags: Tags = field(default_factory=dict[str, "str | float"])  # what to group by: kind, depth
    references: tuple[str, ...] = ()  # what an answer in the model's own words must hold
    any_of: bool = False  # one of them is enough


@dataclass(frozen=True, slots=True)
class Turn:
    """A piece of a conversation; `late` marks scored tokens that repeat something said long before."""

    ids: list[int]
    scored: bool
    late: list[bool] = field(default_factory=list[bool])


@dataclass(frozen=True, slots=True)
class Example:
    """One context and what follows it."""

    name: str
    context: list[int]
    probes: list[Probe] = field(default_factory=list[Probe])
    continuation: list[int] = field(default_factory=list[int])
    turns: list[Turn] = field(default_factory=list[Turn])

    @property
    def tokens(self) -> int:
        """Tokens of everything, in the longest order in which they stand in one cache."""
        asked = max((len(p.question) + len(p.answer) for p in self.probes), default=0)
        return len(self.context) + asked + len(self.continuation) + sum(len(turn.ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a task's examples depend on, beside the tokenizer. None is the task's own number."""

    contexts: int | None = None
    length: int | None = None
    seed: int = 0
    haystack: Path | None = None
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.contexts is not None and self.contexts < 1:
            raise InputError(f"--contexts {self.contexts}: give 1 or more")
        if self.length is not None and self.length < 64:
            raise InputError(f"--length {self.length}: give 64 tokens or more")


@dataclass(frozen=True, slots=True)
class Source:
    """Where examples come from. Tasks with one source are run in one pass."""

    name: str
    version: int  # raised whenever the same settings give other examples
    kind: Kind
    make: Callable[[PreTrainedTokenizerBase, int, int, Settings], list[Example]]  # (.., contexts, length, ..)
    length: int  # tokens of a context where --length says nothing
    contexts: int = 8  # how many, where --contexts says nothing
    batch: int = 1  # contexts read as rows of one batch, where --batch says nothing
    new_tokens: int = 0  # that an answer may have
    data: tuple[str, ...] = ()  # files that it reads under --data
    instead: tuple[str, ...] = ()  # files, named by {length}, that it reads instead of generating where --data has them

    def resolve(self, settings: Settings) -> Settings:
        """The settings with this source's own numbers where none were given."""
        return replace(settings, contexts=settings.contexts or self.contexts, length=settings.length or self.length)


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure per example."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    relative: bool = False  # shown as a difference from the full cache's on the same example


@dataclass(frozen=True, slots=True)
class Task:
    """A source and the figures that are read off it, the one that counts first."""

    about: str
    source: Source
    metrics: tuple[Metric, ...]

    @property
    def primary(self) -> Metric:
        """The figure that counts."""
        return self.metrics[0]


TASKS: Registry[Task] = Registry("task")

NLL = Metric("nll", "nats/token", "lower", relative=True)
EXACT = Metric("exact", "share", "higher")
HIT = Metric("token_accuracy", "share", "higher")


def choose(names: Sequence[str]) -> dict[str, Task]:
    """Tasks by name, in that order, each once. A name that ends with * stands for all that begin so."""
    found: dict[str, Task] = {}
    for name in names:
        many = [known for known in TASKS if name.endswith("*") and known.startswith(name[:-1])]
        for one in many or [name]:
            found[one] = TASKS[one]
    if not found:
        raise InputError(f"--task names no task: choose from {', '.join(sorted(TASKS))}")
    return found
