"""What the scheduler's process knows of every request's blocks: chosen, announced, gone. Nothing here needs vLLM.

A block that is to go passes three stages: the manager *chooses* it, the connector *announces* it to the workers with
the next step of its request, and `lag` steps later the manager *frees* it. Workers read it for the last time in the
step with whose message it is announced (lag 1), or in the one before that (lag 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.policy.confidence import Mood, Steady
from kvstrata_vllm.blocks import UNSURE

Measured = dict[int, list[float]]  # scorer's number in its layer class -> a number for every block of the request


@dataclass(slots=True)
class Eviction:
    """One request's blocks in one group: logical numbers of those on their way out, and how many are out."""

    chosen: list[int] = field(default_factory=list[int])
    announced: list[int] = field(default_factory=list[int])
    announced_at: int = 0  # step
    evicted: int = 0  # blocks given back so far
    prefilled: bool = False  # whether the prefill rule has acted on the whole prompt
    looked: int = 0  # whole blocks when a threshold was last applied
    measured: Measured = field(default_factory=dict[int, list[float]])


@dataclass(slots=True)
class Totals:
    """Sums over all requests since the start."""

    evicted: int = 0  # blocks given back while their request ran
    requests: int = 0  # finished ones
    requests_evicted: int = 0  # finished ones that lost a block


@dataclass(slots=True)
class Ledger:
    """Shared by the managers of all groups and by the connector."""

    lag: int = 1
    step: int = 0
    totals: Totals = field(default_factory=Totals)
    _requests: dict[str, dict[int, Eviction]] = field(default_factory=dict[str, dict[int, Eviction]])
    _prompts: dict[str, int] = field(default_factory=dict[str, int])  # tokens of the prompts of requests that ran
    _confidence: dict[str, float] = field(default_factory=dict[str, float])
    _moods: dict[str, Mood] = field(default_factory=dict[str, Mood])

    def eviction(self, group: int, request: str) -> Eviction:
        """The state of a request's blocks in a group."""
        return self._requests.setdefault(request, {}).setdefault(group, Eviction())

    def knows(self, request: str) -> bool:
        """Whether it runs now."""
        return request in self._requests

    def note_prompt(self, request: str, tokens: int) -> None:
        """Remember how long a request's prompt is, also while it is preempted."""
        self._prompts[request] = tokens

    def prompt(self, request: str, tokens: int) -> int:
        """How many of a request's tokens are its prompt: all of them while it has not run."""
        return min(tokens, self._prompts.get(request, tokens))

    def approximate(self, request: str) -> bool:
        """Whether any group of the request lost a block or is about to, so that what it computes now is its own."""
        return any(self.out(state) for state in self._requests.get(request, {}).values())

    def out(self, state: Eviction) -> int:
        """Blocks that are gone or on their way; without a lag those chosen are gone already."""
        return state.evicted + len(state.announced) + (len(state.chosen) if self.lag else 0)

    def may_free(self, state: Eviction) -> bool:
        """Whether no worker reads the announced blocks any more."""
        return bool(state.announced) and self.step > state.announced_at

    def announce(self, group: int, request: str) -> list[int]:
        """Blocks that workers must be told of with this step, each once."""
        state = self._requests.get(request, {}).get(group)
        if state is None or not state.chosen:
            return []
        going, state.chosen = state.chosen, []
        if self.lag:
            state.announced, state.announced_at = going, self.step
        return going

    def freed(self, state: Eviction, blocks: int) -> None:
        """Count blocks that went back to the pool."""
        state.evicted += blocks
        self.totals.evicted += blocks

    def forget(self, group: int, request: str) -> None:
        """Drop what is known of a request's blocks: it ended, or starts again from its prompt."""
        groups = self._requests.get(request, {})
        groups.pop(group, None)
        if not groups:
            self._requests.pop(request, None)

    def note(self, group: int, request: str, scorer: int, measured: Sequence[float]) -> None:
        """Take what the workers measured for every block of a request; of an unknown request it is dropped."""
        if (state := self._requests.get(request, {}).get(group)) is not None:
            state.measured[scorer] = list(measured)

    def note_confidence(self, request: str, c: float, steadied: tuple[float, Steady] | None) -> None:
        """Take how sure the model was of a request's next token; NaN counts as unsure."""
        c = c if c == c else UNSURE
        if steadied is None:
            self._confidence[request] = c
            return
        tau, steady = steadied
        mood = self._moods[request] = steady.follow(self._moods.get(request), c, tau)
        self._confidence[request] = float(mood.sure)

    def confidence(self, request: str) -> float:
        """How sure it was; unsure while nothing is known."""
        return self._confidence.get(request, UNSURE)

    def finish(self, request: str) -> None:
        """Count a request that ended and forget how sure it was. Its blocks are forgotten by `forget`."""
        self.totals.requests += 1
        self.totals.requests_evicted += self.evicted(request) > 0
        for known in (self._prompts, self._confidence, self._moods):
            known.pop(request, None)

    def evicted(self, request: str, group: int | None = None) -> int:
        """Blocks that a request has lost, in one group or over all."""
        groups = self._requests.get(request, {})
        return sum(state.evicted for number, state in groups.items() if group in (None, number))
