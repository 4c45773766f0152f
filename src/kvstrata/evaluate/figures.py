"""Pictures of comparisons: quality against measured bytes and against time, and the grid of a needle."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from kvstrata.core import KvstrataError
from kvstrata.evaluate.compare import Comparison, Row
from kvstrata.evaluate.result import Results
from kvstrata.evaluate.runs import FULL
from kvstrata.files import whole

ENDINGS = ("png", "svg")


def draw(comparison: Comparison, results: Results, folder: Path) -> list[Path]:
    """Write the pictures there are figures for, PNG and SVG. Raises `KvstrataError` without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{comparison.task}-{comparison.rows[0].cell.run.key}"
    found = _save(_against(comparison, "bytes held, % of the full cache", _share), folder / f"{name}-bytes")
    if any(row.cell.ms_per_token for row in comparison.rows):
        found += _save(_against(comparison, "ms per token and row", _milliseconds), folder / f"{name}-time")
    if comparison.task == "niah":
        found += _save(_grid(comparison, results), folder / f"{name}-grid")
    return found


def _share(row: Row) -> float:
    return 100 * row.cell.share


def _milliseconds(row: Row) -> float | None:
    return row.cell.ms_per_token


def figure(**options: Any) -> Any:
    """An empty picture. Raises `KvstrataError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KvstrataError("pictures need matplotlib: pip install 'kvstrata[demo]'") from error
    return Figure(layout="constrained", **options)


def _against(comparison: Comparison, label: str, place: Any) -> Any:
    """The figure that counts over whatever `place` says of a row; one line per policy over its budgets."""
    metric, lines = comparison.metrics[0], defaultdict[str, list[tuple[float, Row]]](list)
    for row in comparison.rows:
        if (x := place(row)) is not None:
            lines[row.cell.run.policy].append((x, row))
    fig = figure(figsize=(8, 5))
    axes = fig.subplots()
    for policy, points in lines.items():
        points.sort(key=lambda point: point[0])
        marks = [point[1].figures[metric.name] for point in points]
        y = [mark.mean for mark in marks]
        error = [[m.mean - m.low for m in marks], [m.high - m.mean for m in marks]]
        axes.errorbar([x for x, _ in points], y, error, marker="*" if policy == FULL else "o", capsize=2, label=policy)
    above = " above the full cache" if metric.relative else ""
    axes.set(xlabel=label, ylabel=f"{metric.name}, {metric.unit}{above}", title=comparison.title)
    axes.title.set_fontsize(8)
    axes.grid(alpha=0.3)
    fig.legend(loc="outside right upper", fontsize=8)
    return fig


def _grid(comparison: Comparison, results: Results) -> Any:
    """Share of exact answers over length and depth, one panel per policy."""
    rows = comparison.rows
    fig = figure(figsize=(3 * min(4, len(rows)), 2.6 * -(-len(rows) // 4)))
    panels = fig.subplots(-(-len(rows) // 4), min(4, len(rows)), squeeze=False).flat
    for axes, row in zip(panels, rows, strict=False):
        found = defaultdict[tuple[float, float], list[float]](list)
        for outcome in results.outcomes(row.cell.run).values():
            for item in outcome.items:
                found[float(item["length"]), float(item["depth"])].append(float(item["exact"]))
        lengths, depths = sorted({k[0] for k in found}), sorted({k[1] for k in found})
        image = [[mean(found[n, d]) for n in lengths] for d in depths]
        axes.imshow(image, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{n:.0f}" for n in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths], fontsize=7)
        axes.set_title(f"{row.label} ({row.cell.share:.0%} held)", fontsize=8)
    fig.supxlabel("tokens of context")
    fig.supylabel("distance from the question")
    return fig


def _save(fig: Any, stem: Path) -> list[Path]:
    """Write under a temporary name, then rename."""
    found: list[Path] = []
    for ending in ENDINGS:
        path = stem.with_name(f"{stem.name}.{ending}")
        with whole(path) as scratch:
            fig.savefig(scratch, dpi=130, format=ending)
        found.append(path)
    return found
