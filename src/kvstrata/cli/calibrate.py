"""`kvstrata calibrate`: numbers that a policy needs and a model's own text decides."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.calibrate.construct import construct
from kvstrata.calibrate.corpus import named, training_texts
from kvstrata.calibrate.heads import calibrate_heads, policy_for, write_heads
from kvstrata.calibrate.kvzap import collect, train
from kvstrata.calibrate.polykv import Asked
from kvstrata.calibrate.polykv import collect as collect_signals
from kvstrata.calibrate.tau import calibrate_tau, check_rate
from kvstrata.cli.tables import progress_bar
from kvstrata.core import InputError
from kvstrata.evaluate.texts import read_text, stretches
from kvstrata.files import whole
from kvstrata.hf.compat import kv_shape, not_compressed, stock_layers, text_config
from kvstrata.hf.files import identity
from kvstrata.hf.models import load_model
from kvstrata.policy.budget import Share, parse_budget
from kvstrata.policy.strategy import pattern_rule, write_strategy
from kvstrata.policy.surrogate import write_surrogate

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
    parts = _stretches([read_text(file) for file in text], tokenizer, documents, length)
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
    scorer: Annotated[str, typer.Option(help="A preset whose heads share one budget, or duo.")] = "echo",
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
    texts = _texts(text, data)
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    parts = _stretches(texts.values(), tokenizer, documents, length)
    with progress_bar() as progress:
        task = progress.add_task("reading", total=len(parts))
        found = calibrate_heads(loaded, scorer, parts, shares, tokenizer, lambda: progress.advance(task))
    write_heads(out, loaded, scorer, texts, found)
    if as_json:
        print(json.dumps({f"{float(share):g}": asdict(level) for share, level in found.items()}))
        return
    for share, level in found.items():
        flat = sorted(kept for layer in level.kept for kept in layer)
        scores = "" if level.tau is None else f"; scores from {level.tau:.3g} on"
        print(f"{float(share):.0%} kept: heads keep {flat[0]:.1%} to {flat[-1]:.1%}{scores}")
    preset = scorer if scorer == "duo" else f"{scorer.partition(':')[0]}-head"
    print(f"use it as --policy {preset}:budget=25%,heads={out}, or under any other policy")


@app.command()
def kvzap(
    out: Annotated[Path, typer.Option(help="Folder for the surrogate; pairs go into its subfolder pairs.")],
    kind: Annotated[Literal["linear", "mlp"], typer.Option(help="A linear map or an MLP per layer.")] = "mlp",
    target: Annotated[
        Literal["kvzip+", "kvzip", "echo"], typer.Option(help="Whose scores it learns; echo needs no repetition.")
    ] = "kvzip+",
    text: Annotated[list[Path] | None, typer.Option(help="A text file; may be given several times.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of docs/data.md: read its training side.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Stretches of each text.")] = 10,
    length: Annotated[int, typer.Option(min=64, help="Tokens of a stretch.")] = 1000,
    per_document: Annotated[int, typer.Option(min=1, help="Tokens of each stretch that are kept.")] = 500,
    seed: Annotated[int, typer.Option(help="Of draws and of training.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print how well it fits as JSON.")] = False,
) -> None:
    """Train KVzap's surrogate on an oracle's scores; a run that was stopped goes on where it was."""
    texts = _texts(text, data)
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    _whole(loaded)
    parts = _stretches(texts.values(), tokenizer, documents, length)
    about: dict[str, object] = {
        "model": identity(loaded),
        "data": named(texts),
        "collected": {"documents": documents, "length": length, "per_document": per_document, "seed": seed},
    }
    if target != "kvzip+":
        about["target"] = target
    folder = out / "pairs"
    _same_pairs(folder / "about.json", about)
    with progress_bar() as progress:
        task = progress.add_task("collecting", total=len(parts))
        files = collect(loaded, tokenizer, parts, folder, per_document, seed, lambda: progress.advance(task), target)
        task = progress.add_task("training", total=text_config(loaded).num_hidden_layers)
        weights, fit = train(files, kind, seed, lambda: progress.advance(task))
    more = {**about, "thresholds": fit.thresholds, "r2": fit.r2, "auc": fit.auc}
    write_surrogate(out, [[w.half() for w in layer] for layer in weights], more)
    if as_json:
        print(json.dumps(asdict(fit)))
        return
    means = [sum(layer) / len(layer) for layer in fit.r2]
    print(f"R^2 {sum(means) / len(means):.3f} over layers, {min(means):.3f} to {max(means):.3f}; AUC {fit.auc:.3f}")
    print(
        "thresholds: " + ", ".join(f"{float(share):.0%} removed under {tau}" for share, tau in fit.thresholds.items())
    )
    print(f"use it as --policy kvzap:file={out},tau={fit.thresholds['0.75']}, or with budget=25%")


@app.command()
def polykv(
    out: Annotated[Path, typer.Option(help="The strategy file to write; signals go into a folder beside it.")],
    budget: Annotated[int, typer.Option(min=2, help="Tokens that a layer keeps on average.")] = 256,
    patterns: Annotated[str, typer.Option(help="Candidates.")] = "streaming,h2o,tova,snapkv,pyramidkv,scissorhands",
    signal: Annotated[Literal["cosine", "ppl"], typer.Option(help="What patterns are chosen by.")] = "cosine",
    allocation: Annotated[
        Literal["uniform", "entropy", "entropies", "ppl"], typer.Option("--allocate", help="What budgets follow.")
    ] = "uniform",
    margin: Annotated[float, typer.Option(help="By how much a layer's pattern must beat the best single one.")] = 0.0,
    turned: Annotated[bool, typer.Option("--inverse", help="The control: worst patterns, budgets turned.")] = False,
    decode: Annotated[bool, typer.Option(help="Choose for decoding too; else it keeps everything.")] = False,
    text: Annotated[list[Path] | None, typer.Option(help="A text file; may be given several times.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of docs/data.md: read its training side.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Stretches of each text.")] = 8,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a stretch's prompt.")] = 1024,
    continuation: Annotated[int, typer.Option(min=2, help="Tokens after it.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
) -> None:
    """Choose a pattern and a budget for each layer (PolyKV); a run that was stopped goes on where it was."""
    names = tuple(name.strip() for name in patterns.split(","))
    for name in names:
        pattern_rule(name, budget)
    asked = Asked(names, budget, ("prefill", "decode") if decode else ("prefill",))
    if decode and "ppl" in (signal, allocation):
        raise InputError("nats lost are measured for prompts only: with --decode take cosine, and another --allocate")
    wanted = ["cosine", "ppl"] if "ppl" in (signal, allocation) else ["cosine"]
    texts = _texts(text, data)
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    _whole(loaded)
    parts = _stretches(texts.values(), tokenizer, documents, length + continuation)
    read = named(texts)
    about: dict[str, object] = {"model": identity(loaded), "data": read, "asked": asdict(asked) | {"of": documents}}
    folder = out.with_suffix(".signals")
    _same_pairs(folder / "about.json", json.loads(json.dumps(about | {"length": length, "then": continuation})))
    with progress_bar() as progress:
        task = progress.add_task("measuring", total=len(parts) * len(wanted))
        signals = collect_signals(loaded, parts, continuation, asked, wanted, folder, lambda: progress.advance(task))
    config = text_config(loaded)
    shape = kv_shape(config)
    kind = {"name": type(loaded).__name__, "layers": config.num_hidden_layers, "kv_heads": shape and shape[0]}
    head = {"model": {**kind, "identity": identity(loaded)}, "signals": {"data": read}}
    strategy = construct(signals, budget, signal, allocation, head, margin=margin, turned=turned)
    write_strategy(out, strategy, _rounded(signals))
    counts = Counter(choice.pattern for choice in strategy.prefill)
    sizes = [choice.budget for choice in strategy.prefill]
    print("patterns: " + ", ".join(f"{name} in {n} layers" for name, n in counts.most_common()))
    print(f"budgets: {min(sizes)} to {max(sizes)} tokens, {sum(sizes) / len(sizes):g} on average")
    print(f"use it as --policy polykv:{out}; kvstrata ls {out} shows it")


def _rounded(value: Any) -> Any:
    """Numbers with five digits, in tables and lists."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_rounded(item) for item in cast("list[Any]", value)]
    return float(f"{value:.5g}")


def _whole(model: PreTrainedModel) -> None:
    """Raise `InputError` where some layers have no keys of their own to keep: the files count all layers."""
    config = text_config(model)
    if not_compressed(config, stock_layers(config)) or kv_shape(config) is None:
        raise InputError(f"{type(model).__name__} has layers that are not compressed, for which this is not built yet")


def _same_pairs(file: Path, about: dict[str, object]) -> None:
    """Raise `InputError` where pairs were collected there in another way; else note how."""
    if file.is_file() and json.loads(file.read_text()) != about:
        raise InputError(f"{file.parent} holds pairs of another model, text or size: give another --out, or delete it")
    with whole(file) as scratch:
        scratch.write_text(json.dumps(about))


def _texts(text: list[Path] | None, data: Path | None) -> dict[str, str]:
    texts = training_texts(data) if data else {}
    for file in text or []:
        if file.name in texts:
            raise InputError(
                f"--text {file}: another text is named {file.name} too; files say what they were made from"
            )
        texts[file.name] = read_text(file)
    if not texts:
        raise InputError("nothing to read: give --text FILE, or --data DIR with the files of docs/data.md")
    return texts


def _stretches(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, documents: int, length: int
) -> list[list[int]]:
    fix = "give fewer --documents, a smaller --length, or a longer --text"
    return [part for text in texts for part in stretches(tokenizer, text, documents, length, fix)]


def _share(text: str) -> Fraction:
    budget = parse_budget(text)
    if not isinstance(budget, Share):
        raise InputError(f"level {text!r}: give a share of all entries, as 25%")
    return budget.fraction
