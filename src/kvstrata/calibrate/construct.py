"""From signals to a strategy: which pattern, and how much of the budget, each layer gets (PolyKV, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvstrata.calibrate.allocate import allocate, best_patterns, inverse, worst_patterns
from kvstrata.policy.strategy import FULL, Choice, Strategy

Signal = Literal["cosine", "ppl"]
Allocation = Literal["uniform", "entropy", "entropies", "ppl"]
LEAST = 36  # tokens of a layer: a window of 32 and four sinks


def construct(
    signals: Mapping[str, Any],
    budget: int,
    signal: Signal,
    allocation: Allocation,
    about: dict[str, Any],
    *,
    margin: float = 0.0,
    turned: bool = False,
) -> Strategy:
    """The strategy with `budget` tokens a layer on average. `turned`: the worst patterns, budgets the wrong way round.

    Higher entropy, or more nats lost, gives more. Decoding keeps everything unless the signals have that phase.
    """
    how = (budget, signal, allocation, margin, turned)
    sides = {phase: _side(signals, phase, *how) for phase in ("prefill", "decode")}
    totals = {f"{phase}_total": sum(c.budget for c in side) for phase, side in sides.items()}
    sizes = {"mean_tokens": budget, "min": min(LEAST, budget), **{k: v for k, v in totals.items() if v}}
    chosen = {"eviction": signal, "budget": allocation, "margin": margin, "inverse": turned}
    return Strategy(
        sides["prefill"], sides["decode"], {**about, "budget": sizes, "signals": {**chosen, **about.get("signals", {})}}
    )


def _side(
    signals: Mapping[str, Any],
    phase: str,
    budget: int,
    signal: Signal,
    allocation: Allocation,
    margin: float,
    turned: bool,
) -> tuple[Choice, ...]:
    table = values(signals, phase, signal)
    if table is None:
        return (Choice(FULL),) * len(signals["cosine"]["entropy"])
    patterns = worst_patterns(table) if turned else best_patterns(table, margin)
    weights = weights_of(signals, phase, allocation, len(patterns))
    budgets = allocate(weights, budget * len(patterns), min(LEAST, budget))
    if turned:
        budgets = inverse(budgets, weights)
    return tuple(Choice(name, tokens) for name, tokens in zip(patterns, budgets, strict=True))


def values(signals: Mapping[str, Any], phase: str, signal: Signal) -> dict[str, list[float]] | None:
    """By pattern a number for each layer, higher better; None where the phase was not measured."""
    if signal == "cosine":
        return signals["cosine"]["cosine"].get(phase)
    found: dict[str, list[float]] | None = signals["ppl"].get(phase)
    return found and {name: [-x for x in column] for name, column in found.items()}


def weights_of(signals: Mapping[str, Any], phase: str, allocation: Allocation, layers: int) -> Sequence[float]:
    """What each layer's budget is in proportion to."""
    if allocation == "uniform":
        return [1.0] * layers
    if allocation == "ppl":  # perplexity that the worst pattern costs (equation 5), over that of the full cache
        columns = signals["ppl"][phase].values()
        return [max(0.0, *map(math.expm1, values)) for values in zip(*columns, strict=True)]
    return signals["cosine"][allocation]
