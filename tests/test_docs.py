"""The docs name what exists."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import kvstrata
from kvstrata.bench.compare import Trace
from kvstrata.cache import LayerReport
from kvstrata.cli import app
from kvstrata.policy import PRESETS, parse_policy
from kvstrata.policy.scorers import SCORERS
from kvstrata.policy.spec import split_specs

from .contract.families import FAMILIES, MULTIMODAL
from .contract.runs import feed, kv, prompt, tiny

ROOT = Path(__file__).parent.parent
README, START = (ROOT / "README.md").read_text(), (ROOT / "docs/start.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]
GROUPS = [group.name for group in app.registered_groups]
PRESETS_BUILT_IN = sorted(PRESETS)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.+?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def headings(page):
    return set(re.findall(r"^## `(.+)`$", PAGES[page], re.MULTILINE))


@pytest.mark.parametrize("name", PRESETS_BUILT_IN)
def test_every_preset_is_in_the_readme(name):
    assert f"| `{name}` |" in README


@pytest.mark.parametrize("name", PRESETS_BUILT_IN)
def test_every_preset_is_explained(name):
    assert name in headings("methods.md")


def section(page, heading):
    return PAGES[page].partition(f"\n## `{heading}`\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", PRESETS_BUILT_IN)
def test_every_option_of_a_preset_is_explained(name):
    text = section("methods.md", name)
    if name == "confkv-l":  # which has those of confkv and a few more
        text += section("methods.md", "confkv")
    missing = [option for option in inspect.signature(PRESETS[name]).parameters if f"`{option}" not in text]
    assert not missing


def test_no_preset_is_explained_that_does_not_exist():
    assert headings("methods.md") <= set(PRESETS_BUILT_IN)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_docs(command):
    assert f"kvstrata {command}" in START
    assert f"kvstrata {command}" in headings("cli.md")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_in_the_docs(command):
    options = [
        option for p in get_command(app).commands[command].params for option in p.opts if option.startswith("--")
    ]
    assert not [option for option in options if f"`{option}`" not in section("cli.md", f"kvstrata {command}")]


def test_every_option_of_evaluate_is_on_its_page():
    command = get_command(app).commands["evaluate"]
    for one in (command, command.commands["show"]):
        options = [option for p in one.params for option in p.opts if option.startswith("--") and option != "--help"]
        assert not [option for option in options if f"`{option}`" not in PAGES["evaluate.md"]]
    assert "kvstrata evaluate" in START


def test_no_command_is_described_that_does_not_exist():
    assert headings("cli.md") == {f"kvstrata {command}" for command in COMMANDS + GROUPS}


def listed(nav):
    for entry in nav:
        for target in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [target] if isinstance(target, str) else listed(target)


def test_every_page_is_in_the_site_s_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(listed(site["nav"])) == sorted(PAGES)


@pytest.mark.parametrize("text", re.findall(r"^(?:h2o|snapkv|keynorm):.+$", START, re.MULTILINE))
def test_policies_written_in_the_docs_parse(text):
    parse_policy(text)


POLICY = re.compile(rf"(?<![\w`-])`?((?:{'|'.join(PRESETS_BUILT_IN)}):\w[\w-]*=[^\s`\"'\\]+)")


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_every_policy_named_on_a_page_parses(page, tmp_path, monkeypatch):
    levels = {"0.5": {"kept": [[0.5]], "tau": 0.0}}
    for name in ("heads.json", "FILE"):
        (tmp_path / name).write_text(json.dumps({"format": 1, "model": "", "levels": levels}))
    monkeypatch.chdir(tmp_path)
    for text in POLICY.findall(PAGES.get(page, README)):
        for spec in split_specs(text):
            parse_policy(spec)


@pytest.mark.parametrize("block", [*blocks("start.md", "yaml"), *blocks("formats.md", "yaml")])
def test_policy_files_written_in_the_docs_are_read(block, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(block)
    policy = parse_policy(path)
    assert policy.rule(29, "prefill") is not None


def test_every_scorer_has_a_docstring():
    assert all(scorer.__doc__ and "dataclass" not in scorer.__doc__ for scorer in SCORERS.values())


def test_links_between_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchor(heading):
    """The anchor that both GitHub and the site make of a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def test_links_into_a_page_find_their_heading():
    anchors = {
        name: {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for name, text in PAGES.items()
    }
    for name, text in PAGES.items():
        for page, target in re.findall(r"\]\(([\w-]+\.md)?#([\w-]+)\)", text):
            assert target in anchors[page or name], f"{name} links to {page}#{target}"


def test_every_field_of_a_record_is_in_the_formats():
    with kvstrata.compress(tiny(), "h2o:budget=12") as cache:
        feed(tiny(), prompt(20), cache, (18,))
    report = cache.report().to_dict()
    row = Trace("full", step_ms=[1.0], live=[1], held=[1])
    names = {*report, *(field.name for field in fields(LayerReport)), *row.summary(row)}
    missing = {name for name in names if f"`{name}`" not in PAGES["formats.md"]}
    assert not missing


def test_every_tested_family_is_named():
    assert not {name for name in (*FAMILIES, *MULTIMODAL) if f"`{name}`" not in PAGES["faq.md"]}


@pytest.fixture
def plug_in():
    """What the page on extending kvstrata defines, registered for one test."""
    before = dict(SCORERS), dict(PRESETS)
    names = {}
    for block in blocks("extend.md", "python"):
        exec(compile(block, "docs/extend.md", "exec"), names)
    names["register"]()
    yield names
    for registry, things in zip((SCORERS, PRESETS), before, strict=True):
        registry.clear()
        registry.update(things)


def test_the_method_of_the_docs_has_fifteen_lines():
    code = blocks("extend.md", "python")[0].partition("@dataclass")
    assert len([line for line in (code[1] + code[2]).splitlines() if line.strip()]) <= 15


def test_the_method_of_the_docs_runs(plug_in):
    with kvstrata.compress(tiny(), "striped:budget=12,n=5") as cache:
        feed(tiny(), prompt(60), cache, (50,))
    kept = cache.entries(0)
    assert len(kept) == 12
    assert kept[-6:] == list(range(54, 60))
    assert all(position % 5 == 0 for position in kept[:6])


def test_the_scorer_with_state_of_the_docs_runs(plug_in):
    rule = kvstrata.Rule(plug_in["PeakMass"](), plug_in["Tokens"](12))
    with kvstrata.compress(tiny(), kvstrata.Policy.everywhere("peak", rule, rule)) as cache:
        feed(tiny(), prompt(40), cache, (20, 1))
        assert cache.strata[0].store.column("peak").max() > 0
        assert len(cache.entries(1)) == 12
        cache.reset()
        tiny().generate(prompt(30), **kv(cache), max_new_tokens=4, num_beams=2, do_sample=False)
        assert len(cache.entries(1, row=1)) == 12
