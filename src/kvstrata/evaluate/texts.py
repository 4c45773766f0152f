"""Texts under the tasks, on the evaluation side of the data split (docs/data.md)."""

from __future__ import annotations

import gzip
import hashlib
import random
import re
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvstrata.core import InputError
from kvstrata.hf.framing import beginning, encode

NOVEL = "pride_and_prejudice_41_61.txt.gz"  # evaluation side of the novel; calibration may read chapters 1 to 40


@cache
def novel() -> str:
    """Chapters 41 to 61 of Pride and Prejudice, in the public domain, without any header."""
    return gzip.decompress(files("kvstrata.evaluate").joinpath("assets", NOVEL).read_bytes()).decode()


def haystack(file: Path | None) -> str:
    """The text to hide things in: a file of the user's, or the novel. Raises `InputError`."""
    return novel() if file is None else read_text(file)


def read_text(file: Path) -> str:
    """A text file, gzipped or not. Raises `InputError`."""
    try:
        raw = file.read_bytes()
        return (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error


def data_file(data: Path | None, name: str, task: str) -> Path:
    """A file under --data. Raises `InputError` that says where it comes from."""
    if data is None:
        raise InputError(f"task {task} needs --data DIR with {name} in it; docs/data.md says where to get it")
    if not (data / name).is_file():
        raise InputError(f"task {task} needs {data / name}, which is not there; docs/data.md says where to get it")
    return data / name


def digest(text: str) -> str:
    """SHA-256 of a text, for provenance."""
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, each with the white space behind it turned into one space or line break."""
    flat = re.sub(r"[ \t]*\n[ \t]*(?=\S)", " ", re.sub(r"\n\s*\n", "\x00", text))
    parts = re.split(r"(?<=[.!?][\"'”’_])\s+|(?<=[.!?])\s+|\x00", flat)
    found = tuple(part.strip() for part in parts if part.strip())
    if not found:
        raise InputError("the haystack has no sentences: give a text with words in it")
    return found


def stretches(
    tokenizer: PreTrainedTokenizerBase, text: str, count: int, length: int, fix: str, seed: int = 0
) -> list[list[int]]:
    """Stretches of a text, one from the beginning of each of as many equal parts, or elsewhere in it by the seed.

    Each begins as the tokenizer lets any text begin. Raises `InputError`, which ends with `fix`, where the text is too
    short.
    """
    ids, begin = encode(tokenizer, text), beginning(tokenizer)
    apart, length = len(ids) // count, length - len(begin)
    if apart < length:
        raise InputError(
            f"the text has {len(ids)} tokens, and {count} stretches of {length} need {count * length}: {fix}"
        )
    moved = [generator("documents", seed, i).randrange(apart - length + 1) if seed else 0 for i in range(count)]
    return [begin + ids[i * apart + moved[i] :][:length] for i in range(count)]


def generator(*seeds: object) -> random.Random:
    """Random numbers that depend on all of the seeds and on nothing else."""
    return random.Random("/".join(map(str, seeds)))
