"""Diagnostics over documents: figures with bootstrap intervals over the documents, as plain values for JSON."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.diagnose import drift
from kvstrata.diagnose.confidence import ABLATIONS, Sample, pearson, samples, spearman
from kvstrata.diagnose.drift import Band, Episodes
from kvstrata.diagnose.isolation import isolate
from kvstrata.diagnose.traces import Trace, trace
from kvstrata.evaluate.compare import interval

DRIFT = ("fmm", "reactivation", "churn")
KINDS = (*DRIFT, "confidence", "isolation")
HORIZONS = (8, 32, 64)  # steps after an event, for the mass that is missed
EPISODES = ((1, 8), (4, 8), (8, 8), (4, None))  # (events left out, events to come back in; None: ever)

Traces = dict[str, list[list[Trace]]]  # by policy, document and layer
Tick = Callable[[], object]


def traces(
    model: PreTrainedModel,
    policies: Sequence[str],
    documents: Sequence[Sequence[int]],
    prompt: int,
    every: int,
    tick: Tick,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Traces:
    """A trace of every document and layer under every policy."""
    found: Traces = defaultdict(list)
    for ids in documents:
        for policy, layers in trace(model, policies, ids, prompt, every, tick, tokenizer).items():
            found[policy].append(layers)
    return dict(found)


def missed(found: Traces, band: Band) -> dict[str, Any]:
    """FMM by policy and horizon: the mean over layers, over documents, with an interval over these."""
    return {
        policy: {
            str(horizon): _over(
                [_mean([drift.future_missed_mass(t, horizon, band.sinks) for t in doc]) for doc in docs]
            )
            for horizon in HORIZONS
        }
        for policy, docs in found.items()
    }


def restless(found: Traces, band: Band) -> dict[str, Any]:
    """Churn by policy: of kept and of exact windows, without and with the newest tokens' windows."""
    ways = {"kept": {}, "exact": {"exact": True}, "kept with newest": {"tail": True}}
    return {
        policy: {
            name: _over([_mean([drift.churn(t, band, **way) for t in doc]) for doc in docs])
            for name, way in ways.items()
        }
        for policy, docs in found.items()
    }


def reactivated(found: Traces, band: Band) -> dict[str, Any]:
    """Global LIR by policy, of its exact windows and of the best by a full cache's attention: a ratio of sums."""
    table: dict[str, Any] = {}
    for policy, docs in found.items():
        table[policy] = rows = {}
        for name, chosen in (("exact", drift.chosen_exact), ("oracle", drift.chosen_oracle)):
            tables = [[chosen(t, band) for t in doc] for doc in docs]
            for least, horizon in EPISODES:
                each = [[drift.reactivation(x, least, horizon) for x in doc] for doc in tables]
                total = _sum([episodes for doc in each for episodes in doc])
                key = f"{name}, m={least}, H={'any' if horizon is None else horizon}"
                by_document = [_sum(doc).rate for doc in each]
                layers = [_sum([doc[layer] for doc in each]).rate for layer in range(len(each[0]))]
                rows[key] = {
                    "rate": _number(total.rate),
                    **total._asdict(),
                    **_over(by_document),
                    "by_layer": [_number(x) for x in layers],
                }
    return table


def told(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], count: int, seed: int, tick: Tick
) -> dict[str, Any]:
    """Confidence against KL by ablation: Pearson, of log KL too, and Spearman, with intervals over samples."""
    found = samples(model, documents, count, seed=seed, tick=tick)
    return {"samples": [asdict(s) for s in found], "ablations": {name: _relation(found, name) for name in ABLATIONS}}


def _relation(found: Sequence[Sample], name: str) -> dict[str, Any]:
    c, kl = [s.confidence for s in found], [s.kl[name] for s in found]
    logs = [math.log(max(x, 1e-12)) for x in kl]
    figures = {
        "mean_kl": mean(kl),
        "pearson": pearson(c, kl),
        "pearson_log": pearson(c, logs),
        "spearman": spearman(c, kl),
    }
    rng, n, drawn = random.Random(0), len(found), list[float]()
    for _ in range(200 if n > 1 else 0):
        at = rng.choices(range(n), k=n)
        drawn.append(spearman([c[i] for i in at], [kl[i] for i in at]))
    drawn = sorted(x for x in drawn if x == x)
    ends = [drawn[int(0.025 * (len(drawn) - 1))], drawn[round(0.975 * (len(drawn) - 1))]] if drawn else [math.nan] * 2
    return {**{k: _number(v) for k, v in figures.items()}, "spearman_interval": [_number(x) for x in ends], "n": n}


def isolated(
    model: PreTrainedModel, policy: str, documents: Sequence[Sequence[int]], prompt: int, tick: Tick
) -> dict[str, Any]:
    """Nats per token of every variant, and above the full cache's with an interval over documents."""
    found = isolate(model, policy, documents, prompt, tick)
    full = {row.document: row.nats for row in found if row.variant == "full"}
    table: dict[str, Any] = {}
    for name in dict.fromkeys(row.variant for row in found):
        rows = [row for row in found if row.variant == name]
        table[name] = {
            "nats": mean(row.nats for row in rows),
            "above_full": _over([row.nats - full[row.document] for row in rows]),
            "evicted": sum(row.evicted for row in rows),
            "evicting_share": sum(row.evicting for row in rows) / sum(row.steps for row in rows),
        }
    return table


def _sum(episodes: Sequence[Episodes]) -> Episodes:
    return Episodes(sum(e.eligible for e in episodes), sum(e.rescued for e in episodes))


def _mean(values: Sequence[float]) -> float:
    numbers = [x for x in values if x == x]
    return mean(numbers) if numbers else float("nan")


def _over(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval over the documents that have a figure."""
    found = interval([x for x in values if x == x])
    return {key: _number(value) for key, value in asdict(found).items()}


def _number(x: float) -> float | None:
    """JSON has no NaN."""
    return None if isinstance(x, float) and not math.isfinite(x) else x
