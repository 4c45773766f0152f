"""What rows of the table of presets share."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from kvstrata.policy.budget import Share
from kvstrata.policy.granularity import Token
from kvstrata.policy.policy import Policy, Rule
from kvstrata.registry import Registry

PRESETS: Registry[Callable[..., Policy]] = Registry("policy")

SHARED, EACH = Token("shared"), Token("each")
QUARTER = Share(Fraction(1, 4))


def both(name: str, rule: Rule, room: int, sinks: int | None, recent: int | None) -> Policy:
    """One rule in both phases, with the caller's protected tokens if any."""
    return Policy.everywhere(name, rule, rule).with_protect(sinks, recent).with_room(room)
