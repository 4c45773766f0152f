"""Running a grid: what is finished is left alone, what is missing is run, and every outcome is kept at once."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvstrata.bench.measure import provenance
from kvstrata.core import InputError, KvstrataError
from kvstrata.evaluate import peers
from kvstrata.evaluate.content import check_unread, content
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
from kvstrata.evaluate.runs import Outcome
from kvstrata.evaluate.task import Scope, Source, Task
from kvstrata.evaluate.texts import data_file, digest, haystack, read_text
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
    left: dict[tuple[str, Asked], set[str]]  # by source and policy: examples whose outcomes are missing
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
    grid = Grid(job, scope, tasks, {}, {}, {}, {}, [], 0)
    about, text = _about(worker), digest(haystack(job.settings.haystack))
    said = {policy: content(policy) for policy in dict.fromkeys(one.policy for one in asked)}
    for name, source in sources_of(tasks).items():
        examples = worker.examples(name)
        check_lengths(name, examples, most)
        grid.names[source.name] = [example.name for example in examples]
        paths = _paths(job, source, name)
        files = {file: hashlib.sha256(path.read_bytes()).hexdigest() for file, path in paths.items()}
        read = {text, *(digest(read_text(path)) for path in paths.values())}
        for policy in said:
            check_unread(policy, read)
        for one in asked:
            worker.policy(name, one, examples[:1])  # so that a budget that cannot be is refused now
        for one in (*asked, *(beside if source.kind in peers.KINDS and scope == "context" else ())):
            run = run_of(job, source, one, scope, about, files, said.get(one.policy))  # a peer's name names no files
            grid.runs[source.name, one] = run
            here = [task for task in tasks_of(source, tasks) if one not in beside or _of_peers(tasks[task])]
            if all(results.finished(task, run) for task in here):
                grid.finished += len(here)
                continue
            grid.left[source.name, one] = set(grid.names[source.name]) - set(results.outcomes(run))
            if one in beside:
                grid.peers[source.name, one] = name
        missing = {one: grid.left[source.name, one] for one in asked if (source.name, one) in grid.left}
        grid.work += units_of(name, source, scope, examples, job.batch, missing)
    if beside and not any((source, one) in grid.runs for source, _ in grid.runs for one in beside):
        raise InputError("--peers: none of these tasks asks them anything; they know needle, words, niah, copy and ppl")
    return grid


def _of_peers(task: Task) -> bool:
    """Whether a peer gives the figure that counts."""
    return task.primary.name in peers.FIGURES


def _about(worker: Worker) -> dict[str, str]:
    job = worker.job
    found = {
        "model": weights_digest(worker.model, job.model or "demo"),
        "dtype": str(worker.model.dtype).removeprefix("torch."),
    }
    if job.settings.haystack:
        found["haystack"] = digest(haystack(job.settings.haystack))
    return found


def _paths(job: Job, source: Source, task: str) -> dict[str, Path]:
    """The files under --data that a source reads."""
    files = {name: data_file(job.settings.data, name, task) for name in source.data}
    length = source.resolve(job.settings).length
    for name in (form.format(length=length) for form in source.instead):
        if job.settings.data and (job.settings.data / name).is_file():
            files[name] = job.settings.data / name
            break
    return files


def run_grid(
    grid: Grid, results: Results, runner: Runner, tell: Callable[[int], object] = lambda _: None
) -> list[Cell]:
    """Do the work that is left, keep every outcome as it comes, and write the cells that it completes.

    `tell` is called with the number of units done since the last time.
    """
    start = time.time()
    written = [cell for key in grid.left for cell in _write_finished(grid, results, start, key)]
    for unit, lines in runner(grid.job, [planned.unit for planned in grid.work]):
        source = grid.tasks[unit.source].source
        for one in dict.fromkeys(asked for asked, _ in lines):
            key, found = (source.name, one), [outcome for asked, outcome in lines if asked == one]
            results.append(grid.runs[key], found)
            grid.left[key] -= {outcome.example for outcome in found}
            written += _write_finished(grid, results, start, key)
        tell(1)
    return written


def run_peers(
    grid: Grid, worker: Worker, results: Results, tell: Callable[[str], object] = lambda _: None
) -> list[Cell]:
    """Run the peers that are left, one after the other, each in its own environment."""
    written, start = list[Cell](), time.time()
    for key, task in grid.peers.items():
        run, one = grid.runs[key], key[1]
        left = [example for example in worker.examples(task) if example.name in grid.left[key]]
        if left:  # else only a record is missing, and no process need start
            tell(f"{one.label} on {task}")
            folder = str(worker.model.config._name_or_path)  # pyright: ignore
            kind = grid.tasks[task].source.kind
            for outcome in peers.run_peer(one.policy, one.budget, folder, run.dtype, kind, left):
                results.append(run, [outcome])
                grid.left[key].discard(outcome.example)
        written += _write_finished(grid, results, start, key)
    return written


def _write_finished(grid: Grid, results: Results, start: float, key: tuple[str, Asked]) -> list[Cell]:
    """Write the records of a run whose outcomes are all there, those that are not written yet."""
    if grid.left[key]:
        return []
    run, written = grid.runs[key], list[Cell]()
    outcomes = results.outcomes(run)
    ordered = [outcomes[name] for name in grid.names[key[0]]]
    about: dict[str, Any] = {**provenance(), "started": round(start), "seconds": round(time.time() - start, 1)}
    for name, task in grid.tasks.items():
        if task.source.name != key[0] or results.path(name, run).is_file() or not _has(ordered, task):
            continue
        figures = {metric.name for metric in task.metrics}
        kept = [replace(o, values={k: v for k, v in o.values.items() if k in figures}) for o in ordered]
        written.append(summarise(name, task.primary.name, run, kept, about))
        results.write(written[-1])
    return written


def _has(outcomes: Sequence[Outcome], task: Task) -> bool:
    return all(task.primary.name in outcome.values for outcome in outcomes)


def here(job: Job, units: list[Unit]) -> Iterator[tuple[Unit, list[Line]]]:
    """One unit after the other in this process."""
    for unit in units:
        yield unit, run_unit(job, unit)


def processes(jobs: int) -> Runner:
    """Units in `jobs` processes beside this one, each with a model of its own."""

    def run(job: Job, units: list[Unit]) -> Iterator[tuple[Unit, list[Line]]]:
        if not units:
            return
        job = replace(job, threads=max(1, torch.get_num_threads() // jobs))
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
