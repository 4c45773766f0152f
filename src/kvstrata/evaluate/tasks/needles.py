"""Facts hidden in a long text: `needle` and `words`, four to a context at fixed depths, and `niah`, one over depth.

The wording is RULER's (arXiv:2404.06654). Answers are scored by likelihood, which on small models tells more than
whether they are exact.
"""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.evaluate.task import EXACT, HIT, NLL, TASKS, Example, Probe, Settings, Source, Task
from kvstrata.evaluate.texts import generator, haystack, sentences
from kvstrata.evaluate.words import names, number, thing, unique_id
from kvstrata.hf.framing import encode, frame_of, opening

DEPTHS = (0.1, 0.35, 0.6, 0.85)  # of the text before the needle, from its beginning
GRID_DEPTHS = (0.1, 0.25, 0.5, 0.75, 0.9)  # from the question, as CONF-KV counts them: 0.9 is the oldest
VALUES = {"number": number, "uuid": unique_id, "word": thing, "sentence": thing}
INTRODUCTION = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n"
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = "\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
PREFIX = "The special magic {kind} for {key} mentioned in the provided text is"
SENTENCE = (  # the same for facts that read like the text around them
    "That year the owner of the {key} gave away the {value}.",
    "\nWhat did the owner of the {key} give away, according to the provided text?",
    "According to the provided text, the owner of the {key} gave away the",
)


def needle(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Two numbers and two uuids a context; over contexts every kind comes to every depth."""
    return _four(tokenizer, contexts, length, settings, "needle", ("number", "uuid"))


def words(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """Two pairs of words and two facts in sentences like those around them; digits flatter, since they stand out."""
    return _four(tokenizer, contexts, length, settings, "words", ("word", "sentence"))


def _four(
    tokenizer: PreTrainedTokenizerBase,
    contexts: int,
    length: int,
    settings: Settings,
    task: str,
    two: tuple[str, str],
) -> list[Example]:
    """Four facts a context, of two kinds in turn."""
    text = haystack(settings.haystack)
    found: list[Example] = []
    for i in range(contexts):
        rng = generator(task, settings.seed, i)
        kinds = [two[(j + i) % 2] for j in range(len(DEPTHS))]
        facts = [(kind, key, VALUES[kind](rng)) for kind, key in zip(kinds, names(rng, len(DEPTHS)), strict=True)]
        context = hide(tokenizer, rng, text, length, facts, DEPTHS, "fact")
        probes = [ask(tokenizer, fact, depth) for fact, depth in zip(facts, DEPTHS, strict=True)]
        found.append(Example(f"{settings.seed}-{i}", context, probes))
    return found


def niah(tokenizer: PreTrainedTokenizerBase, contexts: int, length: int, settings: Settings) -> list[Example]:
    """One number at every depth of a quarter, half and all of the length."""
    text = haystack(settings.haystack)
    found: list[Example] = []
    for part in (length // 4, length // 2, length):
        for depth in GRID_DEPTHS:
            for i in range(contexts):
                rng = generator("niah", settings.seed, part, depth, i)
                fact = ("number", names(rng, 1)[0], number(rng))
                context = hide(tokenizer, rng, text, part, [fact], (1 - depth,), "number")
                probe = ask(tokenizer, fact, depth, length=part)
                found.append(Example(f"{settings.seed}-{part}-{depth}-{i}", context, [probe]))
    return found


def hide(
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    text: str,
    length: int,
    facts: list[tuple[str, str, str]],
    depths: tuple[float, ...],
    called: str,
) -> list[int]:
    """Token ids of at most `length`: a stretch of the text from a random sentence on, with facts at these depths."""
    before = opening(tokenizer, frame_of(tokenizer)) + encode(tokenizer, INTRODUCTION.format(kind=called))
    needles = [_wording(kind)[0].format(kind=kind, key=key, value=value) for kind, key, value in facts]
    room = length - len(before) - sum(len(encode(tokenizer, " " + needle)) for needle in needles)
    if room < 0:
        raise InputError(f"a context of {length} tokens does not hold what is hidden in it: give a larger --length")
    hay = _stretch(tokenizer, rng, text, room)
    total, at = sum(count for _, count in hay), 0
    parts, passed = list[str](), 0
    for depth, needle in zip(depths, needles, strict=True):
        while at < len(hay) and passed < depth * total:
            parts.append(hay[at][0])
            passed, at = passed + hay[at][1], at + 1
        parts.append(needle)
    parts += [sentence for sentence, _ in hay[at:]]
    return (before + encode(tokenizer, " ".join(parts)))[:length]


def _stretch(tokenizer: PreTrainedTokenizerBase, rng: random.Random, text: str, room: int) -> list[tuple[str, int]]:
    """Sentences from a random one on, from the first again after the last, with their tokens, of at most `room`."""
    every = sentences(text)
    at, taken = rng.randrange(len(every)), list[tuple[str, int]]()
    while True:
        sentence = every[at % len(every)]
        count = len(encode(tokenizer, " " + sentence))
        if count > room:
            return taken
        taken.append((sentence, count))
        room, at = room - count, at + 1


def ask(
    tokenizer: PreTrainedTokenizerBase, fact: tuple[str, str, str], depth: float, length: int | None = None
) -> Probe:
    """The question for a fact, up to where its value must follow."""
    kind, key, value = fact
    after = frame_of(tokenizer).after
    _, asked, begun = _wording(kind)
    question = asked.format(kind=kind, key=key) + after + begun.format(kind=kind, key=key)
    tags: dict[str, str | float] = {"kind": kind, "depth": depth} | ({"length": length} if length else {})
    return Probe(encode(tokenizer, question), encode(tokenizer, " " + value), tags, (value,))


def _wording(kind: str) -> tuple[str, str, str]:
    """How a fact is hidden, asked for, and how its answer begins."""
    return SENTENCE if kind == "sentence" else (NEEDLE, QUESTION, PREFIX)


TASKS["needle"] = Task(
    "four facts per context at fixed depths, asked after compression; nats above the full cache's",
    Source("needle", 1, "probes", needle, length=1900),
    (NLL, HIT, EXACT),
)
TASKS["words"] = Task(
    "four facts made of words per context, two of them in plain sentences, asked after compression",
    Source("words", 1, "probes", words, length=1900),
    (NLL, HIT, EXACT),
)
TASKS["niah"] = Task(
    "one number per context over a grid of length and depth; exact if every token is the likeliest",
    Source("niah", 1, "probes", niah, length=2048, contexts=1),
    (EXACT, NLL, HIT),
)
