"""`kvstrata calibrate`: numbers that a policy needs and a model's own text decides."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvstrata.calibrate.corpus import training_texts
from kvstrata.calibrate.heads import calibrate_heads, policy_for, write_heads
from kvstrata.calibrate.tau import calibrate_tau, check_rate
from kvstrata.cli.tables import progress_bar
from kvstrata.core import InputError
from kvstrata.evaluate.framing import encode
from kvstrata.evaluate.texts import read_text, stretches
from kvstrata.hf.models import load_model
from kvstrata.policy.budget import Share, parse_budget

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


@app.command()
def heads(
    out: Annotated[Path, typer.Option(help="The file to write, for heads=FILE.")],
    text: Annotated[list[Path] | None, typer.Option(help="A text file; may be given several times.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of docs/data.md: read its training side.")] = None,
    scorer: Annotated[str, typer.Option(help="A preset whose heads share one budget.")] = "echo",
    levels: Annotated[str, typer.Option(help="Shares of all entries to keep.")] = "5%,10%,25%,50%,75%",
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Stretches of each text.")] = 8,
    length: Annotated[int, typer.Option(min=64, help="Tokens of a stretch.")] = 2048,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the levels as JSON.")] = False,
) -> None:
    """Measure which layers and heads keep their entries, so that any policy can share its budget out like that."""
    shares = [_share(part) for part in levels.split(",")]
    for share in shares:
        policy_for(scorer, share)
    texts = {file.name: read_text(file) for file in text or []} | (training_texts(data) if data else {})
    if not texts:
        raise InputError("nothing to read: give --text FILE, or --data DIR with the files of docs/data.md")
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    fix = "give fewer --documents, a smaller --length, or a longer --text"
    parts = [part for whole in texts.values() for part in stretches(encode(tokenizer, whole), documents, length, fix)]
    with progress_bar() as progress:
        task = progress.add_task("reading", total=len(parts))
        found = calibrate_heads(loaded, scorer, parts, shares, lambda: progress.advance(task))
    write_heads(out, loaded, scorer, texts, found)
    if as_json:
        print(json.dumps({f"{float(share):g}": asdict(level) for share, level in found.items()}))
        return
    for share, level in found.items():
        flat = sorted(kept for layer in level.kept for kept in layer)
        print(f"{float(share):.0%} kept: heads keep {flat[0]:.1%} to {flat[-1]:.1%}; scores from {level.tau:.3g} on")
    print(f"use it as --policy {scorer.partition(':')[0]}-head:budget=25%,heads={out}, or under any other policy")


def _share(text: str) -> Fraction:
    budget = parse_budget(text)
    if not isinstance(budget, Share):
        raise InputError(f"level {text!r}: give a share of all entries, as 25%")
    return budget.fraction
