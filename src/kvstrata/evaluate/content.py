"""Files that a policy's text names: outcomes depend on what they say, and they say what they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from kvstrata.core import InputError
from kvstrata.policy import parse_policy
from kvstrata.policy.shares import ByHead
from kvstrata.policy.spec import YAML
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


def check_unread(policy: str, texts: Collection[str]) -> None:
    """Refuse a policy that was calibrated or trained on a whole text with one of these hashes. Raises `InputError`."""
    for file in _files(policy):
        said = file.read_bytes()
        if any(text.encode() in said for text in texts):
            raise InputError(
                f"{file.name} of {policy} was made from a text that it would be judged on: give another --haystack or "
                "--data, or a policy made from other texts"
            )


def _files(policy: str) -> list[Path]:
    parsed = parse_policy(policy)
    folders = map(folder_of, sorted(parsed.surrogates))
    found = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
    if policy.startswith(STRATEGY) or policy.endswith(YAML):
        found.append(strategy_file(policy))
    rules = (rule for entry in parsed.table for rule in (entry.prefill, entry.decode) if rule)
    shares = {rule.budget.shares.file for rule in rules if isinstance(rule.budget, ByHead)}
    return [*found, *sorted(file for file in shares if file)]
