"""CAKE: mean and variance of a window's attention, and a budget that layers divide by how it is spread."""

from __future__ import annotations

from dataclasses import replace

from kvstrata.policy.budget import Budget
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.preference import ByPreference, BySpread
from kvstrata.policy.presets.row import EACH, PRESETS, QUARTER
from kvstrata.policy.protect import Protect, half
from kvstrata.policy.scorers.attention import WindowMass
from kvstrata.policy.scorers.spread import MeanVariance


@PRESETS.add("cake")
def cake(
    budget: Budget = QUARTER,
    window: int = 32,
    pool: int = 5,
    gamma: float = 200.0,
    tau1: float = 1.6,
    tau2: float = 0.6,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 1,
) -> Policy:
    """Keep what the last queries attend to much or now and then; layers divide the budget by entropy and variance.

    CAKE, arXiv:2503.12491, section 4, numbers as in its code: decoding keeps each layer's share, by the newest query.
    """
    divided = ByPreference(budget, BySpread(window, tau1, tau2), own=window)
    prompt = Rule(MeanVariance(window, pool, gamma), divided, EACH, protect=Protect(recent=half(window)))
    decode = replace(prompt, scorer=WindowMass(window, pool), budget=ByPreference(budget, own=window))
    return Policy.everywhere("cake", prompt, decode).with_protect(sinks, recent).with_room(room)
