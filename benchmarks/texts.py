"""Texts of the evaluation side of docs/data.md, for `kvstrata evaluate --haystack`.

    python benchmarks/texts.py FOLDER DATA     DATA: see docs/data.md

Writes FOLDER/wikipedia.txt (the last third of WikiText-2's test set), FOLDER/code.txt (modules n to z of Python's
standard library), FOLDER/arithmetic.txt (made up: sums of numbers found before) and, where DATA/essays.tar.gz is,
FOLDER/essays.txt.
"""

from __future__ import annotations

import random
import sys
import tarfile
from pathlib import Path

from kvstrata.calibrate.corpus import WIKIPEDIA, library, wikipedia
from kvstrata.evaluate.texts import data_file, read_text


def main() -> None:
    folder, data = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    whole = read_text(data_file(data, WIKIPEDIA, "texts"))
    write(folder / "wikipedia.txt", whole[len(wikipedia(whole)) :])
    write(folder / "code.txt", library("n-z"))
    write(folder / "arithmetic.txt", arithmetic(problems=64, steps=80))
    if (essays := data / "essays.tar.gz").is_file():
        with tarfile.open(essays) as archive:
            files = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
            parts = [stream.read() for member in files if (stream := archive.extractfile(member))]
        write(folder / "essays.txt", b"\n\n".join(parts).decode("utf-8", errors="replace"))


def arithmetic(problems: int, steps: int, seed: int = 0) -> str:
    """Problems in which every line adds or subtracts two results of earlier lines, any of them, modulo 100."""
    rng = random.Random(seed)
    text: list[str] = []
    for number in range(1, problems + 1):
        known = [rng.randrange(100) for _ in range(4)]
        text += [f"Problem {number}. All numbers are modulo 100.", *(f"x{i} = {x}" for i, x in enumerate(known))]
        for i in range(len(known), steps):
            (a, b), sign = rng.sample(range(i), 2), rng.choice("+-")
            known.append((known[a] + known[b] if sign == "+" else known[a] - known[b]) % 100)
            text.append(f"x{i} = x{a} {sign} x{b} = {known[a]} {sign} {known[b]} = {known[i]}")
        text.append("")
    return "\n".join(text)


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(text):,} characters")


if __name__ == "__main__":
    main()
