"""`kvstrata ls`: what can be named."""

from __future__ import annotations

import inspect
import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvstrata.evaluate import TASKS, Task
from kvstrata.policy import PRESETS
from kvstrata.policy.scorers import SCORERS
from kvstrata.registry import load_plugins


class Kind(StrEnum):
    """What there is to list."""

    PRESETS = "presets"
    SCORERS = "scorers"
    TASKS = "tasks"


def ls(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.PRESETS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the presets or scorers with their options and sources, or the tasks of `kvstrata evaluate`."""
    load_plugins()
    if kind is Kind.TASKS:
        rows = [{"name": name, "metrics": _metrics(task), "about": task.about} for name, task in sorted(TASKS.items())]
        _print(rows, as_json)
        return
    things = PRESETS if kind is Kind.PRESETS else SCORERS
    rows = [
        {"name": name, "options": _options(thing), "about": (inspect.getdoc(thing) or "").partition("\n\n")[0]}
        for name, thing in sorted(things.items())
    ]
    _print(rows, as_json)


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
