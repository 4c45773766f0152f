import json

import pytest

from kvstrata.cli.estimate import read_tokens
from kvstrata.core import InputError

from .conftest import WORDS, kvstrata

OPTIONS = ("--context", 54, "--new-tokens", 20, "--no-time")


def test_bytes_are_exactly_those_of_run(folder):
    done = kvstrata("estimate", "--model", folder, "--policy", "h2o:budget=16,snapkv:budget=50%", *OPTIONS, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["policy"] for row in rows] == ["full", "h2o:budget=16", "snapkv:budget=50%"]
    for row in rows:
        options = ("--policy", row["policy"], "--prompt", " ".join(WORDS * 3), "--max-new-tokens", 20, "--json")
        ran = json.loads(kvstrata("run", "--model", folder, *options).stdout)
        assert ran["prompt_tokens"] == 54
        for name in ("live_bytes", "held_bytes", "peak_held_bytes"):
            assert row[name] == ran[name]


def test_the_table_says_whether_it_pays(folder):
    done = kvstrata("estimate", "--model", folder, "--policy", "h2o:budget=16,confkv:high=8,low=16", *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "h2o:budget=16: memory: frees" in done.stdout
    assert "held where every step is confident" in done.stdout
    done = kvstrata(
        "estimate", "--model", folder, "--context", 20, "--no-time", "--new-tokens", 1, "--policy", "window:budget=20"
    )
    assert "weights dominate, so it hardly pays" in " ".join(done.stdout.split())


def test_times_are_measured_on_a_few_layers(folder):
    done = kvstrata("estimate", "--model", folder, "--context", 40, "--policy", "window:budget=8", "--json")
    assert done.exit_code == 0, done.output
    for row in json.loads(done.stdout)["rows"]:
        assert row["prefill_s"] > 0
        assert row["ms_per_token"] > 0


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("32k", 32768), ("1M", 1 << 20), (" 8K ", 8192)])
def test_reads_numbers_of_tokens(text, tokens):
    assert read_tokens(text) == tokens


@pytest.mark.parametrize("text", ["0", "", "many", "-5", "1.5k"])
def test_what_is_no_number_of_tokens_is_an_error_that_shows_the_form(text):
    with pytest.raises(InputError, match="32k"):
        read_tokens(text)


BAD = {
    "dtype": (("--dtype", "int3"), "choose one of"),
    "policy": (("--policy", "h20"), "Did you mean 'h2o'"),
    "budget": (("--policy", "h2o:budget=10B", "--no-time"), "give more"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_an_error_that_names_the_fix(folder, options, message):
    done = kvstrata("estimate", "--model", folder, *options)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_a_model_that_is_not_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a hub that is not there
    done = kvstrata("estimate", "--model", "nowhere/at-all", "--no-time")
    assert done.exit_code != 0
    assert "neither a local folder nor a hub id" in str(done.exception)
