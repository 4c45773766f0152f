from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from kvstrata.core import LayerShape, SpecError
from kvstrata.policy import PRESETS, LayerRange, Policy, Rule, parse_policy
from kvstrata.policy.budget import ByteBudget, Everything, HeadTokens, Share, Tokens
from kvstrata.policy.granularity import Token
from kvstrata.policy.protect import Protect, half
from kvstrata.policy.scorers.attention import AccumulatedMass, WindowMass
from kvstrata.policy.scorers.keys import KeyNorm
from kvstrata.policy.scorers.outputs import Critical
from kvstrata.policy.scorers.recency import Random, Recency
from kvstrata.policy.spec import names_budget, read_options, split_specs
from kvstrata.policy.trigger import OnOverflow

TABLE = """
name: mine
layers:
  0-9: "h2o:budget=50%"
  10: null
  11-20:
    prefill: {scorer: {window-mass: {rows: 16, pool: 3}}, budget: 64, heads: each, sinks: 4, recent: 16}
    decode: null
  21-:
    decode: {scorer: keynorm, budget: 2KiB/layer, room: 8}
"""


@pytest.fixture
def file(tmp_path):
    def write(text, name="policy.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def both(name, rule):
    return Policy(name, (LayerRange(rule, rule),))


def test_a_policy_stands_for_itself():
    policy = parse_policy("h2o")
    assert parse_policy(policy) is policy


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_by_its_name(name):
    policy = parse_policy(name)
    assert policy.name == name
    assert policy == PRESETS[name]()
    assert hash(policy) == hash(parse_policy(f" {name} "))


def test_what_is_coded_goes_sixteen_at_a_time(file):
    def room(text):
        return parse_policy(text).rule(0, "decode").trigger

    assert room("h2o") == OnOverflow(1)
    assert room("h2o:codec=int8") == OnOverflow(16)
    assert room("h2o:codec=int8,room=1") == OnOverflow(1)
    rule = "layers:\n  0-: {decode: {scorer: keynorm, budget: 64, codec: int8%s}}\n"
    assert room(file(rule % "")) == OnOverflow(16)
    text = rule.replace("decode", "prefill") % ""
    assert parse_policy(file(text)).rule(0, "prefill").trigger == OnOverflow(1), "it acts once"
    assert room(file(rule % ", room: 4")) == OnOverflow(4)


def test_text_sets_what_it_names():
    rule = Rule(AccumulatedMass(), Tokens(256), Token("each"), protect=Protect(0, 64))
    assert parse_policy("h2o:budget=256,recent=64") == both("h2o", rule)
    assert parse_policy(" h2o: budget = 256 , recent = 64 ") == both("h2o", rule)
    rule = Rule(Random(7), Share(Fraction(1, 10)), protect=Protect(2, 0))
    assert parse_policy("random:seed=7,sinks=2,budget=10%") == both("random", rule)
    rule = Rule(KeyNorm(), HeadTokens((64, 32)), Token("each"))
    assert parse_policy("keynorm:budget=64/32") == both("keynorm", rule)


def test_snapkv_acts_in_prefill_only_and_its_window_is_what_it_protects():
    rule = Rule(WindowMass(8, 3), Tokens(100), Token("each"), protect=Protect(0, half(8)))
    assert parse_policy("snapkv:window=8,pool=3,budget=100") == Policy("snapkv", (LayerRange(rule, None),))


def test_a_file_may_hold_one_preset(file):
    assert parse_policy(file("policy: h2o\nbudget: 25%\nrecent: 8\n")) == parse_policy("h2o:budget=25%,recent=8")
    assert parse_policy(str(file("policy: full\n", "other.yml"))) == parse_policy("full")
    assert parse_policy(file("policy: window\nbudget: 32\n")) == parse_policy("window:budget=32")


def test_a_file_may_hold_a_table_over_the_layers(file):
    policy = parse_policy(file(TABLE))
    assert policy.name == "mine"
    assert policy.rule(0, "prefill") == policy.rule(9, "decode") == parse_policy("h2o:budget=50%").rule(0, "decode")
    assert policy.rules(10) == {"prefill": None, "decode": None}
    assert policy.rules(20) == {
        "prefill": Rule(WindowMass(16, 3), Tokens(64), Token("each"), protect=Protect(4, 16)),
        "decode": None,
    }
    last = {"prefill": None, "decode": Rule(KeyNorm(), ByteBudget(2048, "layer"), trigger=OnOverflow(8))}
    assert policy.rules(21) == policy.rules(500) == last


def test_a_table_may_reuse_a_rule_by_yaml_anchors(file):
    text = """
layers:
  0-9: &same {prefill: null, decode: {scorer: recency, budget: 4}}
  10-19: *same
  20-: {<<: *same, prefill: window}
"""
    policy = parse_policy(file(text))
    assert policy.rules(0) == policy.rules(10) == {"prefill": None, "decode": Rule(Recency(), Tokens(4))}
    assert policy.rules(20) == {
        "prefill": parse_policy("window").rule(0, "prefill"),
        "decode": policy.rule(0, "decode"),
    }


def test_a_table_without_a_name_has_the_files(file):
    assert parse_policy(file("layers: {0-: window}", "short.yaml")).name == "short"


def test_a_phase_given_as_text_takes_that_phase_of_the_preset(file):
    policy = parse_policy(file('layers: {"0-": {prefill: "snapkv:budget=40", decode: "window:budget=50"}}'))
    assert policy.rule(3, "prefill") == parse_policy("snapkv:budget=40").rule(0, "prefill")
    assert policy.rule(3, "decode") == Rule(Recency(), Tokens(50))
    assert parse_policy(file("layers: {0-: snapkv}")).rule(0, "decode") is None


def test_a_range_that_does_not_cover_a_layer_is_an_error_when_it_is_asked_for(file):
    policy = parse_policy(file("name: gap\nlayers: {0-1: window, 3: full}"))
    assert policy.rule(1, "decode") is not None
    assert policy.rule(3, "decode") is None
    for layer in (2, 4):
        with pytest.raises(SpecError, match=rf"'gap' says nothing of layer {layer}"):
            policy.rule(layer, "prefill")


TEXT_ERRORS = {
    "": "no policy named ''. There are: adakv, cake, cam, confkv, confkv\\+, confkv-l, criticalkv, d2o",
    "h20": "no policy named 'h20'. Did you mean 'h2o'?",
    "nothing-like-it": r"no policy named 'nothing-like-it'\. There are",
    "h2o:bugdet=5": "no key of policy 'h2o' named 'bugdet'. Did you mean 'budget'?",
    "window:recent=3": r"named .recent..*There are: budget, codec, corrected, .*, key_space, prompt, room, sinks",
    "full:budget=5": r"no key of policy 'full' named 'budget'\. There are: codec, corrected, exact",
    "h2o:budget=5MiBs": "sizes are B, KiB, MiB",
    "h2o:budget=5,budget=6": "'budget' is given twice",
    "h2o:budget": "cannot read 'budget': write key=value",
    "h2o:budget=": "write key=value",
    "h2o:=5": "no key of policy 'h2o' named ''",
    "h2o:recent=few": r"recent='few'.*integer",
    "h2o:recent=2.5": r"recent='2.5'.*integer",
    "random:seed=": "write key=value",
    "h2o:budget=4,sinks=3": "sinks=3 and recent=2 protect 5 tokens, more than budget=4",
    "h2o:budget=16,recent=17": "sinks=0 and recent=17 protect 17 tokens, more than budget=16",
    "keynorm:budget=9/7,sinks=4,recent=4": "more than budget=7",
    "window:budget=9/7": "heads=each or heads=pooled",
    "h2o:recent=-1": "recent=-1: give 0 or more",
    "snapkv:pool=4": "pool=4 has no middle",
    "h2o:budget=0": "keep at least one token",
}


@pytest.mark.parametrize("text", TEXT_ERRORS, ids=[text or "nothing" for text in TEXT_ERRORS])
def test_text_that_is_not_understood_is_an_error_that_helps(text):
    with pytest.raises(SpecError, match=TEXT_ERRORS[text]):
        parse_policy(text)


RULE = "layers: {0-: {prefill: {scorer: recency, budget: 4%s}}}"
FILE_ERRORS = {
    "empty": ("", "must be a table"),
    "comment-only": ("# policy: h2o\n", "must be a table"),
    "a-list": ("- h2o\n", "must be a table"),
    "a-word": ("h2o\n", "must be a table"),
    "not-yaml": ("policy: [h2o\n", "not valid YAML"),
    "tag": ("policy: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "neither": ("name: x\n", "needs the key 'policy'"),
    "unknown-preset": ("policy: snapvk\n", "Did you mean 'snapkv'?"),
    "unknown-key": ("policy: h2o\nsink: 4\n", "no key of policy 'h2o' named 'sink'. Did you mean 'sinks'?"),
    "unknown-table-key": ("nmae: x\nlayers: {0-: full}\n", "named 'nmae'. Did you mean 'name'?"),
    "both-forms": ("policy: h2o\nlayers: {0-: full}\n", "named 'layers'"),
    "duplicate-key": ("policy: h2o\nbudget: 10%\nbudget: 20%\n", "budget"),
    "duplicate-range": ("layers:\n  0-: window\n  0-: h2o\n", "0-"),
    "missing-value": ("policy: h2o\nbudget:\n", "cannot read budget='None'"),
    "layers-missing": ("layers:\n", "layers must be a table"),
    "layers-list": ("layers: [window]\n", "layers must be a table"),
    "bad-range": ("layers: {first: full}\n", "cannot read the layer range 'first'"),
    "open-start": ("layers: {-9: full}\n", "cannot read the layer range '-9'"),
    "empty-range": ("layers: {9-3: full}\n", "layer range '9-3' is empty"),
    "unknown-phase": ("layers: {0-: {prefil: window}}\n", "named 'prefil'. Did you mean 'prefill'?"),
    "phase-number": ("layers: {0-: {prefill: 3}}\n", "layers 0-, prefill must be a table"),
    "no-scorer": ("layers: {0-: {decode: {budget: 4}}}\n", "layers 0-, decode needs the key 'scorer'"),
    "no-budget": ("layers: {0-: {decode: {scorer: recency}}}\n", "layers 0-, decode needs the key 'budget'"),
    "critical-of-keys": (RULE.replace("recency", "{critical: {scorer: keynorm}}") % "", "must be attention"),
    "merge-by-keys": (RULE.replace("recency", "keynorm") % ", merge: cam", "reads attention"),
    "rule-key": (RULE % ", head: each", "named 'head'. Did you mean 'heads'?"),
    "heads": (RULE % ", heads: some", "heads='some'.*'shared', 'each', 'pooled' or 'global'"),
    "room": (RULE % ", room: 0", "room=0"),
    "room-word": (RULE % ", room: often", "room='often'.*integer"),
    "sinks": (RULE % ", sinks: -2", "sinks=-2: give 0 or more"),
    "protects-too-much": (RULE % ", sinks: 2, recent: 3", "protect 5 tokens, more than budget=4"),
    "unknown-scorer": ("layers: {0-: {decode: {scorer: recent, budget: 4}}}\n", "Did you mean 'recency'?"),
    "two-scorers": ("layers: {0-: {decode: {scorer: {recency: , random: }, budget: 4}}}\n", "one scorer, not 2"),
    "scorer-key": ("layers: {0-: {decode: {scorer: {random: {sed: 1}}, budget: 4}}}\n", "Did you mean 'seed'?"),
    "scorer-value": ("layers: {0-: {decode: {scorer: {random: {seed: x}}, budget: 4}}}\n", "seed='x'.*integer"),
    "scorer-list": ("layers: {0-: {decode: {scorer: [recency], budget: 4}}}\n", "scorer must be a table"),
}


@pytest.mark.parametrize("case", FILE_ERRORS)
def test_a_file_that_is_not_understood_is_an_error_that_helps(file, case):
    text, message = FILE_ERRORS[case]
    with pytest.raises(SpecError, match=message):
        parse_policy(file(text))


def test_a_scorer_may_stand_around_another(file):
    policy = parse_policy(file(RULE.replace("recency", "{critical: {scorer: {window-mass: {rows: 8}}}}") % ""))
    assert policy.rule(0, "prefill").scorer == Critical(WindowMass(8))


def test_a_missing_file_is_named():
    with pytest.raises(SpecError, match=r"no policy file at nowhere\.yaml"):
        parse_policy("nowhere.yaml")
    with pytest.raises(SpecError, match="no policy file at nowhere"):
        parse_policy(Path("nowhere"))


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("", []),
        ("full", ["full"]),
        ("full,h2o", ["full", "h2o"]),
        (" full , h2o ", ["full", "h2o"]),
        ("h2o:budget=25%,recent=8,full", ["h2o:budget=25%,recent=8", "full"]),
        ("window,budget=64", ["window:budget=64"]),
        ("window,budget=64,sinks=4,h2o", ["window:budget=64,sinks=4", "h2o"]),
        ("h2o:budget=1,h2o:budget=2", ["h2o:budget=1", "h2o:budget=2"]),
        ("mine.yaml,h2o:budget=64/32", ["mine.yaml", "h2o:budget=64/32"]),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "",
)
def test_a_list_of_policies_is_split_where_a_policy_begins(text, specs):
    assert split_specs(text) == specs


@pytest.mark.parametrize(
    ("text", "names"),
    [("h2o", False), ("h2o:budget=5", True), ("h2o:recent=5", False), ("h2o:recent=5,budget=9", True)],
    ids=str,
)
def test_whether_a_text_names_its_budget(text, names):
    assert names_budget(text) is names


def test_options_are_read_apart_from_the_policy():
    assert read_options(" h2o:budget=25%, recent = 8") == ("h2o", {"budget": "25%", "recent": "8"})
    assert read_options("h2o") == ("h2o", {})
    with pytest.raises(SpecError, match="'recent' is given twice"):
        read_options("h2o:recent=8,recent=9")


def test_with_budget_changes_every_rule_and_nothing_else(file):
    policy = parse_policy(file(TABLE))
    other = policy.with_budget(Tokens(99))
    assert other.name == policy.name
    for layer in (0, 10, 11, 21):
        for phase, rule in policy.rules(layer).items():
            changed = other.rule(layer, phase)
            assert (changed is None) == (rule is None)
            if rule is not None:
                assert changed.budget == Tokens(99)
                assert (changed.scorer, changed.granularity, changed.protect, changed.trigger) == (
                    *(rule.scorer, rule.granularity, rule.protect, rule.trigger),
                )
    assert policy == parse_policy(file(TABLE)), "the first policy stays as it was"


def test_with_budget_below_what_is_protected_is_refused():
    assert parse_policy("h2o:budget=50%,recent=20").with_budget(Tokens(20))
    with pytest.raises(SpecError, match="more than budget=19"):
        parse_policy("h2o:budget=50%,recent=20").with_budget(Tokens(19))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 1000])
def test_every_preset_takes_any_budget(name, tokens):
    policy = parse_policy(name).with_budget(Tokens(tokens))
    rules = [rule for rule in policy.rules(0).values() if rule]
    assert bool(rules) == (name != "full")
    if rules and isinstance(rules[0].budget, Everything):
        assert policy == parse_policy(name), "what is only coded stays, whatever the budget"
        return
    for rule in rules:
        asked = [
            rule.limits([5000], [sure], LayerShape(depth, depth, 4, 2, 16, 1))[0]
            for sure, weight in ((1.0, 42), (0.0, 58))
            for depth in range(4)
            for _ in range(weight)
        ]
        mean = sum(sum(caps) for caps in asked) / len(asked)
        assert tokens - 1.5 <= mean <= tokens + 1  # rounded down by levels and layers, but one is always kept
        assert rule.tiers.reserve or all(rule.overruns([caps]) == 0 for caps in asked)


def test_with_protect_replaces_only_what_is_given():
    policy = parse_policy("h2o:budget=64")
    assert policy.with_protect() is policy
    assert policy.with_protect(sinks=4).rule(0, "decode").protect == Protect(4, half())
    assert policy.with_protect(recent=5).rule(0, "prefill").protect == Protect(0, 5)
    assert policy.with_protect(sinks=0, recent=0).rule(0, "decode").protect == Protect(0, 0)
    with pytest.raises(SpecError, match="more than budget=64"):
        policy.with_protect(sinks=40)  # and 32 recent ones


def test_with_room_changes_the_trigger_and_nothing_else():
    policy = parse_policy("h2o:budget=64")
    assert policy.with_room(1) is policy
    assert policy.with_room(8) == parse_policy("h2o:budget=64,room=8") != policy
    assert policy.with_room(8).rule(0, "decode").trigger == OnOverflow(8)
    assert policy.with_room(8).with_budget(Tokens(9)).rule(0, "decode").trigger == OnOverflow(8)


def test_what_a_policy_asks_of_the_cache(file):
    policy = parse_policy(file(TABLE))
    assert policy.needs == {"mass", "keys"}
    assert parse_policy("full").needs == frozenset()
    assert [column.name for column in policy.columns(0)] == ["mass"], "once, though both phases keep it"
    assert policy.columns(11) == policy.columns(10) == ()
    assert [policy.per_head(layer) for layer in (0, 10, 11, 21)] == [True, False, True, False]


@pytest.mark.parametrize(("room", "cap", "target"), [(1, 20, 20), (8, 64, 57), (64, 20, 15), (16, 3, 3), (16, 4, 3)])
def test_a_trigger_makes_room_of_at_most_a_quarter(room, cap, target):
    assert OnOverflow(room).target(cap) == target
