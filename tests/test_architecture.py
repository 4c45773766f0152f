from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvstrata

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "kvstrata"
ORDER = (
    *("core", "registry", "files", "kernels", "store", "policy", "cache", "hf", "bench", "evaluate", "diagnose"),
    *("calibrate", "cli"),
)
FREE = ("_version", "_native")  # anybody may import them
ROOT = "hf"  # whoever imports the package root gets all that it re-exports, down from here
APART = [("policy", "store"), ("store", "policy")]
VAGUE = {"utils.py", "base.py", "common.py", "helpers.py", "misc.py"}

SOURCES = sorted(SRC.rglob("*.py"))
ALL_FILES = SOURCES + sorted(TESTS.rglob("*.py"))


def name(path):
    return str(path.relative_to(SRC.parent if path.is_relative_to(SRC) else TESTS.parent))


files = pytest.mark.parametrize("path", ALL_FILES, ids=name)
sources = pytest.mark.parametrize("path", SOURCES, ids=name)


def layer_of(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def absolute(node, path):
    """The full name that a `from ... import` starts with, dots resolved."""
    if not node.level:
        return node.module
    package = ["kvstrata", *path.relative_to(SRC).parent.parts]
    base = package[: len(package) - node.level + 1]
    return ".".join(base + ([node.module] if node.module else []))


def imported_layers(path):
    """Layers of ours that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, path)
            names += [f"{module}.{alias.name}" for alias in node.names]
    parts = [name.split(".") for name in names]
    ours = [part[1] if len(part) > 1 else ROOT for part in parts if part[0] == "kvstrata"]
    return {layer if layer in ORDER else ROOT for layer in ours if layer not in FREE}


def functions(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.end_lineno - node.lineno + 1


def test_there_is_something_to_check():
    assert {layer_of(path) for path in SOURCES} - {"__init__", *FREE} <= set(ORDER)
    assert {"core", "registry", "kernels", "store", "policy", "cache", "hf"} <= {layer_of(path) for path in SOURCES}
    assert imported_layers(SRC / "cache" / "layer.py") == {"cache", "core", "kernels", "policy", "store"}


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("from kvstrata.cache.layer import Layer", {"cache"}),
        ("from kvstrata import cache", {"cache"}),
        ("import kvstrata.cli.run as run", {"cli"}),
        ("from ..store import Account", {"store"}),
        ("from . import compat", {"hf"}),
        ("from kvstrata import compress", {"hf"}),
        ("def f():\n    import kvstrata.bench", {"bench"}),
        ("import kvstratagem, torch", set()),
        ("from kvstrata._version import __version__", set()),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)
def test_imports_are_seen_in_every_form(monkeypatch, line, layers):
    monkeypatch.setattr(Path, "read_text", lambda self: line)
    assert imported_layers(SRC / "hf" / "compat.py") == layers


@pytest.mark.parametrize("path", [p for p in SOURCES if layer_of(p) not in ("__init__", *FREE)], ids=name)
def test_imports_point_down(path):
    layer = layer_of(path)
    up = sorted(found for found in imported_layers(path) if ORDER.index(found) > ORDER.index(layer))
    assert not up, f"{name(path)} imports upward: {up}"
    if layer == "kernels":
        assert imported_layers(path) <= {"kernels"}
    assert all((layer, found) not in APART for found in imported_layers(path))


@files
def test_no_file_is_over_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


@files
def test_no_function_is_over_50_lines(path):
    assert {function: lines for function, lines in functions(path) if lines > 50} == {}


@files
def test_every_file_is_named_after_a_concept(path):
    assert path.name not in VAGUE


PRIVATE = re.compile(r"transformers\.__version__|\b_attn_implementation")


@sources
def test_only_compat_knows_versions_and_private_names(path):
    found = PRIVATE.findall(path.read_text())
    assert bool(found) == (path == SRC / "hf" / "compat.py"), found


def test_the_public_names_are_these():
    assert kvstrata.__all__ == [
        "InputError",
        "KvstrataError",
        "LayerRange",
        "Policy",
        "Rule",
        "SpecError",
        "UnsupportedModelError",
        "__version__",
        "compress",
        "parse_policy",
        "prefill",
    ]
    assert all(hasattr(kvstrata, name) for name in kvstrata.__all__)
