"""`kvstrata evaluate` from the command line."""

import json

import pytest

from ..cli.conftest import kvstrata

pytestmark = pytest.mark.extras  # whole runs, a minute together


def evaluate(folder, out, *more, **options):
    given = {"--model": folder, "--policy": "h2o", "--budget": "50%", "--task": "copy", "--out": out}
    given |= {"--contexts": 2, "--length": 512, **options}
    pairs = [part for pair in given.items() for part in pair]
    return kvstrata("evaluate", *pairs, *more)


def test_it_prints_the_table_and_show_prints_it_again_and_draws(folder, tmp_path):
    done = evaluate(folder, tmp_path / "r")
    assert done.exit_code == 0, done.exception
    assert "copy: 2 contexts of 512 tokens, question not visible" in " ".join(done.stdout.split())
    for name in ("full", "h2o", "random"):
        assert name in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    again = kvstrata("evaluate", "show", tmp_path / "r", "--figures", tmp_path / "figures")
    assert again.stdout == done.stdout
    assert sorted(path.suffix for path in (tmp_path / "figures").iterdir()) == [".png", ".svg"]


def test_json_has_the_figures_with_their_intervals(folder, tmp_path):
    (table,) = json.loads(evaluate(folder, tmp_path, "--json").stdout)
    rows = {row["policy"]: row for row in table["rows"]}
    assert rows["full"]["share_held"] == 1.0
    assert 0.3 < rows["h2o"]["share_held"] <= 0.5
    assert set(rows["h2o"]["figures"]["exact"]) == {"mean", "low", "high", "n"}


def test_a_grid_over_length_and_depth_is_drawn(folder, tmp_path):
    done = evaluate(folder, tmp_path / "r", "--no-controls", **{"--task": "niah", "--contexts": 1, "--length": 1200})
    assert done.exit_code == 0, done.exception
    kvstrata("evaluate", "show", tmp_path / "r", "--figures", tmp_path / "figures")
    assert [p for p in (tmp_path / "figures").iterdir() if p.name.endswith("-grid.png")]


def test_a_dry_run_says_what_it_would_cost_and_runs_nothing(folder, tmp_path):
    done = evaluate(folder, tmp_path / "r", "--dry-run", **{"--task": "copy,ppl"})
    assert done.exit_code == 0, done.exception
    assert "prompts, read for all" in done.stdout
    assert not list((tmp_path / "r").rglob("*.json*"))
    costs = json.loads(evaluate(folder, tmp_path / "r", "--dry-run", "--json").stdout)
    assert {cost["policy"] for cost in costs} >= {"full", "h2o @ 50%", "random @ 50%"}
    assert all(cost["seconds"] > 0 for cost in costs)


def test_the_question_may_be_visible(folder, tmp_path):
    done = evaluate(folder, tmp_path, "--no-controls", **{"--scope": "prompt"})
    assert "question visible when compressing" in " ".join(done.stdout.split())


BAD = {
    "task": ({"--task": "needel"}, "Did you mean 'needle'"),
    "no task": ({"--task": ","}, "names no task"),
    "policy": ({"--policy": "h20"}, "Did you mean 'h2o'"),
    "scope": ({"--scope": "all"}, "choose context or prompt"),
    "length": ({"--length": 4000}, "made for 2048"),
    "peer": ({"--peers": "vllm"}, "no peer named 'vllm'"),
    "option of a peer": ({"--peers": "kvpress:speed=1"}, "is not an option of kvpress"),
    "peers without a task": ({"--peers": "kvpress", "--task": "ruler-vt", "--length": 1500}, "none of these tasks"),
    "jobs of the harness": ({"--lm-eval": "gsm8k", "--jobs": 2}, "leave out"),
    "folder": ({"--out": "/proc/nowhere"}, "cannot write results"),
    "haystack": ({"--task": "needle", "--haystack": "/nowhere"}, "cannot read /nowhere"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_names_the_fix(folder, tmp_path, options, message):
    given = {"--model": folder, "--out": tmp_path, "--contexts": 1, "--length": 512, **options}
    done = kvstrata("evaluate", *[part for pair in given.items() for part in pair])
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_a_folder_without_results_says_so(tmp_path):
    assert "holds no results" in str(kvstrata("evaluate", "show", tmp_path).exception)
