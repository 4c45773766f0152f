"""Ours: what a repetition of the context would ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvstrata.core import SpecError
from kvstrata.kernels.echo import Weight
from kvstrata.policy.budget import Above, Budget
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import PRESETS, QUARTER, both
from kvstrata.policy.protect import FOUR_SINKS, Protect, half
from kvstrata.policy.scorers.repeat import Echo
from kvstrata.policy.trigger import Every


@PRESETS.add("echo")
def echo(
    budget: Budget | None = None,
    tau: float | None = None,
    window: int = 32,
    band: int = 4,
    shift: int = 512,
    weight: Weight = "u*wov",
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """Keep what a repetition of the context would ask for, without repeating it; all heads share one budget.

    Ours (docs/methods.md, "echo"). `tau` decides each layer at once by score, in place of a budget.
    """
    if tau is not None and budget is not None:
        raise SpecError("give budget= (how much) or tau= (from which score on), not both")
    if tau is not None:
        rule = replace(_echo("each", Above(tau), window, band, shift, weight), trigger=Every(room))
        return Policy.everywhere("echo", rule, rule).with_protect(sinks, recent)
    rule = _echo("global", budget or QUARTER, window, band, shift, weight)
    return both("echo", rule, room, sinks, recent)


@PRESETS.add("echo-layer")
def echo_layer(
    budget: Budget = QUARTER,
    window: int = 32,
    band: int = 4,
    shift: int = 512,
    weight: Weight = "u*wov",
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """`echo` with the same budget in every layer, which its heads share: an ablation."""
    return both("echo-layer", _echo("pooled", budget, window, band, shift, weight), room, sinks, recent)


@PRESETS.add("echo-head")
def echo_head(
    budget: Budget = QUARTER,
    window: int = 32,
    band: int = 4,
    shift: int = 512,
    weight: Weight = "u*wov",
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """`echo` with the same budget in every head, or with `heads=FILE` as much as a calibration gave it."""
    return both("echo-head", _echo("each", budget, window, band, shift, weight), room, sinks, recent)


def _echo(
    heads: Literal["each", "pooled", "global"],
    budget: Budget,
    window: int,
    band: int,
    shift: int,
    weight: Weight,
) -> Rule:
    """The first tokens and the newest `window` stay; an entry older than twice the band was asked for by all."""
    scorer = Echo(-band, band, shift, weight=weight)
    return Rule(scorer, budget, Token(heads), protect=Protect(FOUR_SINKS, half(window)))
