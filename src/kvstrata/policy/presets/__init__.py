"""Methods by name. Each is a function that returns a record, with its numbers and their source beside them.

The only place with papers' numbers. Protected parts scale with the budget unless the caller gives `sinks` or
`recent`, which then hold as they are. `room` trades plans for a few tokens of the budget (`OnOverflow`).
"""

from kvstrata.policy.presets import baselines, cake, coded, confkv, echo, kvzap, merging, neighbours, qevict
from kvstrata.policy.presets.row import PRESETS

__all__ = ["PRESETS", "baselines", "cake", "coded", "confkv", "echo", "kvzap", "merging", "neighbours", "qevict"]
