"""Methods that write values: what is dropped is added to what stays."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Literal

from kvstrata.policy.budget import Budget
from kvstrata.policy.merging import IntoNearest, IntoNext
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.preference import ByDensity, ByPreference
from kvstrata.policy.presets.row import EACH, PRESETS, QUARTER
from kvstrata.policy.protect import FOUR_SINKS, Protect, Scaled, half
from kvstrata.policy.scorers.attention import AccumulatedMass, WindowMass


@PRESETS.add("cam")
def cam(
    budget: Budget = QUARTER,
    window: int = 32,
    against: Literal["max", "mean"] = "max",
    seed: int = 0,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
) -> Policy:
    """Add what is dropped to the next `window` values that stay, by chance the likelier the more it mattered (CaM).

    ICML 2024; scores, window and chance as in the published runs through KVCache-Factory, every layer with the budget.
    """
    protect, merge = Protect(FOUR_SINKS, half(window)), IntoNext(window, against, seed)
    prompt = Rule(WindowMass(window), budget, EACH, protect=protect, merge=merge)
    made = Policy.everywhere("cam", prompt, replace(prompt, scorer=AccumulatedMass()))
    return made.with_protect(sinks, recent).with_room(room)


@PRESETS.add("d2o")
def d2o(
    budget: Budget = QUARTER,
    beta: float = 0.7,
    alpha: float = 1.0,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
) -> Policy:
    """Merge what is dropped into the most similar key that stays, and give layers of even attention more (D2O).

    arXiv:2406.13035, section 4: most attention so far, four sinks, a quarter of the budget for the newest tokens.
    """
    divided = ByPreference(budget, ByDensity(alpha), own=0)
    protect = Protect(FOUR_SINKS, Scaled(Fraction(1, 4)))
    prompt = Rule(AccumulatedMass(), divided, EACH, protect=protect, merge=IntoNearest(beta))
    decode = replace(prompt, budget=ByPreference(budget, own=0))
    return Policy.everywhere("d2o", prompt, decode).with_protect(sinks, recent).with_room(room)
