"""Replayed traces of an agent with tools: how likely the assistant's turns are, and what they repeat from long before.

Traces are tau-bench's (arXiv:2406.12045), airline domain: a policy document, a customer, tool calls and their results.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.evaluate.task import NLL, TASKS, Example, Metric, Settings, Source, Task, Turn
from kvstrata.evaluate.texts import data_file, read_text
from kvstrata.hf.framing import encode, frame_of, opening, pieces

FILE = "agent/taubench_gpt-4o-airline.json.gz"
FIRST = 30  # tasks before this one are for training and calibration
FAR = 1024  # tokens since a word was last said, from which a repetition of it counts as late
WORD = re.compile(r"\b(?=\w*\d)\w{3,}\b")  # ids, codes, dates, prices: what cannot be guessed


def traces(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Traces cut to `length` tokens; the system's words and the first of the customer's are the context."""
    file, found = data_file(settings.data, FILE, "agent"), list[Example]()
    for name, messages in _traces(read_text(file), str(file)):
        turns = _turns(tokenizer, messages, length)
        first = next((i for i, turn in enumerate(turns) if turn.scored), len(turns))
        context = [token for turn in turns[:first] for token in turn.ids]
        if sum(turn.scored for turn in turns[first:]) >= 2:
            found.append(Example(name, context, turns=turns[first:]))
    start = settings.seed * contexts
    if start + contexts > len(found):
        raise InputError(
            f"{file} has {len(found)} traces for evaluation, but --contexts {contexts} with --seed {settings.seed} "
            f"needs {start + contexts}: ask for fewer"
        )
    return found[start : start + contexts]


def _traces(text: str, where: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Names and messages of the evaluation side's traces, the first trial of every task before the second."""
    try:
        kept = [(trace["trial"], trace["task_id"], trace["traj"]) for trace in json.loads(text)]
        kept = sorted((item for item in kept if item[1] >= FIRST), key=lambda item: item[:2])
        return [(f"{task}-{trial}", messages) for trial, task, messages in kept]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} is no file of tau-bench traces: {error!r}") from error


def _turns(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], length: int) -> list[Turn]:
    """One turn per message, its header with the turn before, as the model sees it when it is its turn to speak."""
    plain = [{"role": _role(message), "content": _content(message)} for message in messages]
    said: dict[str, int] = {}  # word -> the token where it was last said
    ids = opening(tokenizer, frame_of(tokenizer)) if not tokenizer.chat_template else []
    turns: list[Turn] = []
    room, at = length, 0
    for message, (before, content) in zip(plain, pieces(tokenizer, plain), strict=True):
        header = ids + encode(tokenizer, before)
        encoded = tokenizer(content, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        body, offsets = encoded["input_ids"], encoded["offset_mapping"]
        late = _late(content, offsets, said, at + len(header))
        scored = message["role"] == "assistant"
        ids = []
        if len(header) + len(body) > room:
            break
        turns += [Turn(header, scored=False)] if header else []
        turns += [Turn(body, scored, late)] if body else []
        room, at = room - len(header) - len(body), at + len(header) + len(body)
    return _joined(turns)


def _joined(turns: list[Turn]) -> list[Turn]:
    """The same turns with those that are not scored run together: each costs a forward."""
    found: list[Turn] = []
    for turn in turns:
        if found and not turn.scored and not found[-1].scored:
            found[-1] = Turn(found[-1].ids + turn.ids, scored=False)
        else:
            found.append(turn)
    return found


def _late(content: str, offsets: list[tuple[int, int]], said: dict[str, int], at: int) -> list[bool]:
    """Which tokens belong to words last said FAR tokens ago or more; notes where the words of this turn are."""
    late = [False] * len(offsets)
    for word in WORD.finditer(content):
        inside = [i for i, (start, end) in enumerate(offsets) if start < word.end() and end > word.start()]
        if not inside:
            continue
        before = said.get(word.group())
        if before is not None and at + inside[0] - before >= FAR:
            for i in inside:
                late[i] = True
        said[word.group()] = at + inside[-1]
    return late


def _role(message: dict[str, Any]) -> str:
    """Chat templates know three roles; a tool's result comes to the model as a user's words do."""
    return "user" if message["role"] == "tool" else str(message["role"])


def _content(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    lines = [message.get("content") or ""]
    lines += [f"<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>" for call in calls]
    if message["role"] == "tool":
        lines = [f"<tool_response>{lines[0]}</tool_response>"]
    return "\n".join(line for line in lines if line).strip()


TASKS["agent"] = Task(
    "the assistant's turns in replayed traces with tools; late: ids and numbers last said 1,024 tokens before",
    Source("traces", 1, "turns", traces, length=4096, data=(FILE,)),
    (NLL, Metric("late_nll", "nats/token", "lower", relative=True), Metric("top1", "share", "higher")),
)
