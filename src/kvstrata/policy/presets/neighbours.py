"""Neighbours: methods that choose once, by what entries will add, by their channels, or by kind of head."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from kvstrata.policy.budget import Budget
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import EACH, PRESETS, QUARTER, both
from kvstrata.policy.protect import FOUR_SINKS, Protect, Scaled, half
from kvstrata.policy.scorers.attention import WindowMass
from kvstrata.policy.scorers.outputs import Critical, Expected, Lag
from kvstrata.policy.scorers.recency import Recency
from kvstrata.policy.scorers.spread import Defensive

FOUR = 4  # sinks of scorers that leave them out


@PRESETS.add("criticalkv")
def criticalkv(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    first: Fraction = Fraction(1, 2),
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """SnapKV's votes for half of the budget, then votes times what a value adds (CriticalKV, arXiv:2502.03805)."""
    rule = Rule(Critical(WindowMass(window, pool), first), budget, EACH, protect=Protect(recent=half(window)))
    return Policy.everywhere("criticalkv", rule, None).with_protect(sinks, recent)


@PRESETS.add("defensivekv")
def defensivekv(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    safe: Fraction = Fraction(1, 5),
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """Keep what some query of the window needs, however few do; heads share as in AdaKV (arXiv:2510.13334)."""
    rule = Rule(Defensive(window, pool), budget, Token("pooled", safe), protect=Protect(recent=half(window)))
    return Policy.everywhere("defensivekv", rule, None).with_protect(sinks, recent)


@PRESETS.add("defensivekv-layer")
def defensivekv_layer(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """`defensivekv` where all heads of all layers share one budget (Layer-DefensiveKV)."""
    rule = Rule(Defensive(window, pool), budget, Token("global"), protect=Protect(recent=half(window)))
    return Policy.everywhere("defensivekv-layer", rule, None).with_protect(sinks, recent)


@PRESETS.add("expected")
def expected(
    budget: Budget = QUARTER,
    positions: int = 512,
    weight: Literal["v", "wov", "none"] = "v",
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """Keep what queries to come are expected to attend to (Expected Attention, arXiv:2510.00636).

    Four sinks stay and no window, as published.
    """
    scorer = Expected(positions, FOUR if sinks is None else sinks, weight)
    rule = Rule(scorer, budget, EACH, protect=Protect(FOUR_SINKS))
    return Policy.everywhere("expected", rule, None).with_protect(sinks, recent)


@PRESETS.add("expected-ada")
def expected_ada(
    budget: Budget = QUARTER,
    positions: int = 512,
    weight: Literal["v", "wov", "none"] = "v",
    safe: Fraction = Fraction(1, 5),
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """`expected` where the heads of a layer share its budget as in `adakv`: what kvpress's leaderboard runs."""
    scorer = Expected(positions, FOUR if sinks is None else sinks, weight, epsilon=0.01)
    rule = Rule(scorer, budget, Token("pooled", safe), protect=Protect(FOUR_SINKS))
    return Policy.everywhere("expected-ada", rule, None).with_protect(sinks, recent)


@PRESETS.add("lagkv")
def lagkv(budget: Budget = QUARTER, lag: int = 128, sinks: int | None = None, recent: int | None = None) -> Policy:
    """Keep what stands out of the range of the next entries, channel by channel (LagKV, arXiv:2504.04704)."""
    rule = Rule(Lag(lag, FOUR if sinks is None else sinks), budget, EACH, protect=Protect(FOUR_SINKS))
    return Policy.everywhere("lagkv", rule, None).with_protect(sinks, recent)


@PRESETS.add("duo")
def duo(budget: Budget = QUARTER, sinks: int | None = None, recent: int | None = None, room: int = 1) -> Policy:
    """Sinks and the newest tokens of every head; with `heads=FILE` of `--scorer duo`, retrieval heads keep everything.

    After DuoAttention (arXiv:2410.10819, section 2.3), whose streaming heads keep 128 sinks; fewer in a small budget.
    """
    rule = Rule(Recency(), budget, EACH, protect=Protect(Scaled(Fraction(1, 3), 128), half(1)))
    return both("duo", rule, room, sinks, recent)
