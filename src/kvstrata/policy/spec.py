"""Policies as text and as YAML files, both strict: an unknown key is an error that names the nearest valid one.

Text: `h2o:budget=256,recent=64`. Under any preset `codec=int8` (int4, int2, rot4, ...) codes what is older than the
newest `exact=128` tokens, and `heads=FILE` shares the budget out over heads as a calibration found it. A file holds
either one preset,

    policy: h2o
    budget: 25%

or a table over the layers, where each phase is a preset's text, a rule, or null (keep everything):

    name: mine
    layers:
      0-9: "h2o:budget=50%"
      10-29:
        prefill: {scorer: {window-mass: {rows: 16}}, budget: 25%, heads: each, sinks: 4, recent: 16}
        decode: null
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from kvstrata.core import PHASES, Phase, SpecError
from kvstrata.kernels.pages import PAGE
from kvstrata.policy.budget import Budget, parse_budget
from kvstrata.policy.granularity import Token
from kvstrata.policy.merging import MERGES, Merging
from kvstrata.policy.policy import LayerRange, Policy, Rule
from kvstrata.policy.presets import PRESETS
from kvstrata.policy.protect import Protect
from kvstrata.policy.scorers import SCORERS, Scorer
from kvstrata.policy.scorers.combine import Part
from kvstrata.policy.shares import read_shares
from kvstrata.policy.strategy import STRATEGY, read_strategy, strategy_file
from kvstrata.policy.strict import StrictLoader
from kvstrata.policy.tiering import ByAge, Coding, Native
from kvstrata.policy.trigger import OnOverflow
from kvstrata.registry import Registry, unknown

YAML = (".yaml", ".yml")  # how the name of a policy file ends
T = TypeVar("T")
Table = Mapping[str, Any]


def parse_policy(spec: Policy | str | Path) -> Policy:
    """Return the policy that `spec` stands for: a Policy, the text of one, or the path of a YAML file.

    Raises `SpecError` for anything that is not exactly understood.
    """
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str) and spec.strip().startswith(STRATEGY):
        return read_strategy(strategy_file(spec)).policy()
    if isinstance(spec, Path) or spec.endswith(YAML):
        return read_policy(Path(spec))
    return _preset(*read_options(spec))


def names_budget(spec: str) -> bool:
    """Whether a policy's text sets its own budget, in any of its options."""
    if spec.strip().startswith(STRATEGY):
        return True
    name, _, options = spec.partition(":")
    hints = get_type_hints(PRESETS[name.strip()])
    return any(_is_budget(hints.get(key)) for key in _options(options))


def read_options(spec: str) -> tuple[str, dict[str, str]]:
    """The preset's name, and the options given in a policy's text. Raises `SpecError` where those cannot be read."""
    name, _, options = spec.strip().partition(":")
    return name, _options(options)


def split_specs(text: str) -> list[str]:
    """Split `h2o:budget=25%,recent=8,full` into the texts of its policies: a bare `key=value` belongs to the last."""
    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if specs and "=" in part and ":" not in part.partition("=")[0]:
            specs[-1] += ("," if ":" in specs[-1] else ":") + part
        else:
            specs.append(part)
    return specs


def read_policy(path: Path) -> Policy:
    """Read a policy from a YAML file; forms in the module docstring."""
    try:
        data = yaml.load(path.read_text(), StrictLoader)
    except FileNotFoundError as error:
        raise SpecError(f"no policy file at {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cannot read the policy file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not valid YAML: {error}") from error
    table = _table(data, str(path))
    if "polykv" in table:
        return read_strategy(path).policy(path.stem)
    if "policy" in table:
        options = {key: value for key, value in table.items() if key != "policy"}
        return _preset(str(table["policy"]), options)
    _only(table, ("name", "layers"), str(path))
    if "layers" not in table:
        raise SpecError(f"{path} needs the key 'policy' (one preset) or 'layers' (a table)")
    rows = _table(table["layers"], "layers")
    return Policy(str(table.get("name", path.stem)), tuple(_row(str(key), value) for key, value in rows.items()))


TIERING = ("codec", "exact", "group", "key_space", "corrected")  # options of every preset and rule
CODED_ROOM = 16  # tokens to make room for at once behind codec=, where each drop rewrites a coded page
PROMPT = "prompt"  # of every preset: keep, for a budget of what is generated alone
HEADS = "heads"  # of every preset that has no such option of its own: a file of kvstrata calibrate heads


def _preset(name: str, options: Table) -> Policy:
    make, where = PRESETS[name], f"policy {name!r}"
    own = tuple(inspect.signature(make).parameters)
    _only(options, (*own, *TIERING, HEADS, PROMPT), where)
    beside = {key: value for key, value in options.items() if key not in (*own, HEADS, PROMPT)}
    if "codec" in beside and "room" in own:
        options = {"room": CODED_ROOM, **options}
    policy = _build(where, make, {key: value for key, value in options.items() if key in own})
    if HEADS in options and HEADS not in own:
        if policy.name == "full":
            raise SpecError("heads=FILE shares a budget out, and full has none: take another policy with it")
        policy = policy.with_heads(read_shares(Path(str(options[HEADS]))))
    if PROMPT in options:
        if options[PROMPT] != "keep":
            raise SpecError(f"{where}: prompt={options[PROMPT]}: write prompt=keep, or leave it out")
        policy = policy.with_prompt()
    tiers = _tiers(beside, where)
    if isinstance(tiers, ByAge) and (policy.routes or policy.only_codes):
        raise SpecError(f"{where} codes in a way of its own: leave out codec=, or take another policy with it")
    return policy.with_tiers(tiers) if isinstance(tiers, ByAge) else policy


def _tiers(options: Table, where: str) -> Native | ByAge:
    given = {key: options[key] for key in TIERING if key in options}
    if given and "codec" not in given:
        key, value = next(iter(given.items()))
        raise SpecError(f"{where}: {key}={value} needs a codec for what is older: add codec=int8")
    if not given:
        return Native()
    coding = _build(where, Coding, {key: value for key, value in given.items() if key != "exact"})

    def aged(exact: int = 128) -> ByAge:
        return ByAge(coding, exact, at_once=PAGE)

    return _build(where, aged, {key: value for key, value in given.items() if key == "exact"})


def _row(layers: str, value: object) -> LayerRange:
    found = re.fullmatch(r"(\d+)(?:-(\d+)?)?", layers)
    if found is None:
        raise SpecError(f"cannot read the layer range {layers!r}: write 5, 0-9 or 10- (to the last)")
    first, last = (
        int(found[1]),
        int(found[2]) if found[2] else (None if layers.endswith("-") else int(found[1])),
    )
    if last is not None and last < first:
        raise SpecError(f"layer range {layers!r} is empty: write the smaller number first")
    if value is None or isinstance(value, str):
        value = dict.fromkeys(PHASES, value)
    phases = _table(value, f"layers {layers}")
    _only(phases, PHASES, f"layers {layers}")
    rules = {phase: _phase(phases.get(phase), phase, layers) for phase in PHASES}
    return LayerRange(rules["prefill"], rules["decode"], first, last)


def _phase(value: object, phase: Phase, layers: str) -> Rule | None:
    if value is None:
        return None
    if isinstance(value, str) and value.strip().startswith(STRATEGY):
        raise SpecError(f"layers {layers}: {value!r} is a policy for all layers, not a rule for some")
    if isinstance(value, str):
        return parse_policy(value).rule(0, phase)
    return _rule(_table(value, f"layers {layers}, {phase}"), phase, f"layers {layers}, {phase}")


def _rule(table: Table, phase: Phase, where: str) -> Rule:
    _only(table, ("scorer", "budget", "heads", "merge", "sinks", "recent", "room", *TIERING), where)
    for key in ("scorer", "budget"):
        if key not in table:
            raise SpecError(f"{where} needs the key {key!r}")
    room = CODED_ROOM if "codec" in table and phase == "decode" else 1
    protect = {key: table[key] for key in ("sinks", "recent") if key in table}
    return Rule(
        _scorer(table["scorer"], where),
        parse_budget(table["budget"]),
        _build(where, Token, {"heads": table.get("heads", "shared")}),
        _tiers(table, where),
        trigger=_build(where, OnOverflow, {"room": table.get("room", room)}),
        protect=_build(where, Protect, protect),
        merge=cast(Merging, _named(MERGES, table["merge"], where)) if "merge" in table else None,
    )


def _scorer(value: object, where: str) -> Scorer:
    return cast(Scorer, _named(SCORERS, value, where))


def _named(registry: Registry[type], value: object, where: str) -> object:
    """Of a name, or of one name with its options, the value."""
    if isinstance(value, str):
        value = {value: {}}
    table = _table(value, f"{where}, {registry.kind}")
    if len(table) != 1:
        raise SpecError(f"{where}: give one {registry.kind}, not {len(table)}")
    ((name, options),) = table.items()
    return _build(f"{registry.kind} {name!r}", registry[name], _table(options or {}, name))


def _build(what: str, make: Callable[..., T], options: Table) -> T:
    """Call `make` with options turned into the types it declares; only declared names are accepted."""
    hints = get_type_hints(make if inspect.isfunction(make) else make.__init__)
    hints.pop("return", None)
    _only(options, tuple(inspect.signature(make).parameters), what)
    values: dict[str, object] = {}
    for key, value in options.items():
        if _is_budget(hints[key]):
            values[key] = parse_budget(value)
            continue
        if hints[key] is Scorer:
            values[key] = _scorer(value, what)
            continue
        if hints[key] == tuple[Part, ...]:
            values[key] = tuple(_part(item, what) for item in _list(value, f"{what}, {key}"))
            continue
        try:
            values[key] = TypeAdapter[object](hints[key]).validate_python(value)
        except ValidationError as error:
            raise SpecError(f"{what}: {key}={value!r}: {error.errors()[0]['msg']}") from error
    return make(**values)


def _is_budget(hint: object) -> bool:
    return Budget in (hint, *get_args(hint))


def _part(value: object, where: str) -> Part:
    table = _table(value, where)
    _only(table, ("weight", "scorer"), where)
    if len(table) != 2:
        raise SpecError(f"{where}: every part needs a weight and a scorer")
    weight = table["weight"]
    if not isinstance(weight, int | float) or not isfinite(weight):
        raise SpecError(f"{where}: weight={weight!r} is not a number")
    return Part(float(weight), _scorer(table["scorer"], where))


def _options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise SpecError(f"cannot read {part!r}: write key=value, as in h2o:budget=25%")
        if key in options:
            raise SpecError(f"{key!r} is given twice")
        options[key] = value
    return options


def _only(table: Table, known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(f"key of {where}", key, known)


def _list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise SpecError(f"{where} must be a list, not {value!r}")
    return cast("list[object]", value)


def _table(value: object, where: str) -> Table:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table of keys and values, not {value!r}")
    return {str(key): item for key, item in cast(Mapping[object, object], value).items()}
