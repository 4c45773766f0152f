"""Policies read in blocks, and what cannot be read so."""

from pathlib import Path

import pytest
from kvstrata_vllm.blocks import layer_classes, read_policy
from kvstrata_vllm.settings import Settings, read_settings

from kvstrata.core import SpecError
from kvstrata.policy import PRESETS

BLOCK, TOKEN_BYTES = 32, 1024


def classes(policy, layers=4, **more):
    return layer_classes(Settings(policy, **more), layers, BLOCK, TOKEN_BYTES)


def rule(policy, phase="decode"):
    (found,) = classes(policy)
    return found.rule(phase)


@pytest.mark.parametrize(
    ("policy", "seen", "blocks"),
    [
        ("h2o:budget=96", 1000, 3),
        ("h2o:budget=100", 1000, 3),
        ("h2o:budget=25%", 1000, 7),
        ("h2o:budget=25%", 40, 1),
        ("h2o:budget=512KiB", 1000, 4),
        ("h2o:budget=128KiB/layer", 1000, 4),
        ("confkv:high=64,low=128", 1000, 4),
    ],
)
def test_a_budget_in_tokens_is_so_many_whole_blocks(policy, seen, blocks):
    assert rule(policy).blocks(seen) == blocks


def test_confidence_chooses_the_level():
    found = rule("confkv:high=64,low=128,tau=0.7")
    assert (found.blocks(1000, 0.9), found.blocks(1000, 0.2), found.least(1000)) == (2, 4, 2)


def test_streaming_keeps_the_sinks_and_the_newest():
    assert rule("streaming:budget=96").victims(range(10), 330, 0.0, None) == [1, 2, 3, 4, 5, 6, 7]


def test_a_scored_policy_drops_the_worst_first_and_protects_half_of_its_budget():
    worth = [5.0, 0.0, 9.0, 1.0, 7.0, 0.0, 0.0, 0.0, 0.0]
    found = rule("h2o:budget=128").victims(range(8), 8 * BLOCK + 3, 0.0, worth)
    assert found == [1, 5, 3, 0]  # 6 and 7 hold tokens of the newest 64; 2 and 4 are the best of the rest


def test_gone_blocks_do_not_come_back():
    live = [0, 2, 5, 8, 9]
    assert rule("streaming:budget=96").victims(live, 10 * BLOCK, 0.0, None) == [2, 5]


def test_a_measured_number_that_is_none_goes_first():
    worth = [1.0, float("nan"), 2.0, 3.0]
    assert rule("tova:budget=64,recent=0").victims(range(4), 4 * BLOCK, 0.0, worth) == [1, 0]


def test_room_drops_more_at_once():
    keep_less = rule("h2o:budget=128,recent=0,room=33")
    assert keep_less.victims(range(5), 5 * BLOCK, 0.0, [4.0, 3.0, 2.0, 1.0, 0.0]) == [4, 3]


def test_snapkv_leaves_what_is_generated():
    (found,) = classes("snapkv:budget=64")
    assert found.prefill is not None
    assert found.decode is None


@pytest.mark.parametrize(
    "policy", ["streaming:budget=64", "h2o:budget=25%", "snapkv:budget=64", "confkv:high=64,low=128"]
)
@pytest.mark.parametrize("lag", [0, 1])
def test_the_peak_is_never_more_than_everything(policy, lag):
    (found,) = classes(policy)
    for tokens in (1, 31, 32, 33, 500, 4000):
        assert 1 <= found.longest(tokens, 64, lag) <= -(-tokens // BLOCK)


def test_the_peak_of_a_long_request_is_the_budget_and_two_steps():
    (found,) = classes("streaming:budget=64")
    assert found.longest(4000, 64, 1) == 2 + 2 * 3  # two blocks, and two steps of two blocks and a part each
    assert found.peak(4000, 0, 64, 0) == 2 + 3


def test_classes_split_the_depth():
    assert [found.layers for found in classes("h2o:budget=64", layers=5, classes=2)] == [(0, 1, 2), (3, 4)]


def strategy(tmp_path, *lines):
    path = tmp_path / "plan.yaml"
    head = "polykv: 1\nmodel: {name: m, layers: 4, kv_heads: 2}\npolicy:\n  plan:\n"
    path.write_text(head + "".join(f"    {line}\n" for line in lines))
    return f"polykv:{path}"


def test_a_strategy_makes_a_class_of_layers_that_are_alike(tmp_path):
    one, other = "{pattern: h2o, budget: 64}", "{pattern: streaming, budget: 96}"
    text = strategy(
        tmp_path,
        f"L0: {{prefill: {one}, decode: full}}",
        f"L1-L2: {{prefill: {other}, decode: {one}}}",
        f"L3: {{prefill: {one}, decode: full}}",
    )
    found = classes(text)
    assert [c.layers for c in found] == [(0, 3), (1, 2)]
    assert [len(c.measured) for c in found] == [1, 1]
    with pytest.raises(SpecError, match="is for a model of 4 layers, and this one has 5"):
        classes(text, layers=5)
    with pytest.raises(SpecError, match="says itself which layers differ"):
        classes(text, classes=2)


def test_a_strategy_with_too_many_ways_is_refused(tmp_path):
    lines = [f"L{i}: {{prefill: {{pattern: h2o, budget: {64 + 32 * i}}}, decode: full}}" for i in range(4)]
    assert len(classes(strategy(tmp_path, *lines))) == 4
    path = Path(strategy(tmp_path, *lines).removeprefix("polykv:"))
    more = path.read_text().replace("layers: 4", "layers: 5")
    path.write_text(more + "    L4: {prefill: {pattern: tova, budget: 64}, decode: full}\n")
    with pytest.raises(SpecError, match=r"in 5 ways, and vLLM can hold 4.*fewer patterns"):
        classes(f"polykv:{path}", layers=5)


def test_a_pattern_that_repeats_the_context_is_refused(tmp_path):
    line = "L0-L3: {prefill: {pattern: echo-head, budget: 64}, decode: full}"
    with pytest.raises(SpecError, match="pattern echo-head cannot run in vLLM: it needs queries of a repeated context"):
        classes(strategy(tmp_path, line))


@pytest.mark.parametrize("pattern", ["cam", "d2o"])
def test_a_pattern_that_merges_is_refused(tmp_path, pattern):
    line = f"L0-L3: {{prefill: {{pattern: {pattern}, budget: 64}}, decode: full}}"
    with pytest.raises(SpecError, match=f"pattern {pattern} cannot run in vLLM: it adds what is dropped"):
        classes(strategy(tmp_path, line))


RUN = {
    *("window", "streaming", "random", "keynorm", "keydiff", "h2o", "tova", "snapkv", "scissorhands"),
    *("qevict", "confkv", "confkv+"),
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_or_is_refused_by_name(name):
    if name in RUN:
        assert classes(name)
    else:
        with pytest.raises(SpecError, match=name.replace("+", r"\+")):
            classes(name)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("h2o:codec=int8", r"h2o cannot have codec= in vLLM: .*--kv-cache-dtype fp8"),
        ("h2o:codec=int8,exact=64", r"h2o cannot have codec="),
        ("h2o:heads=f.json", r"h2o cannot have heads= in vLLM: it does not apply: all heads share"),
        ("qevict:window=16", r"qevict cannot have window= .*choose its size with --block-size"),
        ("qevict:split=0.2", r"qevict cannot have split="),
        ("qevict:every=4", r"qevict cannot have every="),
        ("qevict:score=routing-only", r"qevict cannot have score="),
        ("confkv:window=64", r"confkv cannot have window= in vLLM: it is about entries in INT8"),
        ("confkv:demote=16", r"confkv cannot have demote="),
        ("confkv:signal_logits=processed", r"confkv cannot have signal_logits="),
        ("h2o:budget=64/32", r"budget=64/32 is per head"),
        ("h2o:budget=8MiB/cache", r"give bytes per sequence"),
        ("h2o:budget=16", r"budget=16 is less than a block of 32 tokens: give 32 or more"),
        ("confkv:high=16,low=128", r"is less than a block of 32"),
        ("mine.yaml", r"vLLM takes a policy's text"),
        ("h2o:budgt=5", r"Did you mean 'budget'"),
        ("h3o", r"no policy named 'h3o'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(policy, message):
    with pytest.raises(SpecError, match=message):
        classes(policy)


def test_an_option_that_can_be_had_is_read():
    assert read_policy(Settings("h2o:budget=64,sinks=4,recent=8,room=4"))[0] == "h2o"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kvstrata": 5}, r"write a policy"),
        ({"kvstrata": {}}, r"needs the key 'policy'"),
        ({"kvstrata": {"policy": "h2o", "lags": 1}}, r"Did you mean 'lag'"),
        ({"kvstrata": {"policy": "h2o", "lag": 2}}, r"lag=2: give 1"),
        ({"kvstrata": {"policy": "h2o", "classes": 5}}, r"classes=5: give 1 to 4"),
        ({"kvstrata": {"policy": "h2o", "classes": True}}, r"classes=True"),
        ({"kvstrata": {"policy": " "}}, r"write a policy"),
        ({"kvstrata": {"policy": "h2o", "log": 3}}, r"log=3: give the path"),
    ],
)
def test_a_wrong_configuration_names_the_fix(given, message):
    with pytest.raises(SpecError, match=message):
        read_settings(given)


@pytest.mark.parametrize("given", [None, {}, {"other": 1}, "text"])
def test_no_configuration_is_none(given):
    assert read_settings(given) is None
