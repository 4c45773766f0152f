"""`kvstrata ls`: what can be named."""

from __future__ import annotations

import inspect
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.core import PHASES
from kvstrata.diagnose.plots import draw_strategy
from kvstrata.evaluate import TASKS, Task
from kvstrata.policy import PRESETS
from kvstrata.policy.merging import MERGES
from kvstrata.policy.scorers import SCORERS
from kvstrata.policy.strategy import FULL, STRATEGY, Choice, read_strategy, strategy_file
from kvstrata.registry import load_plugins, unknown


class Kind(StrEnum):
    """What there is to list."""

    PRESETS = "presets"
    SCORERS = "scorers"
    MERGES = "merges"
    TASKS = "tasks"


def ls(
    kind: Annotated[
        str, typer.Argument(help="presets, scorers, merges, tasks, or a strategy of PolyKV: its file or polykv:256.")
    ] = Kind.PRESETS,
    plot: Annotated[Path | None, typer.Option(help="PNG of a strategy: patterns by colour, budgets as bars.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List presets, scorers or merging rules with options and sources, tasks of `kvstrata evaluate`, or a strategy."""
    if kind not in list(Kind):
        _strategy(strategy_file(kind) if kind.startswith(STRATEGY) else Path(kind), plot, as_json)
        return
    load_plugins()
    if kind == Kind.TASKS:
        rows = [{"name": name, "metrics": _metrics(task), "about": task.about} for name, task in sorted(TASKS.items())]
        _print(rows, as_json)
        return
    things = {Kind.PRESETS: PRESETS, Kind.SCORERS: SCORERS, Kind.MERGES: MERGES}[Kind(kind)]
    rows = [
        {"name": name, "options": _options(thing), "about": (inspect.getdoc(thing) or "").partition("\n\n")[0]}
        for name, thing in sorted(things.items())
    ]
    _print(rows, as_json)


def _strategy(file: Path, plot: Path | None, as_json: bool) -> None:
    """A strategy file as a table of its layers, and as a picture."""
    if not file.is_file():
        raise unknown("list or strategy file", str(file), tuple(Kind))
    found = read_strategy(file)
    rows = [
        {"layer": str(i), **{phase: _chosen(getattr(found, phase)[i]) for phase in PHASES}}
        for i in range(len(found.prefill))
    ]
    _print(rows, as_json)
    if plot is not None:
        draw_strategy(found, plot)


def _chosen(choice: Choice) -> str:
    return choice.pattern if choice.pattern == FULL else f"{choice.pattern}, {choice.budget} tokens"


def _print(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def _metrics(task: Task) -> str:
    return ", ".join(f"{metric.name} ({metric.unit}, {metric.better} is better)" for metric in task.metrics)


def _options(thing: object) -> str:
    """Options and their defaults as they are written in a policy's text."""
    parameters = inspect.signature(thing).parameters.values()  # pyright: ignore[reportArgumentType]
    return ", ".join(p.name if p.default is None else f"{p.name}={p.default}" for p in parameters)
