"""What a policy's files say is part of a result, and none of them was made from what it is judged on."""

import gzip
import json

import pytest
import torch

from kvstrata.bench.counting import KvShape
from kvstrata.core import InputError
from kvstrata.evaluate.content import check_unread, content
from kvstrata.evaluate.equal import held, resolve
from kvstrata.evaluate.grid import ask
from kvstrata.evaluate.result import Results
from kvstrata.evaluate.run import plan
from kvstrata.evaluate.task import Settings, choose
from kvstrata.evaluate.texts import digest
from kvstrata.policy import parse_policy
from kvstrata.policy.surrogate import write_surrogate

from .conftest import worker

SHAPE = KvShape(tuple(range(30)), 3, 64, torch.float32)


@pytest.fixture
def surrogate(tmp_path):
    def write(value, text="trained on this"):
        weights = [[torch.full((2, 64), value), torch.zeros(2)] for _ in range(3)]
        write_surrogate(tmp_path / "zap", weights, {"data": [{"name": "a", "sha256": digest(text)}]})
        return f"kvzap:file={tmp_path / 'zap'},budget=25%"

    return write


def heads(path, share, data=()):
    level = {"kept": [[share, share]] * 3}
    path.write_text(json.dumps({"format": 1, "model": "", "data": list(data), "levels": {"0.25": level}}))
    return f"snapkv:heads={path}"


def test_the_content_of_a_policy_follows_its_files(surrogate, tmp_path):
    assert content("h2o:budget=25%") is None
    assert content("kvzap") is not None, "the shipped one can change with a release"
    first = content(surrogate(1.0))
    assert content(surrogate(1.0)) == first
    assert content(surrogate(2.0)) != first
    other = content(heads(tmp_path / "heads.json", 0.25))
    assert content(heads(tmp_path / "heads.json", 0.2)) != other
    file = tmp_path / "mine.yaml"
    file.write_text(f"policy: kvzap\nfile: {tmp_path / 'zap'}\n")
    named = content(str(file))
    surrogate(3.0)
    assert content(str(file)) != named
    assert content("polykv:256") != content("polykv:128")
    assert content("qevict:heads=each") is None, "an option of its own, no file"


def test_what_a_policy_was_made_from_is_no_haystack(surrogate, folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 200)
    mine, read = surrogate(1.0, text.read_text()), {digest(text.read_text())}
    check_unread(mine, {digest("another")})
    with pytest.raises(InputError, match="made from a text"):
        check_unread(mine, read)
    for name in ("heads.json", "heads"):  # whatever it is called, and where another file names it
        shared = heads(tmp_path / name, 0.25, [{"name": "a", "sha256": digest(text.read_text())}])
        file = tmp_path / "mine.yaml"
        file.write_text(f"policy: h2o\nheads: {tmp_path / name}\n")
        for policy in (shared, str(file)):
            check_unread(policy, {digest("another")})
            with pytest.raises(InputError, match="made from a text"):
                check_unread(policy, read)
    results = Results(tmp_path / "results")
    judge = worker(folder, settings=Settings(1, 128, haystack=text))
    with results.writing(), pytest.raises(InputError, match="give another --haystack"):
        plan(judge, results, choose(["ppl"]), ask([mine], [], controls=False), "context")


def test_what_a_policy_was_made_from_is_no_data_either(surrogate, folder, data, tmp_path):
    [traces] = (data / "agent").iterdir()
    mine, results = surrogate(1.0, gzip.decompress(traces.read_bytes()).decode()), Results(tmp_path / "results")
    judge = worker(folder, settings=Settings(1, 2048, data=data))
    with results.writing(), pytest.raises(InputError, match="or --data"):
        plan(judge, results, choose(["agent"]), ask([mine], [], controls=False), "context")


def test_logits_that_generate_processes_are_not_asked_for(folder, tmp_path):
    results = Results(tmp_path / "results")
    asked = ask(["confkv:signal_logits=processed"], ["50%"], controls=False)
    with results.writing(), pytest.raises(InputError, match="nothing is generated"):
        plan(worker(folder, settings=Settings(1, 128)), results, choose(["ppl"]), asked, "context")


def test_a_policy_that_no_budget_changes_runs_once():
    for policy in ("kvzap:tau=-4", "echo:tau=1.5", "int4", "full"):
        assert [one.budget for one in ask([policy], ["50%", "25%"], controls=False)][-1] is None
    assert len(ask(["kvzap"], ["50%", "25%"], controls=False)) == 3


def test_a_prompt_that_is_kept_counts_whole():
    context, new, full = 64, 192, parse_policy("full")
    found = held(resolve("h2o:prompt=keep", "75%", SHAPE, context, new), SHAPE, context, new)
    assert found / held(full, SHAPE, context, new) == pytest.approx(0.75, abs=0.08)


def test_where_nothing_is_decoded_confidence_is_as_often_there_as_published():
    policy = parse_policy("confkv:high=256,low=512")
    sure, unsure = (held(parse_policy(f"confkv:high={n},low={n}"), SHAPE, 1900, 0) for n in (256, 512))
    assert held(policy, SHAPE, 1900, 0) == pytest.approx(0.42 * sure + 0.58 * unsure, rel=0.02)
