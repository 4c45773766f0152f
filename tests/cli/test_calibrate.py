"""`kvstrata calibrate` and what its files are used for, on a tiny model."""

import json

import pytest

from kvstrata.policy import parse_policy
from kvstrata.policy.surrogate import read_surrogate

from .conftest import WORDS, kvstrata


@pytest.fixture
def text(tmp_path):
    (tmp_path / "book.txt").write_text(" ".join(WORDS[i * i % len(WORDS)] for i in range(900)))
    return tmp_path / "book.txt"


def test_texts_of_one_name_are_not_told_apart(folder, text, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / text.name).write_text(text.read_text())
    both = ("--text", text, "--text", tmp_path / "other" / text.name)
    done = kvstrata("calibrate", "heads", "--model", folder, *both, "--out", tmp_path / "heads.json")
    assert "another text is named book.txt" in str(done.exception)


def test_heads(folder, text, tmp_path):
    out = tmp_path / "heads.json"
    options = ("--model", folder, "--text", text, "--documents", 2, "--length", 100, "--levels", "25%,50%")
    done = kvstrata("calibrate", "heads", *options, "--out", out)
    assert "25% kept: heads keep" in done.stdout
    assert set(json.loads(out.read_text())["levels"]) == {"0.25", "0.5"}
    parse_policy(f"snapkv:budget=25%,heads={out}")
    for bad, message in (
        (("--scorer", "h2o"), "take one whose heads share a budget"),
        (("--levels", "20"), "give a share of all entries"),
    ):
        assert message in str(kvstrata("calibrate", "heads", *options, "--out", out, *bad).exception)
    assert "nothing to read" in str(kvstrata("calibrate", "heads", "--model", folder, "--out", out).exception)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_kvzap(folder, text, tmp_path, kind):
    out = tmp_path / "zap"
    options = ("--model", folder, "--text", text, "--documents", 4, "--length", 80, "--per-document", 30, "--out", out)
    done = kvstrata("calibrate", "kvzap", *options, "--kind", kind)
    assert "R^2" in done.stdout
    found = read_surrogate(out)
    assert (found.width, found.num_heads, len(found.layers)) == (64, 2, 3)
    assert found.config["data"][0]["name"] == "book.txt"
    run = kvstrata(
        "run", "--model", folder, "--prompt-file", text, "--policy", f"kvzap:file={out},budget=50%", "--json"
    )
    assert run.exit_code == 0, run.exception
    again = kvstrata("calibrate", "kvzap", *options[:-4], "--per-document", 20, "--out", out, "--kind", kind)
    assert "pairs of another model, text or size" in str(again.exception)


def test_polykv(folder, text, tmp_path):
    out = tmp_path / "strategy.yaml"
    options = ("--model", folder, "--text", text, "--documents", 2, "--length", 80, "--continuation", 8, "--out", out)
    done = kvstrata("calibrate", "polykv", *options, "--budget", 40, "--allocate", "entropy", "--signal", "ppl")
    assert "40 on average" in done.stdout, done.exception
    parse_policy(f"polykv:{out}")
    shown = kvstrata("ls", out, "--plot", tmp_path / "s.png")
    assert "tokens" in shown.stdout
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads(kvstrata("ls", out, "--json").stdout)) == 3
    run = kvstrata("run", "--model", folder, "--prompt-file", text, "--policy", f"polykv:{out}", "--json")
    assert run.exit_code == 0, run.exception
    patterns = ("--patterns", "streaming,h2o,tova,snapkv,pyramidkv,scissorhands,cake,cam,d2o", "--decode")
    every = (*options[:-1], tmp_path / "every.yaml")
    assert kvstrata("calibrate", "polykv", *every, "--budget", 40, *patterns).exit_code == 0
    parse_policy(f"polykv:{tmp_path / 'every.yaml'}")
    assert "cam" in kvstrata("ls", "merges").stdout
    other = kvstrata("calibrate", "polykv", *options, "--budget", 41)
    assert "another --out" in str(other.exception)
    assert "no pattern named 'nova'" in str(kvstrata("calibrate", "polykv", *options, "--patterns", "nova").exception)
    assert "presets" in str(kvstrata("ls", "nothing").exception)
