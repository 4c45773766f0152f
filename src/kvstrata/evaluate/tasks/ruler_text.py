"""What RULER's generated tasks say: a context, a question, how the answer begins and what it must hold."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise

from kvstrata.evaluate.texts import sentences
from kvstrata.evaluate.words import ADJECTIVES, NOUNS, names, number, unique_id

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True, slots=True)
class Item:
    """One example as text."""

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    any_of: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """What an item is made from: random numbers of its own, how many units of filling, and the essay."""

    rng: random.Random
    size: int
    essay: str


def niah(
    room: Room,
    *,
    hay: str,
    keys: str = "word",
    values: str = "number",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
) -> Item:
    """Needles of `num_keys` keys with `num_values` values each, of which `num_queries` keys are asked for."""
    rng = room.rng
    kind = "uuid" if values == "uuid" else "number"
    make = unique_id if values == "uuid" else number
    fillers = room.size if hay == "needle" else 0
    every_key = _keys(rng, keys, num_keys + fillers)  # at once, so that none is asked for that stands twice
    chosen = every_key[:num_keys]
    held = {key: [make(rng) for _ in range(num_values)] for key in chosen}
    needles = [_needle(kind, key, value) for key, many in held.items() for value in many]
    if hay == "needle":
        hidden = [_needle(kind, key, make(rng)) for key in every_key[num_keys:]]
    elif hay == "noise":
        hidden = [NOISE] * room.size
    else:
        every = sentences(room.essay)
        start = rng.randrange(len(every))
        hidden = [every[(start + i) % len(every)] for i in range(room.size)]
    for needle in needles:
        hidden.insert(rng.randrange(len(hidden) + 1), needle)
    asked = rng.sample(chosen, min(num_queries, len(chosen)))
    references = tuple(value for key in asked for value in held[key])
    many, listed = len(references) > 1, _listed(asked)
    opened = f"Some special magic {kind}s are" if many else f"A special magic {kind} is"
    context = (
        f"{opened} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}{'s' if many else ''} afterwards.\n"
    ) + ("\n" if hay != "essay" else " ").join(hidden)
    about = f"the special magic {kind}{'s' if many else ''} for {listed} mentioned in the provided text"
    question = f"\nWhat {'are all' if many else 'is'} {about}?"
    return Item(context, question, f"T{about[1:]} {'are' if many else 'is'}", references)


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def _keys(rng: random.Random, kind: str, count: int) -> list[str]:
    return [unique_id(rng) for _ in range(count)] if kind == "uuid" else names(rng, count)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + ", and " + words[-1]


def variable_tracking(room: Room, hops: int = 4) -> Item:
    """One chain of assignments in noise: which variables hold the value."""
    rng = room.rng
    variables = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(hops + 1)]
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {variables[0]} = {value}"] + [f"VAR {new} = VAR {old}" for old, new in pairwise(variables)]
    hidden = [NOISE] * room.size
    for at, line in zip(sorted(rng.choices(range(len(hidden) + 1), k=len(chain))), chain, strict=True):
        hidden.insert(at + chain.index(line), line)
    context = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    question = f"\nQuestion: Find all variables that are assigned the value {value} in the text above."
    prefix = (
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(variables)} variables are assigned the value {value}, they are:"
    )
    return Item(context + "\n".join(hidden), question, prefix, tuple(variables))


def common_words(room: Room, often: int = 30, seldom: int = 3, wanted: int = 10) -> Item:
    """A numbered list in which ten words stand often and all others seldom."""
    rng = room.rng
    pool = rng.sample(sorted({*ADJECTIVES, *NOUNS}), len({*ADJECTIVES, *NOUNS}))
    common, rare = pool[:wanted], pool[wanted:]
    times = min(often, seldom + room.size)  # short lists keep the contrast that they can
    others = [rare[i % len(rare)] + (str(i // len(rare)) if i >= len(rare) else "") for i in range(room.size)]
    listed = common * times + others * seldom
    rng.shuffle(listed)
    context = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
    ) + " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))
    question = "\nQuestion: What are the 10 most common words in the above list?"
    return Item(context, question, "Answer: The top 10 words that appear most often in the list are:", tuple(common))


def frequent_words(room: Room, alpha: float = 2.0, wanted: int = 3) -> Item:
    """Coded text whose words are as frequent as a zeta distribution says; the three most frequent are wanted."""
    rng = room.rng
    vocabulary = list({"".join(rng.choices(string.ascii_lowercase, k=6)): None for _ in range(200)})
    weights = [1 / (rank + 1) ** alpha for rank in range(len(vocabulary))]
    total, count = sum(weights), max(23, room.size)  # so that the third stands apart from the rest
    listed = [
        word for word, w in zip(vocabulary, weights, strict=True) for _ in range(max(1, round(count * w / total)))
    ]
    rng.shuffle(listed)
    context = (
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words.\n"
    ) + " ".join(listed)
    question = "\nQuestion: Do not provide any explanation. What are the three most frequently appeared coded words?"
    prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
    return Item(context, question, prefix, tuple(vocabulary[:wanted]))


def questions(room: Room, *, hops: int) -> Item:
    """Documents about invented people; the question is about one of them, over one document or over two.

    The published tasks take SQuAD and HotpotQA, which are not ours to ship.
    """
    rng = room.rng
    people = [name.replace("-", " ").title() for name in names(rng, 2 * room.size + 2)]
    towns = [name.split("-")[1].title() + "ville" for name in names(rng, len(people))]
    trades = [rng.choice(NOUNS) for _ in people]
    facts = [
        f"{person} lives in {town} and sells {trade}s. "
        + (f"The best friend of {person} is {friend}." if hops > 1 else f"{person} has done so for years.")
        for person, town, trade, friend in zip(people, towns, trades, people[1:] + people[:1], strict=True)
    ]
    asked = rng.randrange(len(people) - 1)
    answer = towns[asked + hops - 1]
    shown = list(range(len(people)))
    rng.shuffle(shown)
    documents = "\n\n".join(f"Document {i}:\n{facts[which]}" for i, which in enumerate(shown, start=1))
    about = people[asked] if hops == 1 else f"the best friend of {people[asked]}"
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    context = f"{order}\n\nThe following are given documents.\n\n{documents}"
    question = f"\n\n{order}\n\nQuestion: In which town does {about} live?"
    return Item(context, question, "Answer:", (answer,), any_of=True)
