"""Exact copying out of a long context: records in strict JSON, and strings that must come back to the letter."""

from __future__ import annotations

import json
import random
import string

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.evaluate.task import EXACT, HIT, NLL, TASKS, Example, Probe, Settings, Source, Task
from kvstrata.evaluate.texts import generator
from kvstrata.evaluate.words import names
from kvstrata.hf.framing import encode, frame_of, opening

DEPTHS = (0.1, 0.35, 0.6, 0.85)
INTRODUCTION = "Here is a list of items, one JSON object per line.\n"
QUESTIONS = {
    "json": "\nRepeat the line of the item named {name}, exactly as it stands above.",
    "string": "\nWhat is the code of the item named {name}? Answer with the code alone.",
}


def copying(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Lines of records; two are to be repeated whole, of two others only the code."""
    frame, found = frame_of(tokenizer), list[Example]()
    for i in range(contexts):
        rng = generator("copy", settings.seed, i)
        before = opening(tokenizer, frame) + encode(tokenizer, INTRODUCTION)
        lines, ids, records = list[list[int]](), before, list[dict[str, object]]()
        for name in names(rng, length // 8):
            record = _record(rng, name)
            line = encode(tokenizer, json.dumps(record) + "\n")
            if len(ids) + len(line) > length:
                break
            ids, lines, records = ids + line, [*lines, line], [*records, record]
        if len(records) < len(DEPTHS):
            raise InputError(f"a list of {length} tokens holds {len(records)} items: give a larger --length")
        probes = [
            _ask(tokenizer, frame.after, ("json", "string")[(j + i) % 2], records[int(depth * len(records))], depth)
            for j, depth in enumerate(DEPTHS)
        ]
        found.append(Example(f"{settings.seed}-{i}", ids, probes))
    return found


def _record(rng: random.Random, name: str) -> dict[str, object]:
    code = "".join(rng.choices(string.ascii_uppercase + string.digits, k=8))
    return {"name": name, "code": code, "count": rng.randrange(1000), "open": rng.random() < 0.5}


def _ask(tokenizer: PreTrainedTokenizerBase, after: str, kind: str, record: dict[str, object], depth: float) -> Probe:
    answer = json.dumps(record) if kind == "json" else str(record["code"])
    question = QUESTIONS[kind].format(name=record["name"]) + after
    return Probe(encode(tokenizer, question), encode(tokenizer, answer), {"kind": kind, "depth": depth}, (answer,))


TASKS["copy"] = Task(
    "lines of JSON and codes to be copied to the letter; exact if every token is the likeliest",
    Source("copy", 1, "probes", copying, length=1024),
    (EXACT, NLL, HIT),
)
