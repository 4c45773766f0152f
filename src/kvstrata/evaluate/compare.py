"""Cells beside each other: differences from the full cache on the same examples, with intervals over the examples."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from kvstrata.evaluate.peers import OPTIONS
from kvstrata.evaluate.result import Cell
from kvstrata.evaluate.runs import FULL
from kvstrata.evaluate.task import TASKS, Metric

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over n examples, and between which bounds it would be in 95 of 100 draws of as many examples."""

    mean: float
    low: float
    high: float
    n: int


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Bootstrap over examples: resampled means, by percentiles. One example has no interval but itself."""
    if not values:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    rng, n = random.Random(seed), len(values)
    means = sorted(mean(rng.choices(values, k=n)) for _ in range(RESAMPLES if n > 1 else 1))
    tail = (1 - LEVEL) / 2
    return Interval(mean(values), percentile(means, tail), percentile(means, 1 - tail), n)


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values the one with this share of the others below it."""
    at = share * (len(values) - 1)
    return values[int(at) if share < 0.5 else round(at)]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in a table: its figures, and for relative ones what they are above the full cache's."""

    label: str
    cell: Cell
    figures: dict[str, Interval]

    @property
    def is_full(self) -> bool:
        """Whether it is an uncompressed cache, ours or a peer's."""
        return _is_full(self.cell)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows that saw the same examples: one task, scope, seed, length, model and dtype."""

    task: str
    title: str
    metrics: tuple[Metric, ...]
    rows: list[Row]


def comparisons(cells: Sequence[Cell]) -> list[Comparison]:
    """All tables that the cells make, the full cache first in each, then by bytes and by how well they did."""
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        run = cell.run
        same = (cell.task, run.version, run.scope, run.seed, run.contexts, run.length, run.model, run.dtype)
        groups[*same, run.kernels, run.device, run.haystack, tuple(sorted(run.data.items()))].append(cell)
    return [_compared(group) for _, group in sorted(groups.items(), key=lambda item: str(item[0]))]


def _compared(cells: list[Cell]) -> Comparison:
    run, task = cells[0].run, cells[0].task
    known = TASKS[task].metrics
    stacks = {_stack(cell): cell for cell in cells if _is_full(cell)}
    rows = [Row(c.run.label, c, {m.name: _figure(c, stacks.get(_stack(c)), m) for m in known}) for c in cells]
    worse = 1 if known[0].better == "lower" else -1
    rows.sort(
        key=lambda row: (
            row.cell.run.policy != FULL,
            row.cell.run.budget or "",
            worse * row.figures[known[0].name].mean,
        )
    )
    seen = {"context": "not visible", "prompt": "visible"}[run.scope]
    asked = f", question {seen} when compressing" if TASKS[task].source.kind in ("probes", "answers") else ""
    title = f"{task}: {run.contexts} contexts of {run.length} tokens{asked}; {run.model}, {run.dtype}, seed {run.seed}"
    return Comparison(task, title, known, rows)


def _is_full(cell: Cell) -> bool:
    return cell.run.policy == FULL or cell.run.policy.endswith(f":{FULL}")


def _stack(cell: Cell) -> str:
    """Whose full cache a cell is compared with: ours, or that of the library it ran in."""
    name = cell.run.policy.partition(":")[0]
    return name if name in OPTIONS else ""


def _figure(cell: Cell, full: Cell | None, metric: Metric) -> Interval:
    own = {e.example: e.values[metric.name] for e in cell.examples if metric.name in e.values}
    if metric.relative and full is None:
        return interval([])
    if not metric.relative or full is None or cell is full:
        return interval(list(own.values()))
    base = {e.example: e.values[metric.name] for e in full.examples if metric.name in e.values}
    return interval([value - base[example] for example, value in own.items() if example in base])


def to_dict(comparison: Comparison) -> dict[str, object]:
    """Plain values, for JSON."""
    rows = [
        {
            "policy": row.cell.run.policy,
            "budget": row.cell.run.budget,
            "share_held": row.cell.share,
            "held_bytes": row.cell.held_bytes,
            "live_bytes": row.cell.live_bytes,
            "peak_bytes": row.cell.peak_bytes,
            "ms_per_token": row.cell.ms_per_token,
            "rows": row.cell.rows,
            "figures": {name: asdict(figure) for name, figure in row.figures.items()},
        }
        for row in comparison.rows
    ]
    return {"task": comparison.task, "title": comparison.title, "rows": rows}
