"""`kvstrata calibrate`: numbers that a policy needs and a model's own text decides."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstrata.calibrate.tau import calibrate_tau, check_rate
from kvstrata.cli.tables import progress_bar
from kvstrata.evaluate.framing import encode
from kvstrata.evaluate.texts import read_text, stretches
from kvstrata.hf.models import load_model

app = typer.Typer(help="Find the numbers of a policy on a model and a text.", no_args_is_help=True)


@app.callback()
def calibrate() -> None:
    """Find the numbers of a policy on a model and a text."""


@app.command()
def tau(
    text: Annotated[list[Path], typer.Option(help="A text file; may be given several times.")],
    rate: Annotated[float, typer.Option(help="Share of steps that shall count as sure.")] = 0.42,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Stretches of each text.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a stretch.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Find CONF-KV's tau: the confidence that a share of the steps reaches on this model and text."""
    check_rate(rate)
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    fix = "give fewer --documents, a smaller --length, or a longer --text"
    texts = [encode(tokenizer, read_text(file)) for file in text]
    parts = [part for ids in texts for part in stretches(ids, documents, length, fix)]
    with progress_bar() as progress:
        task = progress.add_task("reading", total=len(parts))
        found = calibrate_tau(loaded, parts, rate, lambda: progress.advance(task))
    if as_json:
        print(json.dumps(asdict(found)))
        return
    quantiles = ", ".join(f"{name} {value}" for name, value in found.quantiles.items())
    print(f"tau={found.tau}: {found.rate:.1%} of {found.steps} steps are sure")
    print(f"confidence: {quantiles}")
    print(f"use it as --policy confkv:tau={found.tau}")
