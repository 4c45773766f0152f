"""CONF-KV: budgets by confidence, older entries in INT8."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvstrata.core import SpecError
from kvstrata.policy.allocation import ByConfidence, Falling
from kvstrata.policy.budget import Budget, Tokens
from kvstrata.policy.confidence import Steady
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import PRESETS, SHARED, both
from kvstrata.policy.protect import FOUR_SINKS, Protect, half
from kvstrata.policy.scorers.attention import DecayedMass
from kvstrata.policy.scorers.combine import Mix, Part
from kvstrata.policy.scorers.recency import Recency
from kvstrata.policy.tiering import ByAge, Coding, Tiering

ScaleMode = Literal["running", "block"]
TIGHT, LOOSE = Tokens(128), Tokens(256)
NEWEST_32 = Protect(recent=half(32))


@PRESETS.add("confkv")
def confkv(
    high: Budget | None = None,
    low: Budget | None = None,
    budget: Budget | None = None,
    tau: float = 0.7,
    alpha: float = 0.65,
    decay: float = 0.9,
    window: int = 128,
    window_by: Literal["position", "rank"] = "position",
    scale_mode: ScaleMode = "running",
    demote: int = 1,
    debias: bool = False,
    smooth: float = 0.0,
    band: float = 0.0,
    dwell: int = 0,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
    signal_logits: Literal["raw", "processed"] = "raw",
) -> Policy:
    """Keep fewer tokens while the model is sure of its next one (CONF-KV, arXiv:2605.24786); older ones in INT8.

    Constants of the WikiText runs: 128 and 256 tokens, the newest 32 protected, entries of the last `window` positions
    exact. `budget` asks for a mean instead. `demote` entries are coded at a time: more are faster.
    """
    levels = _levels(high, low, budget, tau, signal_logits, Steady(smooth, band, dwell))
    rule = _ema_and_recency(
        alpha, DecayedMass(decay, debias), levels, budget, _int8(scale_mode, window, demote, window_by)
    )
    return both("confkv", rule, room, sinks, recent)


@PRESETS.add("confkv-l")
def confkv_l(
    high: Budget | None = None,
    low: Budget | None = None,
    budget: Budget | None = None,
    tau: float = 0.7,
    alpha: float = 0.65,
    decay: float = 0.9,
    beta: float = 0.5,
    at_least: int = 96,
    window: int = 128,
    window_by: Literal["position", "rank"] = "position",
    scale_mode: ScaleMode = "running",
    demote: int = 1,
    debias: bool = False,
    smooth: float = 0.0,
    band: float = 0.0,
    dwell: int = 0,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
    signal_logits: Literal["raw", "processed"] = "raw",
) -> Policy:
    """CONF-KV with budgets that fall over depth: N * beta^(l / L), never under `at_least` (CONF-KV-L)."""
    steady = Steady(smooth, band, dwell)
    levels = Falling(_levels(high, low, budget, tau, signal_logits, steady), beta, at_least)
    rule = _ema_and_recency(
        alpha, DecayedMass(decay, debias), levels, budget, _int8(scale_mode, window, demote, window_by)
    )
    return both("confkv-l", rule, room, sinks, recent)


@PRESETS.add("confkv+")
def confkv_plus(
    high: Budget | None = None,
    low: Budget | None = None,
    budget: Budget | None = None,
    tau: float = 0.63,
    window: int = 128,
    room: int = 16,
) -> Policy:
    """CONF-KV as we recommend it: four sinks, a tau that is met as often as the paper's, room for 16 tokens at a time.

    tau is what SmolLM2 meets at 42 % of the steps of prose; `kvstrata calibrate tau` finds it for another model.
    """
    made = confkv(high, low, budget, tau, window=window, demote=16, band=0.02, dwell=2, room=room)
    guarded = made.map_rules(lambda rule: replace(rule, protect=replace(rule.protect, sinks=FOUR_SINKS)))
    return replace(guarded, name="confkv+")


def _levels(
    high: Budget | None,
    low: Budget | None,
    budget: Budget | None,
    tau: float,
    signal: Literal["raw", "processed"],
    steady: Steady,
) -> ByConfidence:
    if budget is not None and (high or low):
        raise SpecError("give budget= (a mean) or high= and low=, not both")
    return ByConfidence(high or TIGHT, low or LOOSE, tau, signal, steady=steady)


def _int8(scale_mode: ScaleMode, window: int, at_once: int, by: Literal["position", "rank"]) -> Tiering:
    """INT8 behind the newest `window` positions, under one growing grid, or page by page."""
    if window == 0:
        raise SpecError("window=0: the newest token is always exact, so give 1 or more")
    if scale_mode == "running":
        return ByAge(Coding("int8-running"), window, at_once, by)
    return ByAge(Coding("int8"), window, by=by)


def _ema_and_recency(alpha: float, mass: DecayedMass, levels: Budget, mean: Budget | None, tiers: Tiering) -> Rule:
    """CONF-KV's rule; `mean` rescales the levels."""
    if not 0 <= alpha <= 1:
        raise SpecError(f"alpha={alpha}: give a weight between 0 and 1")
    scorer = Mix((Part(alpha, mass), Part(1 - alpha, Recency())))
    rule = Rule(scorer, levels, SHARED, tiers, protect=NEWEST_32)
    return rule if mean is None else rule.around(mean)
