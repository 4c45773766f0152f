"""A record of which blocks went when, from which a run can be replayed with a mask (docs/vllm.md, "Checking a run").

One JSON object a line. The first says what the groups are; each of the others is a step of the scheduler.
"""

from __future__ import annotations

import atexit
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from kvstrata.files import whole


class DropLog:
    """The file appears when the engine ends; until then its lines go to a hidden one beside it."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self._file: TextIO = self._stack.enter_context(self._stack.enter_context(whole(path)).open("w"))
        atexit.register(self.close)

    def write(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Let the file appear; a second call does nothing."""
        atexit.unregister(self.close)
        self._stack.close()
