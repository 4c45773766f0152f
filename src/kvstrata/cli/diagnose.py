"""`kvstrata diagnose`: what a policy misses later, what comes back, how restless it is, what confidence tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.bench.measure import provenance
from kvstrata.cli.tables import plain_table, progress_bar
from kvstrata.core import InputError
from kvstrata.diagnose import measure, plots
from kvstrata.diagnose.confidence import own_words
from kvstrata.diagnose.drift import Band
from kvstrata.diagnose.isolation import variants
from kvstrata.evaluate.texts import digest, haystack, stretches
from kvstrata.files import whole
from kvstrata.hf.models import load_model
from kvstrata.policy import parse_policy
from kvstrata.policy.spec import split_specs

OWN_PROMPT = 64  # tokens of a stretch that the model goes on from with --own-words


def diagnose(
    what: Annotated[str, typer.Argument(help=f"One or more of {', '.join(measure.KINDS)}, by commas.")],
    policy: Annotated[str, typer.Option(help="Policies, by commas.")] = "qevict:budget=20%",
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the demo model, SmolLM2-135M.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to read; default: a novel's last chapters.")] = None,
    documents: Annotated[int, typer.Option(min=1, help="Stretches of the text.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each stretch before the first step.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are fed one by one after these.")] = 256,
    every: Annotated[int, typer.Option(min=1, help="Steps between two events.")] = 8,
    window: Annotated[int, typer.Option(min=1, help="Tokens of a window.")] = 8,
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that do not count.")] = 5,
    local: Annotated[int, typer.Option(min=0, help="Newest tokens that do not compete.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="Steps that the confidence test looks at.")] = 1200,
    own: Annotated[bool, typer.Option("--own-words", help="Confidence test on what the model writes itself.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sampled steps.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for JSON and pictures.")] = Path("diagnosed"),
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Say why a policy loses what it loses, next to a full cache over the same text."""
    kinds, specs = _kinds(what), split_specs(policy)
    if own and length + steps <= OWN_PROMPT:
        raise InputError(
            f"--own-words continues {OWN_PROMPT} tokens of each stretch: give a larger --length or --steps"
        )
    for spec in specs:
        parse_policy(spec)
    source = haystack(text)
    loaded, tokenizer = load_model(model, dtype, device, Console(stderr=True))
    fix = "give fewer --documents, a smaller --length or --steps, or a longer --text"
    texts = stretches(tokenizer, source, documents, length + steps, fix)
    band = Band(sinks, local, window)
    asked = _Asked(kinds, specs, length, steps, every, samples, own, seed)
    figures, found = _measured(loaded, tokenizer, texts, asked, band)
    settings = {"policy": specs, "documents": documents, "length": length, "steps": steps, "every": every}
    about = {**provenance(), **settings, "window": window, "sinks": sinks, "local": local, "text": digest(source)}
    for kind, values in figures.items():
        with whole(out / f"{kind}.json") as scratch:
            scratch.write_text(json.dumps({**about, kind: values}, indent=1))
        drawn = values[specs[0]] if kind == "isolation" else values
        plots.draw(kind, drawn, found, band, out / f"{kind}.png")
    if as_json:
        print(json.dumps({**about, **figures}))
        return
    console = Console()
    for kind, values in figures.items():
        console.print(_table(kind, values))
    console.print(f"{out}: JSON and pictures of {', '.join(figures)}", highlight=False)


class _Asked(NamedTuple):
    """What to measure on every text."""

    kinds: list[str]
    specs: list[str]
    length: int
    steps: int
    every: int
    samples: int
    own: bool
    seed: int


def _measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[list[int]], asked: _Asked, band: Band
) -> tuple[dict[str, Any], measure.Traces]:
    """Figures by diagnostic, and the traces of those that have any."""
    kinds, specs, length = asked.kinds, asked.specs, asked.length
    found, figures = measure.Traces(), dict[str, Any]()
    drifts, fed = [kind for kind in kinds if kind in measure.DRIFT], asked.steps * len(texts)
    work = (fed * (len(specs) + 1) if drifts else 0) + (asked.samples if "confidence" in kinds else 0)
    work += fed * len(specs) if "isolation" in kinds else 0
    for spec in specs if "isolation" in kinds else []:
        variants(spec)  # so that a policy without any is refused now
    with progress_bar() as progress:
        task = progress.add_task("feeding", total=work)

        def tick() -> None:
            progress.advance(task)

        if drifts:
            found = measure.traces(model, specs, texts, length, asked.every, tick, tokenizer)
        for kind in drifts:
            how = {"fmm": measure.missed, "churn": measure.restless, "reactivation": measure.reactivated}[kind]
            figures[kind] = how(found, band)
        if "confidence" in kinds:
            read = texts
            if asked.own:
                read = [own_words(model, ids[:OWN_PROMPT], len(ids) - OWN_PROMPT) for ids in texts]
            figures["confidence"] = measure.told(model, read, asked.samples, asked.seed, tick)
        for spec in specs if "isolation" in kinds else []:
            figures.setdefault("isolation", {})[spec] = measure.isolated(model, spec, texts, length, tick)
    return figures, found


def _kinds(what: str) -> list[str]:
    kinds = [kind.strip() for kind in what.split(",")]
    for kind in kinds:
        if kind not in measure.KINDS:
            raise InputError(f"no diagnostic named {kind!r}: there are {', '.join(measure.KINDS)}")
    return kinds


def _table(kind: str, values: dict[str, Any]) -> Table:
    titles = {
        "fmm": "share of coming attention that can no longer be read, by steps ahead",
        "churn": "share of windows that change between two events",
        "reactivation": "share of left-out windows that come back",
        "confidence": "confidence against the KL of hiding a part of the past",
        "isolation": "nats per token above the full cache, with other victims at the same steps",
    }
    table = plain_table(titles[kind])
    if kind == "confidence":
        for head in ("hidden", "KL", "Pearson", "of log KL", "Spearman", "95 %"):
            table.add_column(head)
        for name, r in values["ablations"].items():
            low, high = r["spearman_interval"]
            cells = (f"{r['mean_kl']:.2f}", *(_two(r[key]) for key in ("pearson", "pearson_log", "spearman")))
            table.add_row(name, *cells, f"{_two(low)} to {_two(high)}")
        return table
    table.add_column("policy")
    table.add_column("of")
    table.add_column("mean and 95 % over documents")
    for policy, rows in values.items():
        for name, row in rows.items():
            over = row["above_full"] if kind == "isolation" else row
            more = f"; {row['rescued']} of {row['eligible']}" if kind == "reactivation" else ""
            more += f"; evicts at {row['evicting_share']:.0%} of steps" if kind == "isolation" else ""
            mean = row["rate"] if kind == "reactivation" else over["mean"]
            table.add_row(policy, name, f"{_three(mean)} ({_three(over['low'])} to {_three(over['high'])}){more}")
    return table


def _two(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"


def _three(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"
