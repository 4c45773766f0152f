"""YAML without the silent last-one-wins of repeated keys."""

from __future__ import annotations

from typing import Any

import yaml

from kvstrata.core import SpecError


class StrictLoader(yaml.SafeLoader):
    """Raises `SpecError` for a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse it."""
        keys = [key.value for key, _ in node.value]  # before `<<` brings in those of another table
        for key in keys:
            if keys.count(key) > 1:
                raise SpecError(f"{str(key)!r} is given twice in line {node.start_mark.line + 1} and after")
        return super().construct_mapping(node, deep)
