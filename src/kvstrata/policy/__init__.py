"""What to keep: pure functions of tensors. Imports nothing that stores or runs."""

from kvstrata.policy.policy import LayerRange, Policy, Rule
from kvstrata.policy.presets import PRESETS
from kvstrata.policy.spec import parse_policy

__all__ = ["PRESETS", "LayerRange", "Policy", "Rule", "parse_policy"]
