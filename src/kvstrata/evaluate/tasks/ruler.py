"""RULER's 13 tasks (arXiv:2404.06654) at any length, with our own texts, answered in the model's own words.

Parameters are those of the published configuration. The score is the share of the references that the answer holds,
case ignored; for the two question tasks one reference is enough. `--data` with files `ruler/<task>_<length>.jsonl[.gz]`
of the published form (`input`, `outputs`) is read instead of generating.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.evaluate.task import TASKS, Example, Metric, Probe, Settings, Source, Task
from kvstrata.evaluate.tasks import ruler_text
from kvstrata.evaluate.tasks.ruler_text import Item
from kvstrata.evaluate.texts import generator, haystack, read_text
from kvstrata.hf.framing import encode, frame_of, opening

Maker = Callable[[ruler_text.Room], Item]
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
MAKERS: dict[str, Maker] = {
    "niah_single_1": partial(ruler_text.niah, hay="noise"),
    "niah_single_2": partial(ruler_text.niah, hay="essay"),
    "niah_single_3": partial(ruler_text.niah, hay="essay", values="uuid"),
    "niah_multikey_1": partial(ruler_text.niah, hay="essay", num_keys=4),
    "niah_multikey_2": partial(ruler_text.niah, hay="needle"),
    "niah_multikey_3": partial(ruler_text.niah, hay="needle", keys="uuid", values="uuid"),
    "niah_multivalue": partial(ruler_text.niah, hay="essay", num_values=4),
    "niah_multiquery": partial(ruler_text.niah, hay="essay", num_keys=4, num_queries=4),
    "vt": ruler_text.variable_tracking,
    "cwe": ruler_text.common_words,
    "fwe": ruler_text.frequent_words,
    "qa_1": partial(ruler_text.questions, hops=1),
    "qa_2": partial(ruler_text.questions, hops=2),
}
# where the question begins in an input of a published file
SPLITS = {
    "niah": re.compile(r"\nWhat (?:is|are all) the special magic"),
    "vt": re.compile(r"\nQuestion: Find all variables"),
    "cwe": re.compile(r"\nQuestion: What are the 10 most common words"),
    "fwe": re.compile(r"\nQuestion: Do not provide any explanation"),
    "qa": re.compile(r"\n\nAnswer the question based on the given documents[^\n]*\n\nQuestion:"),
}


def examples(
    name: str, tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings
) -> list[Example]:
    """Read from a published file where --data has one for this task and length, else generate."""
    for form in files_of(name):
        file = settings.data and settings.data / form.format(length=length)
        if file and file.is_file():
            return _published(file, name, tokenizer, contexts, settings.seed)
    text = haystack(settings.haystack)
    return [_generated(name, tokenizer, length, text, settings.seed, i) for i in range(contexts)]


def _generated(name: str, tokenizer: PreTrainedTokenizerBase, length: int, text: str, seed: int, i: int) -> Example:
    """The longest item that leaves room for the answer, found by halving."""
    frame = frame_of(tokenizer)

    def made(size: int) -> tuple[Item, Example]:
        item = MAKERS[name](ruler_text.Room(generator(name, seed, i), size, text))
        return item, _example(tokenizer, f"{seed}-{i}", item, frame.after)

    limit = length - new_tokens(name)
    low, high = 1, 2
    while made(high)[1].tokens <= limit and high < limit:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if made(middle)[1].tokens <= limit else (low, middle)
    found = made(low)[1]
    if found.tokens > limit:
        raise InputError(f"task ruler-{name} does not fit into --length {length}: the shortest has {found.tokens}")
    return found


def _example(tokenizer: PreTrainedTokenizerBase, name: str, item: Item, after: str) -> Example:
    context = opening(tokenizer, frame_of(tokenizer)) + encode(tokenizer, item.context)
    question = encode(tokenizer, item.question + after + item.prefix)
    return Example(name, context, [Probe(question, [], {}, item.references, item.any_of)])


def _published(file: Path, name: str, tokenizer: PreTrainedTokenizerBase, contexts: int, seed: int) -> list[Example]:
    lines = read_text(file).splitlines()
    split, found = SPLITS[name.split("_")[0]], list[Example]()
    order = generator("ruler", seed).sample(range(len(lines)), len(lines))
    if contexts > len(lines):
        raise InputError(f"{file} has {len(lines)} examples, but --contexts {contexts} were asked for")
    for number in sorted(order[:contexts]):
        try:
            row = json.loads(lines[number])
            text, references = str(row["input"]), tuple(map(str, row["outputs"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number + 1}: not a RULER example ({error!r})") from error
        cuts = list(split.finditer(text))
        if not cuts:
            raise InputError(f"{file}, line {number + 1}: no question of {name} in it")
        at = cuts[-1].start()
        question, prefix = _question_and_prefix(text[at:])
        item = Item(text[:at], question, prefix, references, any_of=name.startswith("qa"))
        found.append(_example(tokenizer, f"{file.name}-{number}", item, frame_of(tokenizer).after))
    return found


def _question_and_prefix(text: str) -> tuple[str, str]:
    """Published inputs end with the beginning of the answer, which in a chat is the assistant's."""
    cut = re.search(r"(?<=[?.:])\s(?=(?:The special magic|Answer:|According to the chain)[^\n]*$)", text)
    return (text, "") if cut is None else (text[: cut.start()], text[cut.end() :])


def files_of(name: str) -> tuple[str, ...]:
    """Where published examples would be under --data."""
    return tuple(f"ruler/{name}_{{length}}.{ending}" for ending in ("jsonl", "jsonl.gz"))


def new_tokens(name: str) -> int:
    """Tokens that an answer may have."""
    return NEW_TOKENS.get(name, 128)


for _name in MAKERS:
    TASKS[f"ruler-{_name}"] = Task(
        f"RULER's {_name}, answered in the model's own words; share of the references found",
        Source(
            f"ruler-{_name}",
            2,
            "answers",
            partial(examples, _name),
            length=1024,
            contexts=5,
            new_tokens=new_tokens(_name),
            instead=files_of(_name),
        ),
        (Metric("found", "share", "higher"),),
    )
