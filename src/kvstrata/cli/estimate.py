"""`kvstrata estimate`: bytes and time of policies on a model, before anything is run."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from kvstrata.bench.estimate import Estimate, Shell, Workload, estimate_bytes, measure_times, verdict
from kvstrata.bench.measure import provenance
from kvstrata.cache.report import human_bytes, passed_through_lines
from kvstrata.cli.tables import plain_table, progress_bar
from kvstrata.core import InputError
from kvstrata.hf.models import load_config, parse_dtype
from kvstrata.policy import parse_policy
from kvstrata.policy.spec import split_specs


def estimate(
    policy: Annotated[str, typer.Option(help="Policies, by commas; the full cache is always added.")] = "h2o",
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    context: Annotated[str, typer.Option(help="Tokens of the prompt: 4096, 32k, 1M.")] = "4096",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 160,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    chunk: Annotated[int | None, typer.Option(min=1, help="Feed the prompt in chunks of this many tokens.")] = None,
    time: Annotated[bool, typer.Option(help="Measure a few layers with random weights for times.")] = True,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Say what policies will cost and save on a model: exact bytes, and times from a few layers of random weights."""
    given = parse_dtype(dtype)
    work = Workload(read_tokens(context), new_tokens, batch, chunk)
    specs = ["full", *(spec for spec in split_specs(policy) if spec != "full")]
    policies = [parse_policy(spec) for spec in specs]
    config = load_config(model, Console(stderr=True))
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    kind = given or (torch.float32 if device == "cpu" else own)
    shell = Shell(config, kind, device)
    times: list[tuple[float | None, float | None]] = [(None, None)] * len(specs)
    with progress_bar() as progress:
        task = progress.add_task("counting", total=len(specs) * (3 if time else 1))
        bills = [(estimate_bytes(shell, p, work), progress.advance(task))[0] for p in policies]
        if time:
            progress.update(task, description="measuring")
            most = [bill for bill, _ in bills]
            times = [*measure_times(shell, policies, most, work, lambda: progress.advance(task))]
    rows = [Estimate(s, most, least, *t) for s, (most, least), t in zip(specs, bills, times, strict=True)]
    if as_json:
        print(json.dumps({**_about(model, shell, work), "rows": [_record(row, rows[0]) for row in rows]}, indent=2))
    else:
        _print(Console(), shell, work, rows)


def read_tokens(text: str) -> int:
    """4096, 32k (32 * 1024) or 1M; raises `InputError` for anything else."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if found is None or int(found[1]) == 0:
        raise InputError(f"--context {text!r}: write a number of tokens such as 4096, 32k or 1M")
    return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2].lower()]


def _about(model: str | None, shell: Shell, work: Workload) -> dict[str, Any]:
    return {
        "model": model or "demo",
        "dtype": str(shell.dtype),
        "device": shell.device,
        **asdict(work),
        "weight_bytes": shell.weight_bytes,
        "full_token_bytes": shell.shape.token_bytes,
        "passed_through": shell.passed_through,
        **provenance(),
    }


def _record(row: Estimate, full: Estimate) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "live_bytes_after_prompt": row.bytes.after_prompt.live,
        "live_bytes": row.bytes.at_end.live,
        "held_bytes": row.bytes.at_end.held,
        "peak_held_bytes": row.bytes.peak.held,
        "least_held_bytes": row.least.at_end.held,
        "share_of_full": row.bytes.at_end.held / full.bytes.at_end.held,
        "prefill_s": row.prefill_s,
        "ms_per_token": row.ms_per_token,
    }


def _print(console: Console, shell: Shell, work: Workload, rows: list[Estimate]) -> None:
    title = (
        f"{work.batch} x {work.context} tokens of prompt, {work.new_tokens} new; {shell.dtype}; "
        f"weights {human_bytes(shell.weight_bytes)}, {human_bytes(shell.shape.token_bytes)} of cache a token"
    )
    table = plain_table(title)
    table.add_column("policy", no_wrap=True, overflow="ellipsis")
    for head in ("live", "held", "share\n%", "peak\nheld", "prefill\ns", "step\nms"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        live, held, peak = (human_bytes(n) for n in (row.bytes.at_end.live, row.bytes.at_end.held, row.bytes.peak.held))
        share = row.bytes.at_end.held / rows[0].bytes.at_end.held
        seconds = "" if row.prefill_s is None else f"{row.prefill_s:.1f}"
        step = "" if row.ms_per_token is None else f"{row.ms_per_token:.1f}"
        table.add_row(row.policy, live, held, f"{share * 100:.1f}", peak, seconds, step)
    console.print(table)
    for line in passed_through_lines(shell.passed_through):
        console.print(f"{line}: not counted here", highlight=False)
    for row in rows[1:]:
        if row.least != row.bytes:
            least = human_bytes(row.least.at_end.held)
            console.print(f"{row.policy}: at most; {least} held where every step is confident", highlight=False)
        for line in verdict(shell, rows[0], row, work):
            console.print(f"{row.policy}: {line}", highlight=False)
