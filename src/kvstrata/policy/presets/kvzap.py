"""KVzap, and the oracle that it was trained on: KVzip and KVzip+."""

from __future__ import annotations

from kvstrata.core import SpecError
from kvstrata.policy.budget import Above, Budget
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.policy.presets.row import PRESETS, QUARTER, both
from kvstrata.policy.protect import FOUR_SINKS, Protect, half
from kvstrata.policy.scorers.learned import Repetition, Surrogate
from kvstrata.policy.trigger import Every


@PRESETS.add("kvzap")
def kvzap(
    budget: Budget | None = None,
    tau: float | None = None,
    file: str = "linear",
    window: int = 128,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """Keep what a surrogate, trained on KVzip+, gives a score of `tau` or more, and the newest tokens (KVzap).

    Each layer decides by itself when an entry leaves the window (arXiv:2601.07891, section 4; window of 128). With
    `budget` all heads of all layers share it instead. `file` names the weights; "linear" and "mlp" are shipped.
    """
    if tau is not None and budget is not None:
        raise SpecError("give budget= (how much) or tau= (from which score on), not both")
    if tau is not None:
        rule = Rule(Surrogate(file), Above(tau), Token("each"), trigger=Every(room), protect=Protect(recent=window))
        return Policy.everywhere("kvzap", rule, rule).with_protect(sinks, recent)
    rule = Rule(Surrogate(file), budget or QUARTER, Token("global"), protect=Protect(FOUR_SINKS, half(window)))
    return both("kvzap", rule, room, sinks, recent)


@PRESETS.add("kvzap-layer")
def kvzap_layer(
    budget: Budget = QUARTER,
    file: str = "linear",
    window: int = 128,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """`kvzap` with the same budget in every layer, which its heads share: an ablation."""
    rule = Rule(Surrogate(file), budget, Token("pooled"), protect=Protect(FOUR_SINKS, half(window)))
    return both("kvzap-layer", rule, room, sinks, recent)


@PRESETS.add("kvzap-head")
def kvzap_head(
    budget: Budget = QUARTER,
    file: str = "linear",
    window: int = 128,
    sinks: int | None = None,
    recent: int | None = None,
    room: int = 16,
) -> Policy:
    """`kvzap` with the same budget in every head, or with `heads=FILE` as much as a calibration gave it."""
    rule = Rule(Surrogate(file), budget, Token("each"), protect=Protect(FOUR_SINKS, half(window)))
    return both("kvzap-head", rule, room, sinks, recent)


@PRESETS.add("kvzip")
def kvzip(budget: Budget = QUARTER, window: int = 32, sinks: int | None = None, recent: int | None = None) -> Policy:
    """Keep what the model attends to while it repeats the prompt; generated tokens all stay (KVzip, arXiv:2505.23416).

    One budget for all heads of all layers. The repetition is a second pass, which needs a tokenizer.
    """
    rule = Rule(Repetition(), budget, Token("global"), protect=Protect(FOUR_SINKS, half(window)))
    return Policy.everywhere("kvzip", rule, None).with_protect(sinks, recent)


@PRESETS.add("kvzip+")
def kvzip_plus(
    budget: Budget = QUARTER, window: int = 32, sinks: int | None = None, recent: int | None = None
) -> Policy:
    """`kvzip` with what an entry adds to the residual stream in place of attention alone (KVzip+, arXiv:2601.07891)."""
    rule = Rule(Repetition(plus=True), budget, Token("global"), protect=Protect(FOUR_SINKS, half(window)))
    return Policy.everywhere("kvzip+", rule, None).with_protect(sinks, recent)
