"""Files of results: one JSON record per finished cell, and beside it the raw outcomes, a line per example.

Records are checked when read and when written; the form is described in docs/formats.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvstrata.core import InputError, KvstrataError
from kvstrata.evaluate.runs import Outcome, labelled
from kvstrata.files import whole

FORM = "kvstrata.cell/1"
RAW_FORM = "kvstrata.raw/1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Run(_Strict):
    """What outcomes depend on. Tasks that read figures off one run share its raw file."""

    source: str
    version: int
    policy: str
    content: str | None = None  # hash of what a policy file says
    budget: str | None
    scope: Literal["context", "prompt"]
    seed: int
    contexts: int = Field(ge=1)
    length: int = Field(ge=1)
    model: str  # name and hash of the weights
    dtype: str
    kernels: str
    device: str
    haystack: str | None = None  # hash of the text, if it is not the task's own
    data: dict[str, str] = Field(default_factory=dict)  # hashes of files read under --data

    @property
    def key(self) -> str:
        """A short hash of all of it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The policy and its budget, as tables name them."""
        return labelled(self.policy, self.budget)

    @property
    def slug(self) -> str:
        """A file's name without its ending."""
        return re.sub(r"[^A-Za-z0-9.%=-]+", "_", f"{self.source}-{self.policy}-{self.budget or 'own'}-{self.key}")[
            -120:
        ]


class ExampleValues(_Strict):
    """Figures of one example."""

    example: str
    values: dict[str, float]


class Cell(_Strict):
    """One task under one policy: the unit that is never run twice."""

    form: Literal["kvstrata.cell/1"] = FORM
    task: str
    run: Run
    resolved: str  # the policy with the budget that was found for it
    primary: str
    values: dict[str, float]  # means over the examples that have the figure
    held_bytes: float = Field(ge=0)  # per row: mean over examples and steps
    live_bytes: float = Field(ge=0)
    peak_bytes: int = Field(ge=0)  # the most that was held between two forwards
    full_bytes: float = Field(gt=0)  # what the full cache held in the same places
    ms_per_token: float | None
    rows: int = Field(ge=1)  # of the batch that this was measured in
    examples: list[ExampleValues]
    provenance: dict[str, str | int | float]

    @property
    def share(self) -> float:
        """Bytes held over the full cache's."""
        return self.held_bytes / self.full_bytes


def summarise(task: str, primary: str, run: Run, found: list[Outcome], provenance: dict[str, Any]) -> Cell:
    """A cell of all its outcomes."""
    names = dict.fromkeys(name for outcome in found for name in outcome.values)
    timed = [outcome.ms_per_token for outcome in found if outcome.ms_per_token is not None]
    return Cell(
        task=task,
        run=run,
        resolved=" | ".join(dict.fromkeys(outcome.resolved for outcome in found)),
        primary=primary,
        values={name: mean(o.values[name] for o in found if name in o.values) for name in names},
        held_bytes=mean(o.held for o in found),
        live_bytes=mean(o.live for o in found),
        peak_bytes=max(o.peak for o in found),
        full_bytes=mean(o.full for o in found),
        ms_per_token=mean(timed) if timed else None,
        rows=max(outcome.rows for outcome in found),
        examples=[ExampleValues(example=o.example, values=o.values) for o in found],
        provenance={**provenance, "where": " | ".join(dict.fromkeys(outcome.where for outcome in found))},
    )


class Results:
    """A folder of results. One process at a time writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells_folder, self.raw_folder = folder / "cells", folder / "raw"

    @contextmanager
    def writing(self) -> Generator[None]:
        """Make the folders and keep other writers out for the block. Raises `InputError` if one is there."""
        try:
            self.cells_folder.mkdir(parents=True, exist_ok=True)
            self.raw_folder.mkdir(exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise InputError(f"cannot write results to {self.folder}: {error}") from error
        with lock:
            try:
                import fcntl  # not on Windows

                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                pass
            except OSError as error:
                raise InputError(f"another run is writing to {self.folder}: wait for it, or give --out") from error
            yield

    def path(self, task: str, run: Run) -> Path:
        """Where a cell's record is."""
        return self.cells_folder / f"{task}-{run.slug}.json"

    def finished(self, task: str, run: Run) -> bool:
        """Whether the cell's record is there and sound."""
        path = self.path(task, run)
        return path.is_file() and read_cell(path).run == run

    def cells(self) -> list[Cell]:
        """All records, by name. Raises `InputError` for a damaged one."""
        if not self.cells_folder.is_dir():
            raise InputError(f"{self.folder} holds no results: run kvstrata evaluate --out {self.folder} first")
        return [read_cell(path) for path in sorted(self.cells_folder.glob("*.json"))]

    def write(self, cell: Cell) -> Path:
        """Write a record whole or not at all."""
        path = self.path(cell.task, cell.run)
        try:
            with whole(path) as scratch:
                scratch.write_text(cell.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise _disk(path, error) from error
        return path

    def raw_path(self, run: Run) -> Path:
        """Where a run's outcomes are."""
        return self.raw_folder / f"{run.slug}.jsonl"

    def outcomes(self, run: Run) -> dict[str, Outcome]:
        """Outcomes so far, by example. A last line that was cut off does not count; anything else wrong is an error."""
        path = self.raw_path(run)
        if not path.is_file():
            return {}
        lines = _whole_lines(path).decode("utf-8", errors="replace").splitlines()
        if not lines:
            return {}
        try:
            head = json.loads(lines[0])
            if head["form"] != RAW_FORM or Run.model_validate(head["run"]) != run:
                raise ValueError("it belongs to another run")
            found = [Outcome(**json.loads(line)) for line in lines[1:]]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is damaged ({_first_line(error)}): move it away to measure it again") from error
        return {outcome.example: outcome for outcome in found}

    def append(self, run: Run, outcomes: list[Outcome]) -> None:
        """Add outcomes of one run and see to it that they are on the disk."""
        path = self.raw_path(run)
        before = len(_whole_lines(path)) if path.is_file() else 0
        lines: list[dict[str, Any]] = [] if before else [{"form": RAW_FORM, "run": run.model_dump()}]
        lines += [outcome.to_dict() for outcome in outcomes]
        text = "".join(json.dumps(line, allow_nan=True) + "\n" for line in lines)
        try:
            with path.open("r+" if path.is_file() else "w") as file:
                file.truncate(before)  # a line that was cut off when a process ended
                file.seek(before)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if path.is_file():
                os.truncate(path, before)
            raise _disk(path, error) from error


def read_cell(path: Path) -> Cell:
    """Read one record. Raises `InputError` that names the file where it is damaged."""
    try:
        return Cell.model_validate_json(path.read_text())
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputError(f"{path} is no sound record ({reason}): move it away to measure the cell again") from error


def _whole_lines(path: Path) -> bytes:
    """All lines of a file that end."""
    raw = path.read_bytes()
    return raw[: raw.rfind(b"\n") + 1]


def _disk(path: Path, error: OSError) -> KvstrataError:
    return KvstrataError(f"cannot write {path}: {error}. What was finished before is kept; make room and run it again")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
