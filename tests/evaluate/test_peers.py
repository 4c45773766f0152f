"""Other libraries on our examples. The scripts themselves run here on transformers alone; `slow` installs the peers."""

import importlib
import json
import sys

import pytest
import torch

from kvstrata.core import InputError
from kvstrata.evaluate import peers
from kvstrata.evaluate.compare import comparisons
from kvstrata.evaluate.grid import Asked, ask
from kvstrata.evaluate.result import Results
from kvstrata.evaluate.run import here, plan, run_grid, run_peers
from kvstrata.evaluate.task import Settings, choose
from kvstrata.hf.demo import demo_model

from .conftest import worker


def test_every_stack_s_full_cache_runs_too_and_a_press_at_every_budget():
    found = peers.parse("kvpress:press=KnormPress,quantized:bits=2", ["50%", "256"])
    assert found == [
        ("kvpress:full", None),
        ("kvpress:press=KnormPress", "50%"),
        ("quantized:full", None),
        ("quantized:bits=2", None),
    ]
    assert peers.parse("kvpress:full", ["50%"]) == [("kvpress:full", None)]
    assert peers.read("quantized:bits=2") == ("quantized", {"backend": "quanto", "bits": "2"})
    with pytest.raises(InputError, match="there are: kvpress, quantized"):
        peers.parse("vllm", [])


def grid_of(folder, results, tasks, asked, beside):
    job = worker(folder, settings=Settings(2, 384))
    return job, plan(job, results, choose(tasks), asked, "context", [Asked(*one) for one in beside])


@pytest.mark.extras
def test_a_peer_s_full_cache_gives_what_ours_gives(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "environment", lambda name: sys.executable)
    results = Results(tmp_path)
    with results.writing():
        beside = [("quantized:full", None), ("kvpress:full", None)]
        job, grid = grid_of(folder, results, ["copy", "ppl", "faithful"], ask([], [], controls=False), beside)
        run_grid(grid, results, here)
        run_peers(grid, job, results)
        again = grid_of(folder, results, ["copy", "ppl", "faithful"], ask([], [], controls=False), beside)[1]
        assert (again.peers, again.work) == ({}, [])
    found = {table.task: table for table in comparisons(results.cells())}
    assert [row.label for row in found["faithful"].rows] == ["full"]  # a peer's logits are not ours to compare
    for task in ("copy", "ppl"):
        ours, *theirs = found[task].rows
        assert {row.label for row in theirs} == {"quantized:full", "kvpress:full"}
        for row in theirs:
            for name, figure in row.figures.items():
                assert figure.mean == pytest.approx(ours.figures[name].mean, abs=1e-4)
            assert row.cell.share == pytest.approx(1.0, abs=0.01)
            assert row.is_full


@pytest.mark.extras
def test_a_peer_that_breaks_down_says_why_and_keeps_what_it_did(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "environment", lambda name: sys.executable)
    results = Results(tmp_path)
    with results.writing():
        job, grid = grid_of(folder, results, ["copy"], ask([], [], controls=False), [("kvpress:press=X", "50%")])
        with pytest.raises(peers.PeerError, match="kvpress"):
            run_peers(grid, job, results)
    assert not list(tmp_path.glob("cells/*"))


@pytest.fixture
def scoring(monkeypatch):
    monkeypatch.syspath_prepend(peers.HERE)
    return importlib.import_module("scoring")


def test_a_view_counts_with_all_that_it_was_cut_from(scoring):
    whole = torch.zeros(10, 4)
    assert scoring.storages(whole[:2], whole[5:]) == whole.nbytes


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its old name, which every release takes
def test_no_answer_sees_what_comes_after_it(folder, tmp_path, scoring, monkeypatch):
    """Also when a press has dropped most of the context, so that positions and places in the cache differ."""
    job = {"model": str(folder), "dtype": "float32", "threads": 1, "packages": [], "examples": []}
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "job.json")])
    monkeypatch.setattr(scoring.os, "dup2", lambda *_: None)
    scorer = scoring.Scorer()
    scorer.answers.close()
    found = []
    for last in (7, 8):
        cache = scorer.transformers.DynamicCache()
        scorer.feed(list(range(1, 101)), cache, 0)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :20], layer.values[:, :, :20]
        found.append(scorer.ask(cache, {"question": [5, 6], "answer": [9, 3, 4, last, 2]}, 100)[0][:3])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.model
def test_kvpress_and_quantized_caches_on_the_demo_model(tmp_path):
    results = Results(tmp_path)
    specs = peers.parse("kvpress:press=KnormPress,quantized:backend=quanto,bits=4", ["50%"])
    with results.writing():
        job, grid = grid_of(demo_model(), results, ["needle"], ask([], [], controls=False), specs)
        run_grid(grid, results, here)
        run_peers(grid, job, results)
    (table,) = comparisons(results.cells())
    rows = {row.label: row for row in table.rows}
    assert rows["kvpress:full"].figures["nll"].mean == pytest.approx(rows["full"].figures["nll"].mean, abs=0.01)
    assert rows["kvpress:press=KnormPress @ 50%"].cell.share == pytest.approx(0.5, abs=0.01)
    assert rows["quantized:backend=quanto,bits=4"].cell.share < 0.4
