"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A name to write to, which becomes `path` when the block ends, and nothing if it fails. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
