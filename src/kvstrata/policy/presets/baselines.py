"""Methods that only drop: the baselines, and what others are compared with."""

from __future__ import annotations

from fractions import Fraction

from kvstrata.policy.allocation import Pyramid
from kvstrata.policy.budget import Budget
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import EACH, PRESETS, QUARTER, SHARED, both
from kvstrata.policy.protect import FOUR_SINKS, Protect, half
from kvstrata.policy.scorers.attention import AccumulatedMass, Persistence, WindowMass
from kvstrata.policy.scorers.keys import KeyDiff, KeyNorm
from kvstrata.policy.scorers.recency import Random, Recency


@PRESETS.add("full")
def full() -> Policy:
    """Keep everything: the reference that every other policy is compared with."""
    return Policy.everywhere("full", None, None)


@PRESETS.add("window")
def window(budget: Budget = QUARTER, sinks: int | None = None, room: int = 1) -> Policy:
    """Keep the newest tokens."""
    return both("window", Rule(Recency(), budget, SHARED), room, sinks, None)


@PRESETS.add("streaming")
def streaming(budget: Budget = QUARTER, sinks: int | None = None, room: int = 1) -> Policy:
    """Keep four sinks and the newest tokens (StreamingLLM, arXiv:2309.17453, section 3), keys not rotated anew."""
    return both("streaming", Rule(Recency(), budget, SHARED, protect=Protect(sinks=FOUR_SINKS)), room, sinks, None)


@PRESETS.add("random")
def random(
    budget: Budget = QUARTER, seed: int = 0, sinks: int | None = None, recent: int | None = None, room: int = 1
) -> Policy:
    """Keep tokens drawn at random: the control."""
    return both("random", Rule(Random(seed), budget, SHARED), room, sinks, recent)


@PRESETS.add("keynorm")
def keynorm(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the keys of smallest norm in each head (arXiv:2406.11430)."""
    return both("keynorm", Rule(KeyNorm(), budget, EACH), room, sinks, recent)


@PRESETS.add("keydiff")
def keydiff(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the keys least like the average key in each head (KeyDiff, arXiv:2504.15364)."""
    return both("keydiff", Rule(KeyDiff(), budget, EACH), room, sinks, recent)


@PRESETS.add("h2o")
def h2o(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Keep the tokens that got most attention so far, and as many recent ones (H2O, arXiv:2306.14048, section 5)."""
    rule = Rule(AccumulatedMass(), budget, EACH, protect=Protect(recent=half()))
    return both("h2o", rule, room, sinks, recent)


@PRESETS.add("tova")
def tova(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Drop what the newest query attends to least, the same in all heads (TOVA, arXiv:2401.06104, section 4)."""
    rule = Rule(WindowMass(rows=1), budget, SHARED, protect=Protect(recent=half(1)))
    return both("tova", rule, room, sinks, recent)


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


@PRESETS.add("adakv")
def adakv(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    safe: Fraction = Fraction(1, 5),
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """SnapKV's votes, where the heads of a layer share its budget (AdaKV, arXiv:2407.11550, Algorithm 1).

    Each head keeps its own best `safe` part of its budget, 0.2 as published.
    """
    rule = Rule(WindowMass(window, pool), budget, Token("pooled", safe), protect=Protect(recent=half(window)))
    return Policy.everywhere("adakv", rule, None).with_protect(sinks, recent)


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
    return both("scissorhands", rule, room, sinks, recent)
