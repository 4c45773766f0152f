"""PolyKV's strategy files: for each layer and phase a pattern and a budget, as a calibration chose them.

    polykv: 1
    model: {name: SmolLM2, layers: 30, kv_heads: 3, identity: ...}
    budget: {mean_tokens: 256, prefill_total: 7680}
    signals: {eviction: cosine, budget: uniform, seed: 0}
    policy:
      plan:
        L0-L4: {prefill: {pattern: snapkv, budget: 256}, decode: full}
        L5: {prefill: {pattern: h2o, budget: 256}, decode: {pattern: tova, budget: 256}}
    tables: ...

A pattern is a preset's scoring, protection and merging in one layer and phase; its own budget rule does not count.
Reading is strict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml

from kvstrata.core import PHASES, Phase, SpecError
from kvstrata.files import whole
from kvstrata.policy.budget import Tokens
from kvstrata.policy.policy import LayerRange, Policy, Rule
from kvstrata.policy.presets import PRESETS
from kvstrata.policy.strict import StrictLoader

VERSION, FULL = 1, "full"
STRATEGY = "polykv:"  # before the file of a strategy
SHIPPED = ("128", "256", "512")  # mean tokens of a layer in the demo model's strategies
PATTERNS = (
    *("streaming", "h2o", "tova", "snapkv", "pyramidkv", "scissorhands", "cake", "cam", "d2o"),
    *("keydiff", "echo-head"),
)
KEYS = {
    "": ("polykv", "model", "budget", "signals", "policy", "tables"),
    "model": ("name", "layers", "kv_heads", "identity"),
    "budget": ("mean_tokens", "min", "prefill_total", "decode_total"),
    "policy": ("plan",),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What one layer does in one phase: a pattern and how many tokens it keeps. "full" keeps all."""

    pattern: str
    budget: int = 0

    def rule(self, phase: Phase) -> Rule | None:
        """The rule of a phase; None keeps everything."""
        return None if self.pattern == FULL else pattern_rule(self.pattern, self.budget, phase)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Choices [L] of every layer, for both phases, and what the file says of where they come from."""

    prefill: tuple[Choice, ...]
    decode: tuple[Choice, ...]
    about: dict[str, Any]

    @property
    def identity(self) -> str:
        """Of the model that it is for; "" where the file does not say."""
        return str(self.about.get("model", {}).get("identity", ""))

    def policy(self, name: str = "polykv") -> Policy:
        """The policy, a range for each run of layers that are alike."""
        pairs = list(zip(self.prefill, self.decode, strict=True))
        starts = [i for i, pair in enumerate(pairs) if i == 0 or pair != pairs[i - 1]]
        ends = [*(start - 1 for start in starts[1:]), len(pairs) - 1]
        ranges = [
            LayerRange(pairs[a][0].rule("prefill"), pairs[a][1].rule("decode"), a, b)
            for a, b in zip(starts, ends, strict=True)
        ]
        made_for = frozenset({self.identity}) if self.identity else frozenset[str]()
        return Policy(name, tuple(ranges), made_for, len(self.prefill))


def strategy_file(spec: str) -> Path:
    """The file of `polykv:FILE`, where 128, 256 or 512 stands for the one that is shipped."""
    name = spec.strip().removeprefix(STRATEGY)
    if name in SHIPPED:
        return Path(str(files("kvstrata.policy").joinpath("assets", f"polykv-{name}-smollm2-135m-instruct.yaml")))
    return Path(name)


def pattern_rule(name: str, budget: int, phase: Phase = "prefill") -> Rule:
    """A preset's rule of a phase, of the prompt where it has no other, with a budget in tokens.

    Raises `SpecError` for a name that is no pattern.
    """
    if name not in PATTERNS:
        raise SpecError(f"no pattern named {name!r}. There are: {', '.join((*PATTERNS, FULL))}")
    rules = PRESETS[name]().rules(0)
    rule = rules[phase] or rules["prefill"]
    assert rule is not None
    return replace(rule, budget=Tokens(budget))


def write_strategy(path: Path, strategy: Strategy, tables: dict[str, Any] | None = None) -> None:
    """Write a file; runs of layers that are alike share a line."""
    pairs = list(zip(strategy.prefill, strategy.decode, strict=True))
    plan: dict[str, Any] = {}
    start = 0
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i] != pairs[start]:
            name = f"L{start}" if i - start == 1 else f"L{start}-L{i - 1}"
            plan[name] = {phase: _written(choice) for phase, choice in zip(PHASES, pairs[start], strict=True)}
            start = i
    data = {"polykv": VERSION, **strategy.about, "policy": {"plan": plan}}
    if tables is not None:
        data["tables"] = tables
    with whole(path) as scratch:
        scratch.write_text(yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120))


def _written(choice: Choice) -> Any:
    return FULL if choice.pattern == FULL else {"pattern": choice.pattern, "budget": choice.budget}


class _Reader:
    """A file's data, and errors that name its lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._root = yaml.compose(path.read_text(), yaml.SafeLoader)
            self.data: Any = yaml.load(path.read_text(), StrictLoader)
        except FileNotFoundError as error:
            raise SpecError(f"no strategy file at {path}: make one with kvstrata calibrate polykv") from error
        except (OSError, UnicodeDecodeError, yaml.YAMLError, SpecError) as error:
            raise SpecError(f"cannot read the strategy file {path}: {error}") from error

    def fail(self, message: str, *keys: str) -> SpecError:
        """An error about what stands under these keys."""
        node, line = self._root, 1
        for key in keys:
            for name, value in getattr(node, "value", []):
                if getattr(name, "value", None) == key:
                    node, line = value, name.start_mark.line + 1
                    break
        return SpecError(f"{self.path}, line {line}: {message}")

    def table(self, *keys: str) -> dict[str, Any]:
        """The table under these keys."""
        found = self.data
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None  # pyright: ignore
        if not isinstance(found, dict):
            raise self.fail(f"{'.'.join(keys) or 'the file'} must be a table", *keys)
        table = {str(key): value for key, value in cast("dict[object, Any]", found).items()}
        known = KEYS.get(keys[-1] if keys else "")
        for key in table:
            if known is not None and key not in known:
                raise self.fail(f"unknown key {key!r}. There are: {', '.join(known)}", *keys, key)
        return table


def read_strategy(path: Path) -> Strategy:
    """Read a file. Raises `SpecError` with the line for gaps, overlaps, wrong sums, unknown patterns and keys."""
    reader = _Reader(path)
    if reader.table().get("polykv") != VERSION:
        raise reader.fail(f"polykv must be {VERSION}, the version of the format", "polykv")
    layers = reader.table("model").get("layers")
    if not isinstance(layers, int) or layers < 1:
        raise reader.fail("model.layers must be the number of layers", "model", "layers")
    reader.table("policy")
    plan = reader.table("policy", "plan")
    found: dict[int, dict[Phase, Choice]] = {}
    for name in plan:
        for layer in _layers(reader, name, layers):
            if layer in found:
                raise reader.fail(f"layer {layer} stands in two lines", "policy", "plan", name)
            found[layer] = {phase: _choice(reader, name, phase) for phase in PHASES}
    if missing := [layer for layer in range(layers) if layer not in found]:
        raise reader.fail(f"no line for layer {missing[0]}: every layer needs one", "policy", "plan")
    sides = {phase: tuple(found[layer][phase] for layer in range(layers)) for phase in PHASES}
    totals = reader.table("budget") if "budget" in reader.table() else {}
    for phase, side in sides.items():
        total, kept = totals.get(f"{phase}_total"), sum(choice.budget for choice in side)
        if total is not None and total != kept:
            raise reader.fail(f"{phase}_total is {total}, but the layers' budgets sum to {kept}", "budget")
    about = {key: value for key, value in reader.table().items() if key not in ("polykv", "policy", "tables")}
    return Strategy(sides["prefill"], sides["decode"], about)


def _layers(reader: _Reader, name: str, layers: int) -> range:
    found = re.fullmatch(r"L(\d+)(?:-L(\d+))?", name)
    if found is None:
        raise reader.fail(f"cannot read the layers {name!r}: write L5 or L0-L4", "policy", "plan", name)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first or last >= layers:
        raise reader.fail(f"{name!r} does not lie in layers L0-L{layers - 1}", "policy", "plan", name)
    return range(first, last + 1)


def _choice(reader: _Reader, name: str, phase: Phase) -> Choice:
    keys = ("policy", "plan", name)
    line = reader.table(*keys)
    if set(line) != set(PHASES):
        raise reader.fail(f"{name} needs exactly the keys {' and '.join(PHASES)}", *keys)
    if line[phase] == FULL:
        return Choice(FULL)
    table = reader.table(*keys, phase)
    pattern, budget = table.get("pattern"), table.get("budget")
    if set(table) != {"pattern", "budget"} or not isinstance(budget, int) or budget < 1:
        raise reader.fail(f"{name}, {phase}: write full, or {{pattern: NAME, budget: TOKENS}}", *keys, phase)
    if pattern not in PATTERNS:
        there = ", ".join((*PATTERNS, FULL))
        raise reader.fail(f"no pattern named {pattern!r}. There are: {there}", *keys, phase)
    return Choice(str(pattern), budget)
