"""PolyKV: signals equal runs of the whole model, strategies are read strictly and run as their patterns."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from typer.testing import CliRunner

import kvstrata
from kvstrata.calibrate.construct import construct
from kvstrata.calibrate.polykv import Asked, _alone, collect, local_signals, loss_signals
from kvstrata.cli import app
from kvstrata.core import SpecError
from kvstrata.evaluate.steps import attention_outputs
from kvstrata.hf.files import identity
from kvstrata.policy import PRESETS, parse_policy
from kvstrata.policy.budget import Tokens
from kvstrata.policy.policy import LayerRange, Policy
from kvstrata.policy.strategy import (
    PATTERNS,
    SHIPPED,
    Choice,
    Strategy,
    pattern_rule,
    read_strategy,
    strategy_file,
    write_strategy,
)

from ..contract.runs import feed, kv, prompt, tiny

PROMPT, MORE, BUDGET = prompt(90)[0].tolist(), prompt(12, seed=4)[0].tolist(), 24
LAYERS = 3


def outputs(policy, steps):
    """What each layer's attention module gives over the continuation, [L][C, hidden], and the logits."""
    with kvstrata.compress(tiny(), policy) as cache, torch.no_grad():
        tiny()(torch.tensor([PROMPT]), **kv(cache))
        parts = []
        with attention_outputs(tiny()) as found:
            for part in [MORE] if not steps else [[token] for token in MORE]:
                found.clear()
                logits = tiny()(torch.tensor([part]), **kv(cache)).logits
                parts.append([out[0].clone() for out in found])
        return [torch.cat(layer) for layer in zip(*parts, strict=True)], logits


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_local_signals_are_those_of_runs_with_one_layer_perturbed(phase):
    found = local_signals(tiny(), PROMPT, MORE, Asked(PATTERNS, BUDGET, (phase,)))
    full, _ = outputs("full", phase == "decode")
    for name in PATTERNS:
        rule = pattern_rule(name, BUDGET, phase)
        for layer in range(LAYERS):
            sides = (rule, None) if phase == "prefill" else (None, rule)
            before = (LayerRange(None, None, 0, layer - 1),) if layer else ()
            after = (LayerRange(None, None, layer + 1),) if layer < LAYERS - 1 else ()
            policy = Policy("one", (*before, LayerRange(*sides, layer, layer), *after))
            mine, _ = outputs(policy, phase == "decode")
            cosine = torch.nn.functional.cosine_similarity(full[layer], mine[layer], dim=-1).mean()
            assert found["cosine"][phase][name][layer] == pytest.approx(float(cosine), abs=2e-4), (name, layer)
            assert found["cosine"][phase][name][layer] < 1 - 1e-5


def test_a_budget_that_holds_all_changes_nothing():
    found = local_signals(tiny(), PROMPT, MORE, Asked(("h2o", "snapkv"), 500))
    assert [x for column in found["cosine"]["prefill"].values() for x in column] == pytest.approx([1.0] * 6, abs=1e-5)
    table = loss_signals(tiny(), PROMPT, MORE, Asked(("h2o",), 500))
    assert table["prefill"]["h2o"] == pytest.approx([0.0] * 3, abs=1e-5)


def test_losses_are_those_of_runs_with_one_layer_perturbed():
    table = loss_signals(tiny(), PROMPT, MORE, Asked(("streaming", "keydiff"), BUDGET))
    target = torch.tensor(MORE[1:])

    def nats(policy):
        logits = outputs(policy, False)[1][0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, target))

    for name in ("streaming", "keydiff"):
        for layer in range(LAYERS):
            true = nats(_alone(pattern_rule(name, BUDGET), layer)) - nats("full")
            assert table["prefill"][name][layer] == pytest.approx(true, abs=1e-4)


@torch.no_grad()
def test_entropies_by_whole_attention_matrices():
    model = tiny()
    found = local_signals(model, PROMPT, MORE, Asked(("h2o",), BUDGET))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    every = model(torch.tensor([PROMPT + MORE]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    for layer, p in enumerate(every):
        rows = p[0, :, -len(MORE) :].double()
        assert found["entropy"][layer] == pytest.approx(float(torch.special.entr(rows.mean((0, 1))).sum()), abs=1e-3)
        assert found["entropies"][layer] == pytest.approx(float(torch.special.entr(rows).sum(-1).mean()), abs=1e-3)


def test_a_stopped_run_goes_on_and_gives_the_same(tmp_path):
    asked, documents = Asked(("h2o", "streaming"), BUDGET), [PROMPT + MORE, prompt(102, seed=9)[0].tolist()]
    with pytest.raises(KeyboardInterrupt):
        collect(tiny(), documents, 12, asked, ["cosine"], tmp_path, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    (left,) = tmp_path.glob("*.json")
    stamp = left.stat().st_mtime_ns
    found = collect(tiny(), documents, 12, asked, ["cosine"], tmp_path)
    assert left.stat().st_mtime_ns == stamp
    assert found == collect(tiny(), documents, 12, asked, ["cosine"], tmp_path / "again")
    one = json.loads(left.read_text())
    assert found["cosine"]["entropy"][0] != one["entropy"][0], "a mean over documents"


SIGNALS = {
    "cosine": {
        "cosine": {"prefill": {"h2o": [0.9, 0.5, 0.7], "tova": [0.8, 0.9, 0.71]}},
        "entropy": [3.0, 1.0, 2.0],
        "entropies": [1.0, 1.0, 1.0],
    },
    "ppl": {"prefill": {"h2o": [0.1, 0.4, -0.1], "tova": [0.2, 0.0, 0.0]}},
}


def test_strategies_from_signals_by_hand():
    def made(**options):
        side = construct(SIGNALS, 100, options.pop("signal", "cosine"), options.pop("by", "uniform"), {}, **options)
        return [(c.pattern, c.budget) for c in side.prefill], {c.pattern for c in side.decode}

    assert made() == ([("h2o", 100), ("tova", 100), ("tova", 100)], {"full"})
    assert made(margin=0.05)[0] == [("h2o", 100), ("tova", 100), ("tova", 100)]
    assert made(margin=0.2)[0] == [("tova", 100)] * 3, "tova is best on average"
    assert made(signal="ppl")[0] == [("h2o", 100), ("tova", 100), ("h2o", 100)]
    by_entropy = [b for _, b in made(by="entropy")[0]]
    assert by_entropy == [36 + 96, 36 + 32, 36 + 64]
    assert [b for _, b in made(by="ppl")[0]] == [36 + 60, 36 + 132, 36], "e^0.2 - 1 to e^0.4 - 1"
    turned = made(by="entropy", turned=True)[0]
    assert turned == [("tova", 68), ("h2o", 132), ("h2o", 100)]


def strategy(model=None):
    head = {"model": {"name": "tiny", "layers": 3, "kv_heads": 2, **({"identity": model} if model else {})}}
    choices = (Choice("h2o", 20), Choice("h2o", 20), Choice("snapkv", 44))
    return Strategy(
        choices, (Choice("full"), Choice("tova", 20), Choice("full")), {**head, "budget": {"prefill_total": 84}}
    )


def test_a_file_comes_back_as_it_was_and_is_short(tmp_path):
    write_strategy(tmp_path / "s.yaml", strategy(), {"cosine": [[0.5]]})
    assert read_strategy(tmp_path / "s.yaml") == strategy()
    plan = yaml.safe_load((tmp_path / "s.yaml").read_text())["policy"]["plan"]
    assert list(plan) == ["L0", "L1", "L2"]
    alike = Strategy((Choice("h2o", 9),) * 3, (Choice("full"),) * 3, strategy().about | {"budget": {}})
    write_strategy(tmp_path / "t.yaml", alike)
    assert list(yaml.safe_load((tmp_path / "t.yaml").read_text())["policy"]["plan"]) == ["L0-L2"]
    assert len(read_strategy(tmp_path / "t.yaml").policy().table) == 1


TEXT = """polykv: 1
model: {name: tiny, layers: 3}
budget: {prefill_total: 60}
policy:
  plan:
    L0-L1: {prefill: {pattern: h2o, budget: 20}, decode: full}
    L2: {prefill: {pattern: tova, budget: 20}, decode: full}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("polykv: 1", "polykv: 2", "line 1: polykv must be 1"),
        ("L0-L1", "L0", "line 5: no line for layer 1"),
        ("L2:", "L1-L2:", "line 7: layer 1 stands in two lines"),
        ("L2:", "L3:", "line 7: 'L3' does not lie in layers L0-L2"),
        ("L2:", "2:", "line 7: cannot read the layers '2'"),
        (
            "budget: 20}, decode: full}\n    L2",
            "budget: 21}, decode: full}\n    L2",
            "line 3: prefill_total is 60.*sum to 62",
        ),
        ("pattern: tova", "pattern: nova", "line 7: no pattern named 'nova'. There are: streaming"),
        ("tova, budget: 20", "tova, budget: 0", "line 7: L2, prefill: write full, or"),
        ("decode: full}\n    L2", "decod: full}\n    L2", "line 6: L0-L1 needs exactly"),
        ("layers: 3", "layers: three", "line 2: model.layers must be"),
        ("L2:", "L0-L1:", "'L0-L1' is given twice in line 6"),
        ("model:", "modle:", "line 2: unknown key 'modle'"),
        ("  plan:\n", "  plan: []\n  more:\n", "line 5|line 4|line 6"),
    ],
)
def test_files_that_are_not_right_are_refused_with_the_line(tmp_path, old, new, message):
    assert TEXT.count(old) == 1
    (tmp_path / "s.yaml").write_text(TEXT.replace(old, new))
    with pytest.raises(SpecError, match=message):
        read_strategy(tmp_path / "s.yaml")


def test_a_missing_file_says_how_to_make_one(tmp_path):
    with pytest.raises(SpecError, match="calibrate polykv"):
        parse_policy(f"polykv:{tmp_path}/none.yaml")


@torch.no_grad()
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_can_be_named_in_both_phases(tmp_path, name):
    """As PolyKV's candidates (section 4.1) and ours; each is its preset's rule of the phase under the file's budget."""
    side = (Choice(name, 24), Choice(name, 20), Choice("full"))
    write_strategy(tmp_path / "s.yaml", Strategy(side, side, {"model": {"layers": 3}}))
    policy = parse_policy(f"polykv:{tmp_path / 's.yaml'}")
    preset = PRESETS[name]()
    for phase in ("prefill", "decode"):
        own = preset.rule(0, phase) or preset.rule(0, "prefill")
        assert policy.rule(0, phase) == replace(own, budget=Tokens(24))
        assert policy.rule(2, phase) is None
    assert not policy.at_step_end, "its own budget rule does not count"
    with kvstrata.compress(tiny(), policy) as cache:
        assert feed(tiny(), torch.tensor([PROMPT + MORE]), cache, (len(PROMPT),)).isfinite().all()
        room = policy.rule(0, "decode").trigger.room
        assert all(most - room < len(cache.entries(layer)) <= most for layer, most in enumerate((24, 20)))
        assert len(cache.entries(2)) == len(PROMPT + MORE)


def test_the_candidates_of_the_paper_are_there():
    papers = {"h2o", "tova", "cam", "pyramidkv", "snapkv", "d2o", "cake", "scissorhands", "streaming"}
    assert papers <= set(PATTERNS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["h2o", "snapkv", "streaming", "echo-head", "cake", "cam", "d2o"])
def test_one_pattern_everywhere_is_that_preset(tmp_path, name):
    full = (Choice("full"),) * 3
    alike = Strategy((Choice(name, 24),) * 3, full, {"model": {"layers": 3}})
    write_strategy(tmp_path / "s.yaml", alike)
    ids = torch.tensor([PROMPT + MORE])
    policy = Policy.everywhere("plain", pattern_rule(name, 24), None)
    found = []
    for spec in (f"polykv:{tmp_path / 's.yaml'}", policy):
        with kvstrata.compress(tiny(), spec) as cache:
            found.append(feed(tiny(), ids, cache, [90]))
    assert torch.equal(*found)


@torch.no_grad()
def test_memory_follows_the_layers_budgets_and_other_models_are_refused(tmp_path):
    write_strategy(tmp_path / "s.yaml", strategy(identity(tiny())))
    with kvstrata.compress(tiny(), f"polykv:{tmp_path / 's.yaml'}") as cache:
        feed(tiny(), torch.tensor([PROMPT + MORE]), cache, [90])
        assert [len(cache.entries(layer)) for layer in range(3)] == [32, 20, 56]
    with pytest.raises(SpecError, match="another model"):
        kvstrata.compress(tiny("qwen2"), f"polykv:{tmp_path / 's.yaml'}").__enter__()
    (tmp_path / "four.yaml").write_text(
        TEXT.replace("layers: 3", "layers: 4").replace("L2:", "L2-L3:").replace("60", "80")
    )
    with pytest.raises(SpecError, match="for 4 layers, but the model has 3"):
        kvstrata.compress(tiny(), f"polykv:{tmp_path / 'four.yaml'}").__enter__()


@pytest.mark.parametrize("mean", SHIPPED)
def test_shipped_strategies_are_the_demo_model_s_and_keep_their_mean(mean):
    found = read_strategy(strategy_file(f"polykv:{mean}"))
    assert len(found.prefill) == 30
    assert sum(choice.budget for choice in found.prefill) == 30 * int(mean)
    assert {choice.pattern for choice in found.decode} == {"full"}
    assert len({choice.pattern for choice in found.prefill}) > 1
    policy = parse_policy(f"polykv:{mean}")
    with pytest.raises(SpecError, match="another model"):
        kvstrata.compress(tiny(), policy).__enter__()
    listed = CliRunner().invoke(app, ["ls", f"polykv:{mean}", "--json"])
    assert len(json.loads(listed.output)) == 30


@torch.no_grad()
def test_a_decode_pattern_begins_with_what_the_prompt_s_last_queries_gave(tmp_path):
    about = {"model": {"layers": 3}}
    write_strategy(tmp_path / "s.yaml", Strategy((Choice("snapkv", 40),) * 3, (Choice("h2o", 40),) * 3, about))
    with kvstrata.compress(tiny(), f"polykv:{tmp_path / 's.yaml'}") as cache:
        tiny()(torch.tensor([PROMPT]), **kv(cache))
        store = cache.strata[1].store
        sums = store.column("mass")[0, 0][store.valid()[0, 0]]
        assert len(sums) == 40
        assert 8 < float(sums.sum()) < 32, "32 queries gave one each, a part of it to what is left"
        feed(tiny(), torch.tensor([MORE]), cache, [])
        assert len(cache.entries(1)) == 40
    plain = "h2o:budget=40"
    with kvstrata.compress(tiny(), plain) as cache:
        tiny()(torch.tensor([PROMPT]), **kv(cache))
        store = cache.strata[1].store
        assert float(store.column("mass")[0, 0].sum()) > 40, "the same pattern goes on with its own sums"
