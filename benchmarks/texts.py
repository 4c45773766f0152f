"""Texts of the evaluation side of docs/data.md, for `kvstrata evaluate --haystack`.

    python benchmarks/texts.py FOLDER DATA     DATA: see docs/data.md

Writes FOLDER/wikipedia.txt (the last third of WikiText-2's test set), FOLDER/code.txt (modules n to z of Python's
standard library) and, where DATA/essays.tar.gz is, FOLDER/essays.txt.
"""

from __future__ import annotations

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
    if (essays := data / "essays.tar.gz").is_file():
        with tarfile.open(essays) as archive:
            files = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
            parts = [stream.read() for member in files if (stream := archive.extractfile(member))]
        write(folder / "essays.txt", b"\n\n".join(parts).decode("utf-8", errors="replace"))


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {len(text):,} characters")


if __name__ == "__main__":
    main()
