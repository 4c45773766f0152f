"""Diagnostics over documents: figures with bootstrap intervals over the documents, as plain values for JSON."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvstrata.diagnose import drift
from kvstrata.diagnose.confidence import ABLATIONS, Sample, pearson, samples, spearman
from kvstrata.diagnose.drift import Band, Episodes
from kvstrata.diagnose.isolation import isolate
from kvstrata.diagnose.traces import Trace, trace
from kvstrata.evaluate.compare import LEVEL, RESAMPLES, interval, percentile

DRIFT = ("fmm", "reactivation", "churn")
KINDS = (*DRIFT, "confidence", "isolation")
HORIZONS = (8, 32, 64)  # steps after an event, for the mass that is missed
BINS = 8  # of confidence, with as many samples each
EPISODES = ((1, 8), (4, 8), (8, 8), (4, None))  # (events left out, events to come back in; None: ever)

T = TypeVar("T")
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
                by_document = [_sum(doc) for doc in each]
                total, (low, high) = _sum(by_document), resampled(by_document, lambda drawn: _sum(drawn).rate)
                layers = [_sum([doc[layer] for doc in each]).rate for layer in range(len(each[0]))]
                rows[f"{name}, m={least}, H={'any' if horizon is None else horizon}"] = {
                    "rate": _number(total.rate),
                    **total._asdict(),
                    **{"low": _number(low), "high": _number(high), "n": len(each)},
                    "by_layer": [_number(x) for x in layers],
                }
    return table


def told(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], count: int, seed: int, tick: Tick
) -> dict[str, Any]:
    """Confidence against KL by ablation: Pearson, of log KL too, and Spearman with an interval over documents."""
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
    documents: dict[int, list[Sample]] = defaultdict(list)
    for sample in found:
        documents[sample.document].append(sample)

    def of(drawn: Sequence[list[Sample]]) -> float:
        pooled = [sample for document in drawn for sample in document]
        return spearman([s.confidence for s in pooled], [s.kl[name] for s in pooled])

    ends = resampled(list(documents.values()), of, times=200)
    rows = {**{k: _number(v) for k, v in figures.items()}, "spearman_interval": [_number(x) for x in ends]}
    return {**rows, "by_confidence": _binned(c, kl), "n": len(found), "documents": len(documents)}


def _binned(c: Sequence[float], kl: Sequence[float]) -> list[dict[str, float]]:
    """Means of equally many samples each, from the least confidence to the most."""
    order = sorted(range(len(c)), key=lambda i: c[i])
    size = max(1, len(order) // BINS)
    parts = [order[at : at + size] for at in range(0, size * min(BINS, len(order)), size)]
    return [{"confidence": mean(c[i] for i in part), "kl": mean(kl[i] for i in part)} for part in parts]


def resampled(
    documents: Sequence[T], figure: Callable[[Sequence[T]], float], times: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 % bootstrap interval of a figure of all documents, drawn with repetition; NaN where it never is one."""
    rng = random.Random(0)
    drawn = sorted(x for _ in range(times) if (x := figure(rng.choices(documents, k=len(documents)))) == x)
    tail = (1 - LEVEL) / 2
    return (percentile(drawn, tail), percentile(drawn, 1 - tail)) if drawn else (math.nan, math.nan)


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
