"""QEvict: windows between exact, coded and dropped."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Literal

from kvstrata.core import SpecError
from kvstrata.kernels.codec import KeySpace
from kvstrata.policy.budget import Budget, OfTotal, Share
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import PRESETS, both
from kvstrata.policy.protect import Protect, Scaled, half
from kvstrata.policy.routing import Recoverable
from kvstrata.policy.scorers.attention import AccumulatedMass
from kvstrata.policy.tiering import CodecName, Coding
from kvstrata.policy.trigger import Every

TENTH, HALF = Share(Fraction(1, 10)), Fraction(1, 2)
FIVE_SINKS = Scaled(Fraction(1, 4), 5)


@PRESETS.add("qevict")
def qevict(
    budget: Budget = TENTH,
    split: Fraction = HALF,
    window: int = 8,
    every: int = 8,
    code: CodecName = "int2",
    keys: KeySpace = "post",
    corrected: bool = False,
    decay: float = 1.0,
    per_query: bool = False,
    score: Literal["every-step", "routing-only"] = "every-step",
    margin: float = 0.0,
    admit: bool = False,
    heads: Literal["shared", "each"] = "shared",
    total: int | None = None,
    sinks: int | None = None,
    recent: int | None = None,
) -> Policy:
    """Windows of tokens move between exact, INT2 and dropped by accumulated attention, under a byte budget (QEvict).

    Window, interval, five sinks and the newest 32 tokens as published; `split`, the coded part of what windows may
    take, is not. A window is coded once; what is coded or asleep is charged. `window` tokens share a grid of keys.
    score="routing-only" adds up the attention of those steps alone after which windows move, as the authors do. With
    `total` a share is of so many tokens, prompt and answer together, and not of those seen so far.
    """
    if total is not None and not isinstance(budget, Share):
        raise SpecError(f"total={total} is what a share is of, but budget={budget} is none: leave out one of the two")
    budget = OfTotal(budget, total) if total is not None and isinstance(budget, Share) else budget
    group = min(window, 64) if code in ("int4", "int2") else 64
    tiers = Recoverable(
        Coding(code, group, keys, ledger=True, corrected=corrected), split, window, every, margin, admit
    )
    scorer = AccumulatedMass(decay, per_query)
    sampled = score == "routing-only"
    rule = Rule(scorer, budget, Token(heads), tiers, Every(every), Protect(FIVE_SINKS, half(32)), sampled)
    return both("qevict", rule, 1, sinks, recent)


@PRESETS.add("qevict-w32")
def qevict_w32(budget: Budget = TENTH, split: Fraction = HALF, heads: Literal["shared", "each"] = "shared") -> Policy:
    """QEvict with windows of 32 tokens, whose INT2 really takes 2.6 bits a number at head_dim 128 (w=8: 4.1)."""
    return replace(qevict(budget, split, window=32, heads=heads), name="qevict-w32")
