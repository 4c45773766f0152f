"""The training side of the data split (docs/data.md): what anything calibrated and shipped may have read."""

from __future__ import annotations

import gzip
import json
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from kvstrata.core import InputError
from kvstrata.evaluate.texts import data_file, digest, read_text

NOVEL, WIKIPEDIA = "prose/pg1342_pride_and_prejudice.txt.gz", "prose/wikitext2_raw_test.txt.gz"
SUMS = "gsm8k/train_first200.jsonl.gz"
FIRST_UNREAD = 41  # chapter of the novel from which on it belongs to evaluation


def training_texts(data: Path) -> dict[str, str]:
    """Texts by name, from files under `data` and from this Python's own library. Raises `InputError`."""
    return {
        "pride-and-prejudice-1-40": novel(read_text(data_file(data, NOVEL, "calibrate"))),
        "wikitext-2-first-two-thirds": wikipedia(read_text(data_file(data, WIKIPEDIA, "calibrate"))),
        "gsm8k-train": sums(data_file(data, SUMS, "calibrate")),
        "python-a-m": library(),
    }


def named(texts: Mapping[str, str]) -> list[dict[str, str]]:
    """Names and hashes of texts, for files that were made from them."""
    return [{"name": name, "sha256": digest(text)} for name, text in texts.items()]


def novel(text: str) -> str:
    """Chapters 1 to 40. Raises `InputError` where the text has no such headings."""
    first, end = (re.search(rf"^\s*Chapter {n}\s*$", text, re.MULTILINE) for n in (1, FIRST_UNREAD))
    if first is None or end is None:
        raise InputError(f"{NOVEL} has no line 'Chapter 1' and 'Chapter {FIRST_UNREAD}': take the file of docs/data.md")
    return text[first.start() : end.start()]


def wikipedia(text: str) -> str:
    """The first two thirds, up to the end of a line."""
    cut = text.rfind("\n", 0, len(text) * 2 // 3)
    return text[: cut + 1]


def sums(file: Path) -> str:
    """Questions and answers, without the marks of the calculator."""
    lines = [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]
    pairs = (f"Question: {line['question']}\nAnswer: {line['answer']}" for line in lines)
    return re.sub(r"<<.*?>>", "", "\n\n".join(pairs))


def library(letters: str = "a-m") -> str:
    """Modules of the standard library whose names begin with one of the letters, one after the other."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(f"[{letters}]*.py"))
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
