"""Other libraries on the same examples, each in an environment of its own: kvpress and transformers' QuantizedCache.

A script beside this file reads a job (model, options, examples as token ids), and writes one line of JSON for every
example: nats and hits of every probe's answer or of a continuation, bytes held, seconds of the prefill. The question is
never visible when it compresses. Quality is compared with the peer's own uncompressed cache, its option `full`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstrata.bench.peers.environments import PeerError, environment
from kvstrata.core import InputError
from kvstrata.evaluate.runs import FULL, Answered, Outcome, figures, item, labelled
from kvstrata.evaluate.task import Example, Kind
from kvstrata.policy.spec import split_specs

HERE = Path(__file__).parent
OPTIONS = {"kvpress": {"press": "SnapKVPress"}, "quantized": {"backend": "quanto", "bits": "4"}}
PACKAGES = {"kvpress": ("kvpress",), "quantized": ("optimum-quanto", "hqq")}
KINDS: tuple[Kind, ...] = ("probes", "steps")
FIGURES = ("nll", "token_accuracy", "exact")  # that can be read off a peer


def parse(text: str, budgets: Sequence[str]) -> list[tuple[str, str | None]]:
    """Peers by commas -> (peer, budget). A press takes every budget in per cent; each stack's full cache comes first.

    Raises `InputError` for an unknown peer or option.
    """
    found: list[tuple[str, str | None]] = []
    for spec in split_specs(text):
        name, options = read(spec)
        found.append((f"{name}:{FULL}", None))
        if name == "kvpress" and FULL not in options:
            found += [(spec, budget) for budget in budgets if budget.endswith("%")]
        else:
            found.append((spec, None))
    return list(dict.fromkeys(found))


def read(spec: str) -> tuple[str, dict[str, str]]:
    """A peer's name and options, with its own defaults where none are given."""
    name, _, rest = spec.partition(":")
    if name not in OPTIONS:
        raise InputError(f"no peer named {name!r} to evaluate; there are: {', '.join(OPTIONS)}")
    if rest == FULL:
        return name, {"full": FULL}
    options = dict(OPTIONS[name])
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in options:
            raise InputError(f"peer {spec!r}: {key!r} is not an option of {name}; its options: {', '.join(options)}")
        options[key] = value
    return name, options


def run_peer(
    spec: str, budget: str | None, model: str, dtype: str, kind: Kind, examples: Sequence[Example]
) -> Iterator[Outcome]:
    """Outcomes of a peer as it gives them. Raises `PeerError` if it cannot be installed or breaks down."""
    name, options = read(spec)
    job: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "kind": kind,
        "share": 1.0 if budget is None else _share_of_prompt(budget, examples, kind),
        "packages": [] if options.get("full") else PACKAGES[name],
        "examples": [
            {
                "name": example.name,
                "context": example.context,
                "probes": [{"question": p.question, "answer": p.answer} for p in example.probes],
                "continuation": example.continuation,
            }
            for example in examples
        ],
        **options,
    }
    with tempfile.TemporaryDirectory(prefix="kvstrata-peer-") as scratch:
        file, log = Path(scratch) / "job.json", Path(scratch) / "log"
        file.write_text(json.dumps(job))
        with log.open("w") as errors:
            process = subprocess.Popen(
                [environment(name), HERE / f"score_{name}.py", file], stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            try:
                for line, example in zip(process.stdout, examples, strict=False):
                    yield _outcome(json.loads(line), example, kind, labelled(spec, budget))
            finally:
                process.stdout.close()
                code = process.wait()
        if code:
            raise PeerError(f"peer {spec} stopped (exit code {code}): {' / '.join(log.read_text().splitlines()[-3:])}")


def _share_of_prompt(budget: str, examples: Sequence[Example], kind: Kind) -> float:
    """What a press must keep of the prompt so that `budget` of the full cache is held on average, with what follows."""
    asked = float(budget.removesuffix("%")) / 100
    if kind == "probes":
        return asked
    context, steps = max((len(e.context), len(e.continuation)) for e in examples)
    share = asked - (1 - asked) * steps / (2 * context)
    if share <= 0:
        raise InputError(f"{budget} of the bytes do not hold the {steps} tokens that a press keeps after the prompt")
    return share


def _outcome(line: dict[str, Any], example: Example, kind: Kind, resolved: str) -> Outcome:
    answered: list[Answered] = line["answers"]
    found = figures(answered)
    values = found if kind == "probes" else {"nll": found["nll"]}
    tags = [probe.tags for probe in example.probes] or [{}]
    pairs = zip(tags, answered, strict=True)
    items = [{**item(tag, one), "prefill_s": line["prefill_s"]} for tag, one in pairs]
    held, full = int(line["held"]), int(line["full"])
    ms, where = line["ms_per_token"], str(line["where"])
    return Outcome(example.name, values, held, held, held, full, ms, items, resolved=resolved, where=where)
