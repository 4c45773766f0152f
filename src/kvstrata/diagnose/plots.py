"""Pictures of diagnostics, PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvstrata.core import PHASES, Tier
from kvstrata.diagnose.drift import Band
from kvstrata.diagnose.measure import Traces
from kvstrata.evaluate.figures import figure
from kvstrata.files import whole
from kvstrata.policy.strategy import Choice, Strategy


def draw(kind: str, figures: dict[str, Any], found: Traces, band: Band, path: Path) -> Path:
    """Draw one kind of diagnostic. Raises `KvstrataError` without matplotlib."""
    fig = figure(figsize=(10, 5))
    {"fmm": _tiers, "churn": _saw, "reactivation": _heat, "confidence": _scatter, "isolation": _bars}[kind](
        fig, figures, found, band
    )
    with whole(path) as scratch:
        fig.savefig(scratch, dpi=130, format="png")
    return path


def _tiers(fig: Any, figures: dict[str, Any], found: Traces, band: Band) -> None:
    """The tier of every window over time: the first document, the middle layer."""
    axes = fig.subplots(1, len(found), squeeze=False)[0]
    for axis, (policy, docs) in zip(axes, found.items(), strict=True):
        one = docs[0][len(docs[0]) // 2]
        count = (one.tier.shape[1] - band.sinks) // band.window
        by_window = band.by_window(one.tier, count).float().mean(dim=-1)
        axis.imshow(
            by_window.T.tolist(), aspect="auto", origin="lower", interpolation="nearest", vmin=0, vmax=int(Tier.EXACT)
        )
        missed = figures[policy]["32"]["mean"]
        title = policy if missed is None else f"{policy}\nmissed in 32 steps: {missed:.1%}"
        axis.set(xlabel="event", ylabel="window", title=title)


def _saw(fig: Any, figures: dict[str, Any], found: Traces, band: Band) -> None:
    """Tokens kept over time, mean over layers, of the first document."""
    axis = fig.subplots()
    for policy, docs in found.items():
        kept = torch.stack([(t.tier != Tier.DROP).sum(dim=1).float() for t in docs[0]]).mean(dim=0)
        churn = figures[policy]["kept"]["mean"]
        axis.plot(
            docs[0][0].events.tolist(), kept.tolist(), label=policy if churn is None else f"{policy}: churn {churn:.3f}"
        )
    axis.set(xlabel="step", ylabel="tokens kept, mean over layers")
    axis.legend()


def _heat(fig: Any, figures: dict[str, Any], found: Traces, band: Band) -> None:
    """Reactivation by layer."""
    keys = [key for key in next(iter(figures.values())) if key.startswith("exact")]
    rows = [(f"{policy}: {key}", table[key]["by_layer"]) for policy, table in figures.items() for key in keys]
    axis = fig.subplots()
    image = axis.imshow([[float("nan") if x is None else x for x in row] for _, row in rows], aspect="auto", vmin=0)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set(xlabel="layer", title="share of left-out windows that come back")
    fig.colorbar(image)


def _scatter(fig: Any, figures: dict[str, Any], found: Traces, band: Band) -> None:
    """Confidence against KL, by ablation."""
    panels = fig.subplots(2, 3, sharex=True).flatten()
    for axis, (name, relation) in zip(panels, figures["ablations"].items(), strict=False):
        points = [(s["confidence"], max(s["kl"][name], 1e-6)) for s in figures["samples"]]
        axis.scatter(*zip(*points, strict=True), s=4)
        axis.set(yscale="log", title=f"{name}\nSpearman {relation['spearman'] or 0:.2f}", xlabel="confidence")


def _bars(fig: Any, figures: dict[str, Any], found: Traces, band: Band) -> None:
    """Nats above the full cache, by variant."""
    names = [name for name in figures if name != "full"]
    over = [figures[name]["above_full"] for name in names]
    axis = fig.subplots()
    errors = [[x["mean"] - x["low"] for x in over], [x["high"] - x["mean"] for x in over]]
    axis.bar(names, [x["mean"] for x in over], yerr=errors)
    axis.set(ylabel="nats per token above the full cache")


def draw_strategy(strategy: Strategy, path: Path) -> Path:
    """Budgets of a PolyKV strategy as bars over the layers, patterns by colour. Raises `KvstrataError`."""
    sides = [side for side in PHASES if any(choice.budget for choice in getattr(strategy, side))] or ["prefill"]
    fig = figure(figsize=(10, 3 * len(sides)))
    for axis, side in zip(fig.subplots(len(sides), 1, squeeze=False)[:, 0], sides, strict=True):
        choices: tuple[Choice, ...] = getattr(strategy, side)
        for name in dict.fromkeys(choice.pattern for choice in choices):
            layers = [i for i, choice in enumerate(choices) if choice.pattern == name]
            axis.bar(layers, [choices[i].budget for i in layers], label=name)
        axis.set(xlabel="layer", ylabel="tokens kept", title=side)
        axis.legend()
    with whole(path) as scratch:
        fig.savefig(scratch, dpi=130, format="png")
    return path
