"""Methods by name. Each is a function that returns a record, with its numbers and their source beside them.

The only place with papers' numbers. Protected parts scale with the budget unless the caller gives `sinks` or
`recent`, which then hold as they are. `room` trades plans for a few tokens of the budget (`OnOverflow`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from kvstrata.core import SpecError
from kvstrata.kernels.codec import KeySpace
from kvstrata.policy.allocation import ByConfidence, Falling, Pyramid
from kvstrata.policy.budget import Budget, Everything, Share, Tokens
from kvstrata.policy.confidence import Steady
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.protect import FOUR_SINKS, Protect, Scaled, half
from kvstrata.policy.routing import Recoverable
from kvstrata.policy.scorers.attention import AccumulatedMass, DecayedMass, Persistence, WindowMass
from kvstrata.policy.scorers.combine import Mix, Part
from kvstrata.policy.scorers.keys import KeyDiff, KeyNorm
from kvstrata.policy.scorers.recency import Random, Recency
from kvstrata.policy.tiering import ByAge, CodecName, Coding, Tiering
from kvstrata.policy.trigger import Every
from kvstrata.registry import Registry

ScaleMode = Literal["running", "block"]

PRESETS: Registry[Callable[..., Policy]] = Registry("policy")

SHARED, EACH = Token("shared"), Token("each")
QUARTER, TENTH, HALF = Share(Fraction(1, 4)), Share(Fraction(1, 10)), Fraction(1, 2)
TIGHT, LOOSE = Tokens(128), Tokens(256)
NEWEST_32, FIVE_SINKS = Protect(recent=half(32)), Scaled(Fraction(1, 4), 5)


def _both(name: str, rule: Rule, room: int, sinks: int | None, recent: int | None) -> Policy:
    """One rule in both phases, with the caller's protected tokens if any."""
    return Policy.everywhere(name, rule, rule).with_protect(sinks, recent).with_room(room)


@PRESETS.add("full")
def full() -> Policy:
    """Keep everything: the reference that every other policy is compared with."""
    return Policy.everywhere("full", None, None)


@PRESETS.add("window")
def window(budget: Budget = QUARTER, sinks: int | None = None, room: int = 1) -> Policy:
    """Keep the newest tokens."""
    return _both("window", Rule(Recency(), budget, SHARED), room, sinks, None)


@PRESETS.add("streaming")
def streaming(budget: Budget = QUARTER, sinks: int | None = None, room: int = 1) -> Policy:
    """Keep four sinks and the newest tokens (StreamingLLM, arXiv:2309.17453, section 3), keys not rotated anew."""
    return _both("streaming", Rule(Recency(), budget, SHARED, protect=Protect(sinks=FOUR_SINKS)), room, sinks, None)


@PRESETS.add("random")
def random(
    budget: Budget = QUARTER, seed: int = 0, sinks: int | None = None, recent: int | None = None, room: int = 1
) -> Policy:
    """Keep tokens drawn at random: the control."""
    return _both("random", Rule(Random(seed), budget, SHARED), room, sinks, recent)


@PRESETS.add("keynorm")
def keynorm(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the keys of smallest norm in each head (arXiv:2406.11430)."""
    return _both("keynorm", Rule(KeyNorm(), budget, EACH), room, sinks, recent)


@PRESETS.add("keydiff")
def keydiff(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the keys least like the average key in each head (KeyDiff, arXiv:2504.15364)."""
    return _both("keydiff", Rule(KeyDiff(), budget, EACH), room, sinks, recent)


@PRESETS.add("h2o")
def h2o(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the tokens that got most attention so far, and as many recent ones (H2O, arXiv:2306.14048, section 5)."""
    rule = Rule(AccumulatedMass(), budget, EACH, protect=Protect(recent=half()))
    return _both("h2o", rule, room, sinks, recent)


@PRESETS.add("tova")
def tova(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Drop what the newest query attends to least, the same in all heads (TOVA, arXiv:2401.06104, section 4)."""
    rule = Rule(WindowMass(rows=1), budget, SHARED, protect=Protect(recent=half(1)))
    return _both("tova", rule, room, sinks, recent)


@PRESETS.add("snapkv")
def snapkv(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """Keep what the last queries of the prompt attend to; generated tokens all stay (SnapKV, arXiv:2404.14469).

    Window and kernel as in the published LongBench runs through KVCache-Factory; mean over the group, average pooling.
    """
    rule = Rule(WindowMass(window, pool), budget, EACH, protect=Protect(recent=half(window)))
    return Policy.everywhere("snapkv", rule, None).with_protect(sinks, recent)


@PRESETS.add("pyramidkv")
def pyramidkv(
    budget: Budget = QUARTER,
    window: int = 8,
    pool: int = 7,
    beta: int = 20,
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """SnapKV's choice with budgets that fall over depth, `budget` on average (PyramidKV, arXiv:2406.02069, section 4).

    Window, max-pooling kernel and beta as in the published LongBench runs.
    """
    scorer = WindowMass(window, pool, "max")
    rule = Rule(scorer, Pyramid(budget, beta, window), EACH, protect=Protect(recent=half(window)))
    return Policy.everywhere("pyramidkv", rule, None).with_protect(sinks, recent)


@PRESETS.add("scissorhands")
def scissorhands(
    budget: Budget = QUARTER,
    history: int = 400,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
) -> Policy:
    """Keep what often got more than an even share of attention (Scissorhands, arXiv:2305.17118, Algorithm 2).

    History of 400 queries as in the paper; half of the budget is recent tokens.
    """
    rule = Rule(Persistence(history), budget, EACH, protect=Protect(recent=half()))
    return _both("scissorhands", rule, room, sinks, recent)


@PRESETS.add("confkv")
def confkv(
    high: Budget | None = None,
    low: Budget | None = None,
    budget: Budget | None = None,
    tau: float = 0.7,
    alpha: float = 0.65,
    decay: float = 0.9,
    window: int = 128,
    scale_mode: ScaleMode = "running",
    demote: int = 1,
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
    rule = _ema_and_recency(alpha, decay, levels, budget, _int8(scale_mode, window, demote))
    return _both("confkv", rule, room, sinks, recent)


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
    scale_mode: ScaleMode = "running",
    demote: int = 1,
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
    rule = _ema_and_recency(alpha, decay, levels, budget, _int8(scale_mode, window, demote))
    return _both("confkv-l", rule, room, sinks, recent)


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


def _int8(scale_mode: ScaleMode, window: int, at_once: int) -> Tiering:
    """INT8 behind the newest `window` positions, under one growing grid, or page by page."""
    if window == 0:
        raise SpecError("window=0: the newest token is always exact, so give 1 or more")
    if scale_mode == "running":
        return ByAge(Coding("int8-running"), window, at_once)
    return ByAge(Coding("int8"), window)


def _ema_and_recency(alpha: float, decay: float, levels: Budget, mean: Budget | None, tiers: Tiering) -> Rule:
    """CONF-KV's rule; `mean` rescales the levels."""
    if not 0 <= alpha <= 1:
        raise SpecError(f"alpha={alpha}: give a weight between 0 and 1")
    scorer = Mix((Part(alpha, DecayedMass(decay)), Part(1 - alpha, Recency())))
    rule = Rule(scorer, levels, SHARED, tiers, protect=NEWEST_32)
    return rule if mean is None else rule.around(mean)


@PRESETS.add("qevict")
def qevict(
    budget: Budget = TENTH,
    split: Fraction = HALF,
    window: int = 8,
    every: int = 8,
    code: CodecName = "int2",
    keys: KeySpace = "post",
    decay: float = 1.0,
    per_query: bool = False,
    margin: float = 0.0,
    admit: bool = False,
    heads: Literal["shared", "each"] = "shared",
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """Windows of tokens move between exact, INT2 and dropped by accumulated attention, under a byte budget (QEvict).

    Window, interval, five sinks and the newest 32 tokens as published; `split`, the coded part of what windows may
    take, is not. A window is coded once; what is coded or asleep is charged. `window` tokens share a grid of keys.
    """
    group = min(window, 64) if code in ("int4", "int2") else 64
    tiers = Recoverable(Coding(code, group, keys, ledger=True), split, window, every, margin, admit)
    scorer = AccumulatedMass(decay, per_query)
    rule = Rule(scorer, budget, Token(heads), tiers, Every(every), Protect(FIVE_SINKS, half(32)))
    return _both("qevict", rule, 1, sinks, recent)


@PRESETS.add("qevict-w32")
def qevict_w32(budget: Budget = TENTH, split: Fraction = HALF, heads: Literal["shared", "each"] = "shared") -> Policy:
    """QEvict with windows of 32 tokens, whose INT2 really takes 2.6 bits a number at head_dim 128 (w=8: 4.1)."""
    return replace(qevict(budget, split, window=32, heads=heads), name="qevict-w32")


def _coded(name: CodecName, label: str, exact: int, group: int = 64, at_once: int = 1) -> Policy:
    rule = Rule(Recency(), Everything(), tiers=ByAge(Coding(name, group), exact, at_once))
    return Policy.everywhere(label, rule, rule)


@PRESETS.add("int8")
def int8(exact: int = 128) -> Policy:
    """Keep everything; what is older than `exact` tokens in INT8, a page of 64 at a time."""
    return _coded("int8", "int8", exact)


@PRESETS.add("int4")
def int4(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT4: keys by channel over 64 tokens, values by token."""
    return _coded("int4", "int4", exact)


@PRESETS.add("int2")
def int2(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT2: keys by channel over 64 tokens, values by token."""
    return _coded("int2", "int2", exact)


@PRESETS.add("kivi")
def kivi(exact: int = 128) -> Policy:
    """Keep everything; what is older in INT2, keys by channel over 32 tokens (KIVI, arXiv:2402.02750, section 3).

    Values are grouped over all channels of a head, not over 32 of them.
    """
    return _coded("int2", "kivi", exact, group=32)


@PRESETS.add("rot4")
def rot4(exact: int = 128) -> Policy:
    """Keep everything; what is older in 4 bits, turned by a Hadamard matrix, with a grid for every token."""
    return _coded("rot4", "rot4", exact, at_once=16)


@PRESETS.add("k4v2")
def k4v2(exact: int = 128) -> Policy:
    """Keep everything; what is older turned by a Hadamard matrix, keys in 4 bits and values in 2."""
    return _coded("k4v2", "k4v2", exact, at_once=16)


@PRESETS.add("k2v2")
def k2v2(exact: int = 128) -> Policy:
    """Keep everything; what is older turned by a Hadamard matrix, keys and values in 2 bits."""
    return _coded("k2v2", "k2v2", exact, at_once=16)
