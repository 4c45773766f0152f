"""The docs name what exists."""

import re
from pathlib import Path

import pytest

from kvstrata.cli import app
from kvstrata.policy import PRESETS, parse_policy
from kvstrata.policy.scorers import SCORERS

ROOT = Path(__file__).parent.parent
README, START = (ROOT / "README.md").read_text(), (ROOT / "docs/start.md").read_text()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_in_the_readme(name):
    assert f"| `{name}` |" in README


@pytest.mark.parametrize("command", [c.callback.__name__ for c in app.registered_commands])
def test_every_command_is_in_the_docs(command):
    assert f"kvstrata {command}" in START


@pytest.mark.parametrize("text", re.findall(r"^(?:h2o|snapkv|keynorm):.+$", START, re.MULTILINE))
def test_policies_written_in_the_docs_parse(text):
    parse_policy(text)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.+?)```", START, re.DOTALL))
def test_policy_files_written_in_the_docs_are_read(block, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(block)
    policy = parse_policy(path)
    assert policy.rule(0, "prefill") is not None


def test_every_scorer_has_a_docstring():
    assert all(scorer.__doc__ and "dataclass" not in scorer.__doc__ for scorer in SCORERS.values())


def test_links_between_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
