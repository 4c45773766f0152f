"""Files that a policy's text names: outcomes depend on what they say, and they say what they were made from."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvstrata.core import InputError
from kvstrata.policy import parse_policy
from kvstrata.policy.spec import HEADS, YAML, read_options
from kvstrata.policy.strategy import STRATEGY, strategy_file
from kvstrata.policy.surrogate import folder_of


def content(policy: str) -> str | None:
    """A hash of what the policy's files say, None where it names none."""
    files = _files(policy)
    if not files:
        return None
    total = hashlib.sha256(repr(parse_policy(policy)).encode())  # what a policy file names in turn is read by now
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def check_unread(policy: str, text: str) -> None:
    """Refuse a policy that was calibrated or trained on a text with this hash. Raises `InputError`."""
    for file in _files(policy):
        if file.suffix in (".json", *YAML) and text in file.read_text(encoding="utf-8"):
            raise InputError(
                f"{file.name} of {policy} was made from the text that it would be judged on: give another --haystack"
            )


def _files(policy: str) -> list[Path]:
    folders = map(folder_of, sorted(parse_policy(policy).surrogates))
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
    if policy.startswith(STRATEGY) or policy.endswith(YAML):
        return [*found, strategy_file(policy)]
    heads = read_options(policy)[1].get(HEADS)
    return found if heads is None else [*found, Path(heads)]
