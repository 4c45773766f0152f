"""`kvstrata bench`: how fast this machine reads memory, how near the kernels come, and what a model decodes at."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvstrata
from kvstrata.bench.decode import Row, Turns, check_peers, run_case, run_reference
from kvstrata.bench.kernels import EXACT, FORMATS
from kvstrata.bench.measure import provenance
from kvstrata.bench.peers import PeerSpec, parse_peers
from kvstrata.bench.prefill import prefill_times
from kvstrata.bench.roofline import Figure, Roofline, draw, measure, torch_threads
from kvstrata.cli.estimate import read_tokens
from kvstrata.cli.tables import MIB, plain_table, progress_bar
from kvstrata.core import InputError
from kvstrata.files import whole
from kvstrata.hf.models import load_model, parse_dtype
from kvstrata.policy import parse_policy
from kvstrata.policy.spec import split_specs


def bench(
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    policy: Annotated[str, typer.Option(help="Policies, by commas; the full cache is always added.")] = "full",
    batch: Annotated[str, typer.Option(help="Rows, by commas.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens of the prompt, by commas: 2048, 8k.")] = "2k",
    peers: Annotated[str, typer.Option(help="What to compare with, by commas; see the documentation.")] = "hf,repaired",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each in a round.")] = 4,
    prefill: Annotated[
        int, typer.Option(min=0, help="Times that every policy reads the prompt anew, for its time.")
    ] = 0,
    limit: Annotated[float, typer.Option(min=0, help="Seconds after which no case starts another round.")] = 300,
    kernels_only: Annotated[bool, typer.Option("--kernels-only", help="Measure kernels, no model.")] = False,
    decode_only: Annotated[bool, typer.Option("--decode-only", help="Measure the model, no kernels.")] = False,
    mib: Annotated[int, typer.Option(min=1, help="MiB of pages for each kernel.")] = 128,
    prompt_file: Annotated[Path | None, typer.Option(help="Text to read; default: kvstrata's own source.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: torch's.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write figures as JSON to this file too.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the kernels' roofline into this PNG or SVG.")] = None,
) -> None:
    """Measure kernels against this machine's memory, then decoding against other caches and engines; exit 1 if wrong.

    Nothing that fails its check gets a ratio.
    """
    if kernels_only and decode_only:
        raise InputError("give --kernels-only or --decode-only, not both")
    if picture and decode_only:
        raise InputError("--picture draws the kernels: leave out --decode-only")
    parse_dtype(dtype)
    work = _read_work(policy, batch, context, peers, Turns(rounds, steps, limit, prefill))
    check_peers(work.peers, model, device)
    console = Console(stderr=as_json)
    record: dict[str, Any] = {"model": model or "demo", "dtype": dtype, "device": device, **provenance()}
    with torch_threads(threads or torch.get_num_threads()):
        record["threads"] = torch.get_num_threads()
        if not decode_only:
            record["kernels"] = _kernels(console, torch.device(device), dtype, mib, rounds + 2, picture)
        if not kernels_only:
            lm, tokenizer = load_model(model, dtype, device, Console(stderr=True))
            ids = _ids(tokenizer, prompt_file, max(work.contexts)).to(device)
            record |= {"dtype": str(lm.dtype), **_decode(console, lm, ids, work)}
    if out:
        _write(out, json.dumps(record, indent=2) + "\n")
    if as_json:
        print(json.dumps(record, indent=2))
    if not _passed(record):
        raise typer.Exit(1)


def _passed(record: dict[str, Any]) -> bool:
    rows = [row for case in record.get("decode", []) for row in case["rows"]]
    return all(part["passed"] for part in [*rows, record.get("kernels", {"passed": True})])


@dataclass(frozen=True, slots=True)
class _Work:
    """What to decode: after how many tokens, in how many rows, under which policies, beside what, and for how long."""

    contexts: list[int]
    batches: list[int]
    policies: list[str]
    peers: list[PeerSpec]
    turns: Turns


def _read_work(policy: str, batch: str, context: str, peers: str, turns: Turns) -> _Work:
    """Read options that are lists; raises an error of ours for one that means nothing."""
    contexts, batches = ([read_tokens(part) for part in text.split(",")] for text in (context, batch))
    policies = split_specs(policy)
    for spec in policies:
        parse_policy(spec)
    return _Work(contexts, batches, policies, parse_peers(peers) if peers else [], turns)


def _kernels(
    console: Console, device: torch.device, dtype: str | None, mib: int, rounds: int, picture: Path | None
) -> dict[str, Any]:
    formats = [name for name in FORMATS if dtype is None or name == dtype or name not in EXACT]
    most = torch.get_num_threads() if device.type == "cpu" else 1
    with _progress("kernels") as tell:
        found = measure(device, formats=formats, threads=sorted({1, most}), mib=mib, rounds=rounds, tick=tell)
    _print_kernels(console, found)
    if picture:
        draw(found, picture)
    return {**asdict(found), "passed": found.passed}


def _decode(console: Console, model: PreTrainedModel, ids: Tensor, work: _Work) -> dict[str, Any]:
    made: list[dict[str, Any]] = []
    for tokens in work.contexts:
        with ExitStack() as stack:
            with _progress(f"{tokens} tokens") as tell:
                steps = work.turns.most_steps
                part, batches = ids[:, :tokens], work.batches
                reference = run_reference(model, part, work.policies, steps, tell, stack=stack, batches=batches)
                prompts: dict[str, float] = {}
                if work.turns.prefill:
                    names = [spec.name for spec in work.peers if spec.name == "hf"] + [*reference.logits]
                    prompts = prefill_times(model, part, names, work.turns.prefill, tell)
            for batch in work.batches:
                with _progress(f"{batch} x {tokens} tokens") as tell:
                    rows = run_case(model, reference, batch, work.peers, work.turns, tell)
                rows = [replace(row, prefill_s=prompts.get(row.name, row.prefill_s)) for row in rows]
                made.append({"context": tokens, "batch": batch, "rows": [_record(row) for row in rows]})
                _print_decode(console, rows, f"{model.dtype}, {batch} x {tokens} tokens".removeprefix("torch."))
    return {**asdict(work.turns), "decode": made}


@contextmanager
def _progress(title: str) -> Generator[Callable[[str], object]]:
    """What shows, on standard error, what is being done: in place on a terminal, else line by line."""
    with progress_bar() as progress:
        task = progress.add_task(title, total=None)

        def tell(doing: str) -> None:
            progress.update(task, description=f"{title}: {doing}")
            if not progress.console.is_terminal:
                progress.console.print(f"{title}: {doing}", highlight=False)

        yield tell


def _ids(tokenizer: PreTrainedTokenizerBase, file: Path | None, tokens: int) -> Tensor:
    """Ids [1, tokens] of a text; of this package's own source if none is given."""
    try:
        files = [file] if file else sorted(Path(kvstrata.__file__).parent.rglob("*.py"))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --prompt-file {file}: {error}") from error
    ids = cast(Tensor, tokenizer(text, return_tensors="pt", verbose=False)["input_ids"])
    if ids.shape[1] < tokens:
        raise InputError(f"the text has {ids.shape[1]} tokens of {tokens}: give a longer --prompt-file")
    return ids[:, :tokens]


def _write(path: Path, text: str) -> None:
    with whole(path) as scratch:
        scratch.write_text(text)


def _record(row: Row) -> dict[str, Any]:
    figures = asdict(row)
    return {**figures, "ms_per_step": row.ms_per_step, "tokens_per_s": row.tokens_per_s, "passed": row.passed}


def _print_kernels(console: Console, found: Roofline) -> None:
    rates = ", ".join(f"{rate:.1f} GB/s with {n} thread{'s' * (n > 1)}" for n, rate in found.bandwidth.items())
    console.print(f"memory gives {rates}; a matrix product {found.gflops:.0f} GFLOP/s", highlight=False)
    for shape, threads in dict.fromkeys((figure.shape, figure.threads) for figure in found.figures):
        table = plain_table(f"{shape}, {threads} thread{'s' * (threads > 1)}")
        table.add_column("kernel")
        for head in ("GB/s", "share\n%", "ns/key", "error", "allowed", "mass\nerror", ""):
            table.add_column(head, justify="right")
        for figure in found.figures:
            if (figure.shape, figure.threads) == (shape, threads):
                table.add_row(*_cells(figure))
        console.print(table)


def _cells(figure: Figure) -> list[str]:
    errors = figure.errors
    speed = ["", "", ""]
    if figure.gb_s is not None and figure.share is not None and figure.ns_per_key is not None:
        speed = [f"{figure.gb_s:.1f}", f"{figure.share:.0%}".rstrip("%"), f"{figure.ns_per_key:.1f}"]
    verdict = "[green]ok" if errors.passed else "[red]FAILED"
    mass = "" if errors.mass is None else f"{errors.mass:.0e}"
    name = f"{figure.kernel} {figure.format}{' + mass' * figure.mass}"
    return [name, *speed, f"{errors.out:.0e}", f"{errors.out_allowed:.0e}", mass, verdict]


def _print_decode(console: Console, rows: list[Row], title: str) -> None:
    table = plain_table(f"decode, {title}; ratios are of tokens/s")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    timed = any(row.prefill_s is not None for row in rows)
    for head in ("MiB", *["prompt\ns"] * timed, "step\nms", "tokens\n/s", "over\nhf", "over\nrepaired", "agrees"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        ratios = ["" if r is None else f"{r:.2f}x" for r in (row.over_hf, row.over_repaired)]
        prompt = ["" if row.prefill_s is None else f"{row.prefill_s:.2f}"] * timed
        speed = [f"{row.ms_per_step:.1f}", f"{row.tokens_per_s:.1f}"]
        table.add_row(row.name, f"{row.cache_bytes / MIB:.1f}", *prompt, *speed, *ratios, _agreement(row))
    console.print(table)
    for row in rows:
        if row.glue_share is not None:
            share = f"{row.glue_share:.1%} of a step is kvstrata's outside attention"
            console.print(f"{row.name}: {share}", highlight=False)
        if row.check and not row.check.passed:
            why = f"logits differ by {row.check.difference:.2g} where {row.check.allowed:.2g} is allowed"
            why += "" if row.check.same_tokens else ", and other tokens are chosen"
            console.print(f"{row.name}: {why}, so no ratio is given", highlight=False)


def _agreement(row: Row) -> str:
    if row.check:
        return "[green]yes" if row.check.passed else "[red]NO"
    return "" if row.tokens_alike is None else f"{row.tokens_alike} tokens"
