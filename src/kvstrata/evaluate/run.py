"""Running a grid: what is finished is left alone, what is missing is run, and every outcome is kept at once."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from kvstrata.bench.measure import provenance
from kvstrata.core import KvstrataError
from kvstrata.evaluate import peers
from kvstrata.evaluate.grid import (
    Asked,
    Job,
    Planned,
    Unit,
    check_lengths,
    check_scope,
    run_of,
    sources_of,
    tasks_of,
    units_of,
)
from kvstrata.evaluate.result import Cell, Results, Run, summarise
from kvstrata.evaluate.task import Scope, Source, Task
from kvstrata.evaluate.texts import data_file, digest, haystack
from kvstrata.evaluate.worker import Line, Worker, run_unit, weights_digest
from kvstrata.hf.compat import option, text_config

Runner = Callable[[Job, list[Unit]], Iterator[tuple[Unit, list[Line]]]]


@dataclass(slots=True)
class Grid:
    """A plan: cells to fill, and the work that is left to fill them."""

    job: Job
    scope: Scope
    tasks: dict[str, Task]
    runs: dict[tuple[str, Asked], Run]  # by source and policy
    names: dict[str, list[str]]  # names of the examples of a source
    peers: dict[tuple[str, Asked], str]  # by source and peer: the task that has the source
    work: list[Planned]
    finished: int  # cells that were there before


def plan(
    worker: Worker,
    results: Results,
    tasks: dict[str, Task],
    asked: Sequence[Asked],
    scope: Scope,
    beside: Sequence[Asked] = (),
) -> Grid:
    """Make all examples, find what is missing. Raises `InputError` for what cannot be run, before anything runs."""
    check_scope(tasks, scope)
    job, most = worker.job, option(text_config(worker.model), "max_position_embeddings")
    grid = Grid(job, scope, tasks, {}, {}, {}, [], 0)
    about = _about(worker)
    for name, source in sources_of(tasks).items():
        examples = worker.examples(name)
        check_lengths(name, examples, most)
        grid.names[source.name] = [example.name for example in examples]
        files = _files(job, source, name)
        missing: dict[Asked, set[str]] = {}
        for one in (*asked, *(beside if source.kind in peers.KINDS and scope == "context" else ())):
            run = grid.runs[source.name, one] = run_of(job, source, one, scope, about, files)
            if all(results.finished(task, run) for task in tasks_of(source, tasks)):
                grid.finished += len(tasks_of(source, tasks))
            elif one in beside:
                grid.peers[source.name, one] = name
            else:
                missing[one] = set(grid.names[source.name]) - set(results.outcomes(run))
        grid.work += units_of(name, source, scope, examples, job.batch, missing)
    return grid


def _about(worker: Worker) -> dict[str, str]:
    job = worker.job
    found = {
        "model": weights_digest(worker.model, job.model or "demo"),
        "dtype": str(worker.model.dtype).removeprefix("torch."),
    }
    if job.settings.haystack:
        found["haystack"] = digest(haystack(job.settings.haystack))
    return found


def _files(job: Job, source: Source, task: str) -> dict[str, str]:
    """Hashes of the files under --data that a source reads."""
    import hashlib

    files = {name: data_file(job.settings.data, name, task) for name in source.data}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}


def run_grid(
    grid: Grid, results: Results, runner: Runner, tell: Callable[[int], object] = lambda _: None
) -> list[Cell]:
    """Do the work that is left, keep every outcome as it comes, and write the cells that it completes.

    `tell` is called with the number of units done since the last time.
    """
    start = time.time()
    resolved: dict[tuple[str, Asked], str] = {}
    written = _write_finished(grid, results, resolved, start)
    for unit, lines in runner(grid.job, [planned.unit for planned in grid.work]):
        source = grid.tasks[unit.source].source
        for one in dict.fromkeys(asked for asked, _, _ in lines):
            mine = [(text, outcome) for asked, text, outcome in lines if asked == one]
            resolved[source.name, one] = mine[-1][0]
            results.append(grid.runs[source.name, one], [outcome for _, outcome in mine])
        written += _write_finished(grid, results, resolved, start, {source.name})
        tell(1)
    return written


def run_peers(
    grid: Grid, worker: Worker, results: Results, tell: Callable[[str], object] = lambda _: None
) -> list[Cell]:
    """Run the peers that are left, one after the other, each in its own environment."""
    written, start = list[Cell](), time.time()
    for (source, one), task in grid.peers.items():
        tell(f"{one.label} on {task}")
        run, examples = grid.runs[source, one], worker.examples(task)
        known = results.outcomes(run)
        left = [example for example in examples if example.name not in known]
        folder = str(worker.model.config._name_or_path)  # pyright: ignore
        kind = grid.tasks[task].source.kind
        for outcome in peers.run_peer(one.policy, one.budget, folder, run.dtype, kind, left):
            results.append(run, [outcome])
        written += _write_finished(grid, results, {}, start, {source})
    return written


def _write_finished(
    grid: Grid,
    results: Results,
    resolved: dict[tuple[str, Asked], str],
    start: float,
    only: set[str] | None = None,
) -> list[Cell]:
    """Write the record of every cell whose outcomes are all there and that has none yet."""
    written: list[Cell] = []
    for (name, one), run in grid.runs.items():
        if only is not None and name not in only:
            continue
        here = {
            t: task for t, task in grid.tasks.items() if task.source.name == name and not results.path(t, run).is_file()
        }
        found = results.outcomes(run) if here else {}
        if not here or set(grid.names[name]) - set(found):
            continue
        ordered = [found[example] for example in grid.names[name]]
        for task, record in here.items():
            about: dict[str, Any] = {**provenance(), "started": round(start), "seconds": round(time.time() - start, 1)}
            names = [metric.name for metric in record.metrics]
            kept = [replace(o, values={k: v for k, v in o.values.items() if k in names}) for o in ordered]
            if not all(outcome.values for outcome in kept):  # a peer that has no such figure
                continue
            text = resolved.get((name, one), one.label)
            cell = summarise(task, record.primary.name, run, text, kept, about)
            results.write(cell)
            written.append(cell)
    return written


def here(job: Job, units: list[Unit]) -> Iterator[tuple[Unit, list[Line]]]:
    """One unit after the other in this process."""
    for unit in units:
        yield unit, run_unit(job, unit)


def processes(jobs: int) -> Runner:
    """Units in `jobs` processes beside this one, each with a model of its own."""

    def run(job: Job, units: list[Unit]) -> Iterator[tuple[Unit, list[Line]]]:
        if not units:
            return
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            waiting = {pool.submit(run_unit, job, unit): unit for unit in units}
            try:
                while waiting:
                    for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                        yield waiting.pop(done), done.result()
            except BrokenProcessPool as error:
                raise KvstrataError(
                    "a worker process died, perhaps for want of memory: what was finished is kept; "
                    "run it again with fewer --jobs or a smaller --batch"
                ) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    return run
