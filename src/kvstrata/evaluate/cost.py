"""What a grid will cost, from a short run of the model itself."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass

import torch

from kvstrata.evaluate.run import Grid
from kvstrata.evaluate.runs import feed, read
from kvstrata.evaluate.worker import Worker
from kvstrata.hf import compress

PROMPT = "(prompts, read for all)"
SHORT, STEPS = 512, 4  # tokens read and steps made to see how fast the model is


@dataclass(frozen=True, slots=True)
class Cost:
    """One cell, or the prompts of a task."""

    task: str
    policy: str
    examples: int
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, str | int | float]:
        """Plain values, for JSON."""
        return asdict(self)


def costs(worker: Worker, grid: Grid) -> list[Cost]:
    """One per source and policy that has work left. Long prompts take more than estimated, by their square."""
    per_read, per_step = _speed(worker, max((p.unit.last - p.unit.first for p in grid.work), default=1))
    examples, tokens = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
    for planned in grid.work:
        unit = planned.unit
        parts = {PROMPT: planned.prompt_tokens}
        parts |= {asked.label: planned.fed_tokens // len(unit.asked) for asked in unit.asked}
        for label, count in parts.items():
            examples[unit.source, label] += unit.last - unit.first
            tokens[unit.source, label] += count
    found: list[Cost] = []
    for (task, label), count in tokens.items():
        by_step = label != PROMPT and grid.tasks[task].source.kind in ("steps", "answers")
        seconds = count * (per_step if by_step else per_read)
        found.append(Cost(task, label, examples[task, label], count, seconds))
    return found


def _speed(worker: Worker, rows: int) -> tuple[float, float]:
    """Seconds to read a token, and to make one step of a row in a batch of `rows`."""
    vocab = worker.model.get_input_embeddings().weight.shape[0]  # pyright: ignore
    ids = torch.randint(0, int(vocab), (rows, SHORT), generator=torch.Generator().manual_seed(0))
    with compress(worker.model, "full") as cache:
        start = time.perf_counter()
        read(worker.model, {"full": cache}, ids[:1].tolist())
        reading = (time.perf_counter() - start) / SHORT
    with compress(worker.model, "full") as cache:
        read(worker.model, {"full": cache}, ids[:, :64].tolist())
        times = list[float]()
        for step in range(STEPS):
            start = time.perf_counter()
            feed(worker.model, cache, ids[:, step : step + 1].to(worker.model.device))
            times.append(time.perf_counter() - start)
    return reading, statistics.median(times) / rows
