"""`kvstrata doctor`: whether kvstrata runs a model rightly, proved on the model itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvstrata.bench.doctor import Diagnosis, diagnose
from kvstrata.bench.measure import provenance
from kvstrata.cache.report import passed_through_lines
from kvstrata.cli.tables import plain_table, progress_bar
from kvstrata.hf.models import load_model


def doctor(
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens to compare on.")] = 200,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Prove on a model that a full budget changes nothing, and name layers that are not compressed; exit 1 if not."""
    lm, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    ids = _ids(tokenizer, tokens).to(device)
    with progress_bar() as progress:
        task = progress.add_task("comparing", total=5)
        found = diagnose(lm, ids, lambda: progress.advance(task))
    if as_json:
        record: dict[str, Any] = {"model": model or "demo", "dtype": str(lm.dtype), "tokens": ids.shape[1]}
        checks = [{**asdict(check), "passed": check.passed} for check in found.checks]
        record |= {**asdict(found), "checks": checks, "passed": found.passed, **provenance()}
        print(json.dumps(record, indent=2))
    else:
        _print(Console(), found, lm.dtype, ids.shape[1])
    if not found.passed:
        raise typer.Exit(1)


def _ids(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Ids [1, tokens] of some text that is always at hand: this package's own."""
    text = files("kvstrata").joinpath("policy/spec.py").read_text(encoding="utf-8")
    ids = cast(Tensor, tokenizer(text, return_tensors="pt", verbose=False)["input_ids"])
    return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]


def _print(console: Console, found: Diagnosis, dtype: torch.dtype, tokens: int) -> None:
    table = plain_table(f"Logits over {tokens} tokens in {dtype}, full budget against transformers' own cache")
    for head in ("", "max |dlogit|", "error", "allowed", "greedy", ""):
        table.add_column(head)
    for check in found.checks:
        tokens_ = "same" if check.same_tokens else "[red]differ"
        verdict = "[green]ok" if check.passed else "[red]FAILED"
        table.add_row(
            check.name,
            f"{check.largest_difference:.2g}",
            f"{check.error:.2g}",
            f"{check.allowed:.2g}",
            tokens_,
            verdict,
        )
    console.print(table)
    console.print(
        f"errors are judged by {found.baseline}; exact kernels must agree bit for bit where sdpa runs", highlight=False
    )
    for line in passed_through_lines(found.passed_through):
        console.print(line, highlight=False)
    compressed = found.num_layers - len(found.passed_through)
    state = "[green]healthy[/]" if found.passed else "[red]not right: please report this[/]"
    console.print(f"{compressed} of {found.num_layers} layers can be compressed; {state}")
