"""Engines in processes of their own: how they are named, installed, started, asked and ended."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kvstrata.bench import peers
from kvstrata.bench.decode import Turns, check_peers, run_case, run_reference
from kvstrata.bench.peers import environments, parse_peers
from kvstrata.core import InputError

from ..contract.runs import prompt, tiny

TURNS = Turns(rounds=2, steps=2, limit=60.0)


def test_peers_are_written_as_policies_are():
    found = parse_peers("hf,openvino:cache=u4,evict=25%,kvpress:press=KnormPress,llamacpp")
    assert [spec.name for spec in found] == ["hf", "openvino", "kvpress", "llamacpp"]
    assert found[1].options == {"cache": "u4", "evict": "25%"}
    assert found[2].options == {"press": "KnormPress", "share": "25%"}
    assert found[1].text == "openvino:cache=u4,evict=25%"


BAD = {
    "vllm": "no peer named 'vllm'; there are: hf, repaired",
    "openvino:cache=u3": "choose cache from u8, u4",
    "openvino:evict=25": "no share of the prompt such as 25%",
    "kvpress:share=many%": "no share of the prompt",
    "hf:fast=yes": "not an option of hf; its options: none",
    "hf,hf": "names hf twice",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=BAD.keys())
def test_peers_that_cannot_be_are_refused(text, message):
    with pytest.raises(InputError) as error:
        parse_peers(text)
    assert message in str(error.value)


def test_peers_that_do_not_suit_are_refused_before_anything_is_loaded():
    with pytest.raises(InputError, match="runs on a CPU"):
        check_peers(parse_peers("openvino"), None, "cuda")
    with pytest.raises(InputError, match="demo model's weights only"):
        check_peers(parse_peers("llamacpp"), "some/model", "cpu")
    check_peers(parse_peers("hf,repaired"), "some/model", "cuda")


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from protocol import read_job, serve

class Counting:
    def __init__(self, job):
        print("a library says hello on standard output")
        self.tokens = [job["first"]] if "first" in job else [sum(job["ids"]) % 128]

    def step(self):
        if {broken}:
            raise SystemExit("the peer broke down")
        self.tokens.append(self.tokens[-1])

    def read(self):
        with open({reads!r}, "a") as file:
            file.write("read\\n")

    def about(self):
        return {{"cache_bytes": 1000 + len(self.tokens), "settings": {{"cache": "u8"}}}}

serve(Counting, read_job(), ["torch"])
"""


def peer_of(tmp_path, monkeypatch, broken=False):
    (tmp_path / "run_openvino.py").write_text(
        SCRIPT.format(here=str(peers.HERE), broken=broken, reads=str(tmp_path / "reads"))
    )
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setattr(peers, "environment", lambda name: sys.executable)


def reference():
    with ExitStack() as stack:
        return run_reference(tiny(), prompt(40), [], TURNS.most_steps, stack=stack)


def test_an_engine_in_a_process_of_its_own_takes_turns(tmp_path, monkeypatch):
    peer_of(tmp_path, monkeypatch)
    rows = run_case(tiny(), reference(), 2, parse_peers("hf,openvino"), TURNS)
    assert [row.name for row in rows] == ["hf", "full", "openvino"]
    assert rows[2].cache_bytes == 1006
    assert len(rows[2].ms) == 4
    assert rows[2].check is None
    assert rows[2].tokens_alike is not None
    assert rows[2].settings["cache"] == "u8"
    assert rows[2].settings["versions"]["torch"] == torch.__version__
    assert rows[2].prefill_s is None
    assert not (tmp_path / "reads").exists()


def test_an_engine_reads_the_prompt_as_often_as_asked(tmp_path, monkeypatch):
    peer_of(tmp_path, monkeypatch)
    *_, row = run_case(tiny(), reference(), 1, parse_peers("openvino"), replace(TURNS, prefill=3))
    assert row.prefill_s is not None
    assert (tmp_path / "reads").read_text() == "read\n" * 3


def test_an_engine_that_breaks_down_is_an_error_that_says_why(tmp_path, monkeypatch):
    peer_of(tmp_path, monkeypatch, broken=True)
    with pytest.raises(peers.PeerError, match="the peer broke down"):
        run_case(tiny(), reference(), 1, parse_peers("openvino"), TURNS)


def test_every_engine_has_a_script_and_an_environment():
    scripts = {path.stem.removeprefix("run_") for path in peers.HERE.glob("run_*.py")}
    assert scripts == set(environments.NEEDS) == set(peers.DEFAULTS) - {"hf", "repaired"}


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Calls of pip, none of which happens; those of `fails` fail."""
    calls, fails = [], []

    def run(command, **options):
        calls.append([str(part) for part in command[3:]])
        wrong = any(word in command for word in fails)
        return SimpleNamespace(returncode=int(wrong), stderr="WARNING: a\nERROR: no such release\n" if wrong else "")

    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    monkeypatch.setattr(environments.venv, "create", lambda folder, with_pip: folder.mkdir(parents=True))
    monkeypatch.setattr(subprocess, "run", run)
    return SimpleNamespace(calls=calls, fails=fails)


def test_an_environment_is_made_once_with_the_torch_that_runs_here(pip, tmp_path, capsys):
    python = environments.environment("openvino")
    assert python.parent.parent == tmp_path / "peers" / "openvino"
    assert f"torch=={torch.__version__}" in pip.calls[0]
    assert pip.calls[1][1:] == ["uninstall", "--yes", "torchvision"]
    assert "1.6 GB" in capsys.readouterr().err
    assert environments.environment("openvino") == python
    assert len(pip.calls) == 2


def test_an_environment_of_other_needs_or_half_made_is_made_again(pip, tmp_path):
    pip.fails.append("--no-deps")
    with pytest.raises(peers.PeerError, match="could not install llamacpp: ERROR: no such release"):
        environments.environment("llamacpp")
    pip.fails.clear()
    environments.environment("llamacpp")
    marker = tmp_path / "peers" / "llamacpp" / environments.INSTALLED
    marker.write_text("other needs")
    environments.environment("llamacpp")
    assert len(pip.calls) == 6
