"""What a user asks for: the key "kvstrata" of vLLM's additional configuration.

Either the text of a policy, `{"kvstrata": "h2o:budget=25%"}`, or a table:

    {"kvstrata": {"policy": "h2o:budget=25%", "classes": 2, "lag": 1, "log": "drops.jsonl"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from kvstrata.core import SpecError
from kvstrata.registry import unknown

KEY = "kvstrata"
MOST_CLASSES = 4  # layer classes, each of which needs a type of its own (`spec.py`)


@dataclass(frozen=True, slots=True)
class Settings:
    """Raises `SpecError` for a value that cannot be."""

    policy: str
    classes: int = 1  # parts of the model's depth that choose their blocks apart
    lag: int = 1  # steps between announcing to the workers that a block goes and giving it back to the pool: 0 or 1
    log: str = ""  # a file that takes what was dropped when, one JSON object a line; "" for none

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.policy), str) or not self.policy.strip():
            raise SpecError(f'policy={self.policy!r}: write a policy, as in "h2o:budget=25%"')
        if type(self.classes) is not int or not 1 <= self.classes <= MOST_CLASSES:
            raise SpecError(f"classes={self.classes!r}: give 1 to {MOST_CLASSES} layer classes")
        if type(self.lag) is not int or self.lag not in (0, 1):
            raise SpecError(f"lag={self.lag!r}: give 1 (the default) or 0 (a block is freed as soon as it is chosen)")
        if not isinstance(cast(object, self.log), str):
            raise SpecError(f"log={self.log!r}: give the path of a file")


def read_settings(additional_config: object) -> Settings | None:
    """What `additional_config` says of kvstrata; None where it says nothing. Raises `SpecError`."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    given: object = cast("Mapping[str, object]", additional_config)[KEY]
    if isinstance(given, str):
        return Settings(given)
    if not isinstance(given, Mapping):
        raise SpecError(f'{KEY}={given!r}: write a policy, as in "h2o:budget=25%", or a table with the key policy')
    table = {str(key): value for key, value in cast("Mapping[object, Any]", given).items()}
    known = [field.name for field in fields(Settings)]
    for key in table:
        if key not in known:
            raise unknown(f"key of {KEY}", key, known)
    if "policy" not in table:
        raise SpecError(f"{KEY} needs the key 'policy'")
    return Settings(**table)
