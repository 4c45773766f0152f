import json

import pytest

from .conftest import WORDS, kvstrata

PROMPT = " ".join(WORDS * 3)


def test_it_streams_text_and_ends_with_the_line_of_figures(folder):
    done = kvstrata("run", "--model", folder, "--policy", "h2o:budget=8", "--prompt", PROMPT, "--max-new-tokens", 6)
    assert done.exit_code == 0, done.output
    assert "6 tokens" in done.stderr
    assert "of full" in done.stderr
    assert len(done.stdout.split()) == 6


def test_json_holds_the_figures_and_where_they_are_from(folder):
    done = kvstrata("run", "--model", folder, "--policy", "h2o:budget=8", "--max-new-tokens", 6, "--json", text=PROMPT)
    figures = json.loads(done.stdout)
    assert figures["new_tokens"] == 6
    assert figures["prompt_tokens"] == len(WORDS) * 3
    assert 0 < figures["live_bytes"] <= figures["held_bytes"] <= figures["peak_held_bytes"]
    assert {"torch", "transformers", "processor", "threads", "dtype"} <= figures.keys()


def test_comparison_feeds_every_policy_the_tokens_of_the_full_cache(folder, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    options = ("--policy", "h2o:budget=12", "--compare", "full,streaming,window:budget=400", "--max-new-tokens", 10)
    done = kvstrata("run", "--model", folder, "--prompt-file", prompt, *options, "--json")
    rows = {row["policy"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == ["full", "h2o:budget=12", "streaming", "window:budget=400"]
    assert rows["streaming"]["live_bytes"] == 3 * 12 * (2 * 2 * 16 * 4 + 4)  # the budget of --policy
    assert rows["window:budget=400"]["top1_agreement"] == 1.0
    assert rows["window:budget=400"]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert rows["streaming"]["mean_kl"] > 1e-4
    assert rows["full"]["share_of_full"] == 1.0
    table = kvstrata("run", "--model", folder, "--prompt-file", prompt, *options)
    assert "prompt visible when compressing" in " ".join(table.stdout.split())
    assert all(len(line) <= 80 for line in table.stdout.splitlines())


ERRORS = {
    "empty prompt": (("run", "--prompt", " "), "prompt is empty"),
    "two prompts": (("run", "--prompt", "a", "--prompt-file", "b"), "not both"),
    "no file": (("run", "--prompt-file", "/nowhere.txt"), "cannot read"),
    "policy": (("run", "--policy", "h20", "--prompt", "a"), "Did you mean 'h2o'"),
    "compare": (("run", "--compare", ",", "--prompt", "a"), "names no policy"),
    "model": (("run", "--model", "/nowhere", "--prompt", "a"), "cannot load"),
    "dtype": (("run", "--dtype", "float7", "--prompt", "a"), "float32, bfloat16"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_fix(arguments, message):
    done = kvstrata(*arguments)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_a_chat_template_is_asked_for_where_there_is_none(folder):
    done = kvstrata("run", "--model", folder, "--chat", "--prompt", "a truth")
    assert "no chat template" in str(done.exception)


def test_sampling_is_reproducible(folder):
    options = ("--model", folder, "--policy", "tova:budget=8", "--prompt", PROMPT, "--temperature", 1.5, "--json")
    texts = [json.loads(kvstrata("run", *options, "--seed", seed).stdout)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_ls_lists_every_preset_with_its_options():
    rows = {row["name"]: row for row in json.loads(kvstrata("ls", "--json").stdout)}
    assert {"full", "h2o", "snapkv"} <= rows.keys()
    assert "window=32" in rows["snapkv"]["options"]
    assert "arXiv" in rows["h2o"]["about"]
    assert "window-mass" in kvstrata("ls", "scorers").stdout


def test_one_token_has_no_time_per_token(folder):
    options = ("--model", folder, "--prompt", PROMPT, "--max-new-tokens", 1)
    assert json.loads(kvstrata("run", *options, "--json").stdout)["ms_per_token"] is None
    assert "ms/token" not in kvstrata("run", *options).stderr
