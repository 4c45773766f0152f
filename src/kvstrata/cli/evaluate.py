"""`kvstrata evaluate`: a grid of tasks, policies and budgets; `show` prints and draws what it found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from kvstrata.cli.tables import plain_table, progress_bar
from kvstrata.core import InputError
from kvstrata.evaluate.compare import Comparison, Row, comparisons, to_dict
from kvstrata.evaluate.cost import Cost, costs
from kvstrata.evaluate.figures import draw
from kvstrata.evaluate.grid import Asked, Job, ask
from kvstrata.evaluate.peers import parse as parse_peers
from kvstrata.evaluate.result import Results
from kvstrata.evaluate.run import Grid, Runner, here, plan, processes, run_grid, run_peers
from kvstrata.evaluate.task import SCOPES, Metric, Scope, Settings, Task, choose
from kvstrata.evaluate.worker import worker
from kvstrata.policy.spec import split_specs

FOLDER = Path("kvstrata-results")
LEGEND = (
    "a..b: 95 % bootstrap interval over contexts; +: above the full cache's\n"
    "ms: a row's share of a step in a batch of (so many) rows"
)
app = typer.Typer(help="Evaluate policies on tasks, or show what was found.", invoke_without_command=True)


@app.callback()
def evaluate(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    policy: Annotated[str, typer.Option(help="Policies, by commas; full and random always run too.")] = "h2o,snapkv",
    budget: Annotated[
        str,
        typer.Option(help="Budgets, by commas: 25% of the full cache's held bytes (--lm-eval: tokens), 256 tokens."),
    ] = "50%,25%",
    task: Annotated[str, typer.Option(help="Tasks, by commas; ruler-* for all that begin so.")] = "needle",
    scope: Annotated[str, typer.Option(help="context: asked after compression; prompt: before.")] = "context",
    contexts: Annotated[int | None, typer.Option(min=1, help="Examples of each task; default: the task's own.")] = None,
    length: Annotated[int | None, typer.Option(min=64, help="Tokens of a context; --lm-eval: at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws other examples.")] = 0,
    haystack: Annotated[Path | None, typer.Option(help="A text to hide things in, and to continue.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data that is not shipped; see docs/data.md.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Contexts read as rows of one batch.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with a model of its own.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Run on a Ray cluster: its address, auto, or local.")] = None,
    peer: Annotated[str, typer.Option("--peers", help="Other libraries, by commas: kvpress:press=SnapKVPress.")] = "",
    lm_eval: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, by commas, instead of ours.")] = "",
    controls: Annotated[bool, typer.Option(help="Run random at every budget.")] = True,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    kernels: Annotated[str, typer.Option(help="auto, native, triton, reference or exact.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of results; what is finished there is not run again.")] = FOLDER,
    dry_run: Annotated[bool, typer.Option(help="Print what it would cost, run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Run every task under every policy and budget that is not finished in --out, then show the tables."""
    if context.invoked_subcommand:
        return
    budgets = _listed(budget)
    if scope not in SCOPES:
        raise InputError(f"--scope {scope}: choose context or prompt")
    job = Job(model, dtype, device, kernels, Settings(contexts, length, seed, haystack, data), batch)
    asked = ask(split_specs(policy), budgets, controls)
    if lm_eval:
        if dry_run or peer or ray or jobs > 1:
            raise InputError("--lm-eval runs in this process: leave out --dry-run, --peers, --ray and --jobs")
        _lm_eval(job, _listed(lm_eval), asked, out / "lm_eval", as_json)
        return
    beside = [Asked(*one) for one in parse_peers(peer, budgets)]
    if beside and device != "cpu":
        raise InputError(f"--peers run on the CPU, so their times and ours on {device} cannot stand in one table")
    _own(
        job, Results(out), choose(_listed(task)), asked, scope, beside, None if dry_run else _runner(jobs, ray), as_json
    )


def _own(
    job: Job,
    results: Results,
    tasks: dict[str, Task],
    asked: list[Asked],
    scope: Scope,
    beside: list[Asked],
    runner: Runner | None,
    as_json: bool,
) -> None:
    """Run our own tasks and show their tables; without a runner show what they would cost."""
    with results.writing():
        grid = plan(worker(job), results, tasks, asked, scope, beside)
        if runner is None:
            _print_costs(costs(worker(job), grid), as_json)
            return
        _run(grid, results, runner)
    wanted = {(name, run.key) for name in tasks for run in grid.runs.values()}
    cells = [cell for cell in results.cells() if (cell.task, cell.run.key) in wanted]
    _print_tables(comparisons(cells), as_json)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _runner(jobs: int, ray: str | None) -> Runner:
    if ray is None:
        return here if jobs == 1 else processes(jobs)
    from kvstrata.evaluate.cluster import cluster

    return cluster(None if ray == "local" else ray)


def _run(grid: Grid, results: Results, runner: Runner) -> None:
    console = Console(stderr=True)
    if grid.finished:
        console.print(
            f"{grid.finished} cells are finished in {results.folder}, {len(grid.work)} units of work are left"
        )
    with progress_bar(MofNCompleteColumn()) as progress:
        bar = progress.add_task("units", total=len(grid.work))
        run_grid(grid, results, runner, lambda count: progress.advance(bar, count))
    run_peers(grid, worker(grid.job), results, console.print)


def _lm_eval(job: Job, names: list[str], asked: list[Asked], folder: Path, as_json: bool) -> None:
    """Run tasks of the harness under every policy; those with local data where --data is given."""
    from kvstrata.evaluate.harness import run_lm_eval

    found = run_lm_eval(names, asked, job, folder)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
        return
    table = plain_table(
        f"lm-evaluation-harness, {job.settings.contexts or 'all'} examples of each task; questions visible "
        "when compressing; % asked of the tokens"
    )
    for head in ("task", "policy", "asked", "held\n%", "n", "metric", "value", "stderr"):
        table.add_column(head, no_wrap=head not in ("task", "metric"), overflow="fold")  # the harness's names are long
    for row in found:
        share = "" if row["share_held"] is None else f"{100 * row['share_held']:.1f}"
        table.add_row(
            *map(str, (row["task"], row["policy"], row["budget"] or "", share, row["n"], row["metric"])),
            f"{row['value']:.3f}",
            f"{row['stderr']:.3f}" if isinstance(row["stderr"], float) else "",
        )
    Console().print(table)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")] = FOLDER,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw pictures into, PNG and SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Print the tables of a folder of results, and with --figures draw them."""
    results = Results(folder)
    found = comparisons(results.cells())
    _print_tables(found, as_json)
    if figures is not None:
        paths = [path for comparison in found for path in draw(comparison, results, figures)]
        Console(stderr=True).print(f"wrote {len(paths)} pictures to {figures}")


def _print_tables(found: list[Comparison], as_json: bool) -> None:
    if as_json:
        print(json.dumps([to_dict(comparison) for comparison in found], indent=2))
        return
    for comparison in found:
        Console().print(_table(comparison))


def _table(comparison: Comparison) -> Table:
    table = plain_table(f"{comparison.title}\n{LEGEND}")
    table.add_column("policy", no_wrap=True, overflow="ellipsis")
    for head in ("asked", "held\n%", "live\n%", "ms"):
        table.add_column(head, justify="right", no_wrap=True)
    for metric in comparison.metrics:
        table.add_column(metric.name.replace("_", " "), no_wrap=True)
    for row in comparison.rows:
        cell = row.cell
        table.add_row(
            cell.run.policy,
            cell.run.budget or "",
            f"{100 * cell.share:.1f}",
            f"{100 * cell.live_bytes / cell.full_bytes:.1f}",
            "" if cell.ms_per_token is None else f"{cell.ms_per_token:.1f} ({cell.rows})",
            *(_shown(row, m, with_interval=m is comparison.metrics[0]) for m in comparison.metrics),
        )
    return table


def _shown(row: Row, metric: Metric, with_interval: bool) -> str:
    figure = row.figures[metric.name]
    if not figure.n:
        return "-"
    sign = "+" if metric.relative and not row.is_full else ""
    return f"{figure.mean:{sign}.3f}" + (f" {figure.low:.2f}..{figure.high:.2f}" if with_interval else "")


def _print_costs(found: list[Cost], as_json: bool) -> None:
    if as_json:
        print(json.dumps([cost.to_dict() for cost in found], indent=2))
        return
    table = plain_table("What is left to run; prompts are read once for all policies")
    for head in ("task", "policy", "examples", "tokens fed", "seconds"):
        table.add_column(head, justify="left" if head in ("task", "policy") else "right", no_wrap=True)
    for cost in found:
        table.add_row(cost.task, cost.policy, str(cost.examples), str(cost.tokens), f"{cost.seconds:.0f}")
    Console().print(table)
    total: Any = time.strftime("%H:%M:%S", time.gmtime(sum(cost.seconds for cost in found)))
    Console().print(f"about {total} in one process, measured from a short run of this model")
