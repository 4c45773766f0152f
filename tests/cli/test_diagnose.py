import json

import pytest

from .conftest import WORDS, kvstrata


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS * 40))
    return path


POLICIES = "qevict:budget=40%,recent=8,window=4,every=4", "window:budget=30%"
SMALL = ("--documents", 2, "--length", 60, "--steps", 40)


def test_figures_pictures_and_a_table(folder, text, tmp_path):
    done = kvstrata(
        *("diagnose", "fmm,reactivation,churn", "--model", folder, "--text", text, *SMALL),
        *("--policy", ",".join(POLICIES), "--local", 8, "--out", tmp_path / "out"),
    )
    assert done.exit_code == 0, done.output
    for kind in ("fmm", "reactivation", "churn"):
        record = json.loads((tmp_path / "out" / f"{kind}.json").read_text())
        assert record[kind].keys() == {*POLICIES}
        assert record["steps"] == 40
        assert (tmp_path / "out" / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
    fmm = json.loads((tmp_path / "out" / "fmm.json").read_text())["fmm"]["window:budget=30%"]
    assert 0 < fmm["8"]["low"] <= fmm["8"]["mean"] <= fmm["8"]["high"] < 1
    assert fmm["64"]["mean"] is None, "no event has as many steps after it"


def test_nothing_is_missed_at_a_full_budget(folder, text, tmp_path):
    done = kvstrata(
        *("diagnose", "fmm,churn", "--model", folder, "--text", text, *SMALL, "--policy", "full", "--json"),
        *("--out", tmp_path / "out"),
    )
    record = json.loads(done.stdout)
    assert record["fmm"]["full"]["8"]["mean"] == 0


def test_confidence_and_isolation(folder, text, tmp_path):
    done = kvstrata(
        *("diagnose", "confidence,isolation", "--model", folder, "--text", text, "--documents", 2, "--length", 330),
        *("--steps", 20, "--samples", 12, "--policy", "confkv:high=20,low=40,tau=0.31", "--out", tmp_path / "out"),
    )
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "confidence.json").read_text())["confidence"]
    assert len(record["samples"]) == 12
    assert record["ablations"]["4 sinks and 32"]["mean_kl"] >= 0
    rows = json.loads((tmp_path / "out" / "isolation.json").read_text())["isolation"]["confkv:high=20,low=40,tau=0.31"]
    assert len({row["evicted"] for name, row in rows.items() if name != "full"}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fmm,lir",), "no diagnostic named 'lir'"),
        (("fmm", "--documents", 99), "fewer --documents"),
        (("fmm", "--policy", "h3o"), "no policy named 'h3o'"),
        (("isolation", "--policy", "h2o", *SMALL), "does not follow confidence"),
        (("confidence", "--own-words", "--length", 32, "--steps", 16), "larger --length"),
    ],
)
def test_what_cannot_be_diagnosed_is_an_error_that_helps(folder, text, tmp_path, arguments, message):
    done = kvstrata("diagnose", *arguments, "--model", folder, "--text", text, "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_tau_is_the_confidence_that_a_share_of_the_steps_reaches(folder, text):
    options = ("--model", folder, "--text", text, "--documents", 2, "--length", 100, "--json")
    found = [json.loads(kvstrata("calibrate", "tau", *options, "--rate", rate).stdout) for rate in (0.2, 0.42, 0.8)]
    assert [round(one["rate"], 1) for one in found] == [0.2, 0.4, 0.8]
    assert found[0]["tau"] > found[1]["tau"] > found[2]["tau"]
    assert found[0]["steps"] == 200
    done = kvstrata("calibrate", "tau", *options[:-1], "--rate", 1.5)
    assert "between 0 and 1" in str(done.exception)
