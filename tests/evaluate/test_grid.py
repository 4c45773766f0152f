"""A grid on a tiny model: what is finished stays finished, whatever happens in the middle."""

import json
import signal
import subprocess
import sys
import time

import pytest

from kvstrata.core import InputError, KvstrataError, SpecError
from kvstrata.evaluate import run as running
from kvstrata.evaluate.grid import ask
from kvstrata.evaluate.result import Cell, Results, read_cell
from kvstrata.evaluate.run import here, plan, processes, run_grid
from kvstrata.evaluate.task import Settings, choose

from .conftest import worker

pytestmark = pytest.mark.extras  # whole runs, a minute together

POLICIES = ["h2o", "snapkv:budget=64"]
ASKED = ask(POLICIES, ["50%", "96"])


def grid_of(folder, results, tasks=("copy", "ppl", "faithful"), **options):
    with results.writing():
        return plan(worker(folder, settings=Settings(2, 384), **options), results, choose(tasks), ASKED, "context")


def run(folder, results, runner=here, **options):
    grid = grid_of(folder, results, **options)
    with results.writing():
        return run_grid(grid, results, runner)


def values(results):
    return {(c.task, c.run.label): (c.values, c.held_bytes, c.examples) for c in results.cells()}


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    results = Results(tmp_path_factory.mktemp("results"))
    run(folder, results)
    return results


def test_every_policy_runs_at_every_budget_and_random_and_full_beside_them():
    assert [asked.label for asked in ASKED] == [
        *("full", "h2o @ 50%", "h2o @ 96", "snapkv:budget=64", "random @ 50%", "random @ 96"),
    ]
    assert [asked.label for asked in ask(["full", "full:codec=int8"], ["50%"], controls=False)] == [
        "full",
        "full:codec=int8",
    ]
    with pytest.raises(SpecError, match="no policy named 'h20'"):
        ask(["h20"], ["50%"])
    with pytest.raises(SpecError, match="cannot read budget='half'"):
        ask(["h2o"], ["half"])


def test_a_policy_file_that_changed_is_another_policy(folder, tmp_path):
    file = tmp_path / "mine.yaml"
    keys = set()
    for budget in (64, 96):
        file.write_text(f"policy: h2o\nbudget: {budget}\n")
        results = Results(tmp_path / "r")
        with results.writing():
            grid = plan(worker(folder), results, choose(["copy"]), ask([str(file)], [], controls=False), "context")
        keys |= {run_.key for run_ in grid.runs.values()}
    assert len(keys) == 3  # the full cache, and the file twice


def test_all_cells_are_written_and_say_where_they_are_from(whole):
    cells = whole.cells()
    assert len(cells) == 3 * len(ASKED)
    for cell in cells:
        assert len(cell.examples) == 2
        assert {"torch", "transformers", "processor", "seconds"} <= cell.provenance.keys()
        assert cell.run.model.partition("@")[2]
        assert Cell.model_validate_json(cell.model_dump_json()) == cell
    assert {tuple(cell.values) for cell in cells if cell.task == "ppl"} == {("nll",)}
    assert all(cell.ms_per_token for cell in cells if cell.task != "copy")


def test_what_is_finished_is_not_run_again(folder, whole):
    before = {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*.json*")}
    grid = grid_of(folder, whole)
    assert grid.work == []
    assert grid.finished == len(whole.cells())
    assert run(folder, whole) == []
    assert {path: path.stat().st_mtime_ns for path in whole.folder.rglob("*.json*")} == before


def test_a_run_that_ended_in_the_middle_goes_on_where_it_was(folder, whole, tmp_path):
    results, seen = Results(tmp_path), []

    def ends(job, units):
        for number, done in enumerate(here(job, units)):
            if number == 1:
                raise KeyboardInterrupt
            seen.append(done[0])
            yield done

    with pytest.raises(KeyboardInterrupt):
        run(folder, results, ends)
    left = grid_of(folder, results).work
    assert [planned.unit for planned in left] == [p.unit for p in grid_of(folder, Results(tmp_path / "new")).work][1:]
    run(folder, results)
    assert values(results) == values(whole)


def test_a_process_that_is_killed_loses_nothing_that_was_finished(folder, whole, tmp_path):
    command = [
        sys.executable,
        "-c",
        "from kvstrata.cli import main; main()",
        "evaluate",
        "--model",
        folder,
        "--policy",
        ",".join(POLICIES),
    ]
    command += [
        "--budget",
        "50%,96",
        "--task",
        "copy,ppl,faithful",
        "--contexts",
        2,
        "--length",
        384,
        "--out",
        tmp_path,
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results, limit = Results(tmp_path), time.monotonic() + 120
    while not list(tmp_path.glob("raw/*.jsonl")) and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.glob("raw/*.jsonl"))
    left, every = (grid_of(folder, place).left for place in (results, Results(tmp_path / "new")))
    assert sum(map(len, left.values())) < sum(map(len, every.values()))
    run(folder, results)
    assert values(results) == values(whole)


def test_processes_give_what_one_gives(folder, whole, tmp_path):
    results = Results(tmp_path)
    run(folder, results, processes(2))
    for key, (figures, held, examples) in values(results).items():
        assert figures == pytest.approx(values(whole)[key][0], abs=1e-5), key
        assert held == values(whole)[key][1]
        assert [e.example for e in examples] == [e.example for e in values(whole)[key][2]]


def test_the_full_cache_is_run_again_only_to_compare_with(folder, whole, tmp_path):
    results = Results(tmp_path)
    grid = grid_of(folder, results)
    full = next(asked for asked in ASKED if asked.label == "full")
    with results.writing():
        for (source, one), run_ in grid.runs.items():
            if one == full or source == "documents":
                results.append(run_, list(whole.outcomes(run_).values()))
    left = grid_of(folder, results).work
    assert {planned.unit.source for planned in left} == {"copy"}
    for planned in left:
        assert planned.unit.asked[0] == full
        assert planned.unit.wanted[0] == ()
    run(folder, results)
    assert values(results).keys() == values(whole).keys()


def test_a_line_cut_off_is_taken_away_and_measured_again(folder, whole, tmp_path):
    results = Results(tmp_path)
    grid = grid_of(folder, results)
    _, run_ = next(item for item in grid.runs.items() if item[0] == ("copy", ASKED[1]))
    with results.writing():
        results.append(run_, list(whole.outcomes(run_).values()))
    path = results.raw_path(run_)
    cut = path.read_bytes()[:-40]
    path.write_bytes(cut)
    assert len(results.outcomes(run_)) == 1
    assert path.read_bytes() == cut  # reading changes nothing
    assert len(grid_of(folder, results).left["copy", ASKED[1]]) == 1
    with results.writing():
        results.append(run_, list(whole.outcomes(run_).values())[1:])
    assert results.outcomes(run_) == whole.outcomes(run_)


DAMAGE = {
    "a line that is no JSON": lambda lines: [lines[0], "{", *lines[1:]],
    "another run's head": lambda lines: [lines[0].replace('"seed": 0', '"seed": 1'), *lines[1:]],
    "no head": lambda lines: lines[1:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_outcomes_are_named_and_kept(folder, whole, tmp_path, damage):
    results = Results(tmp_path)
    run_ = whole.cells()[0].run
    with results.writing():
        results.append(run_, list(whole.outcomes(run_).values()))
    path = results.raw_path(run_)
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    text = path.read_text()
    with pytest.raises(InputError, match=r"is damaged .*: move it away"):
        results.outcomes(run_)
    assert path.read_text() == text


def test_a_damaged_record_is_named(whole, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(whole.cells()[0].model_dump_json().replace('"task"', '"tusk"'))
    with pytest.raises(InputError, match=r"a\.json is no sound record"):
        read_cell(path)


def test_a_full_disk_is_said_and_leaves_whole_files(folder, whole, tmp_path, monkeypatch):
    results = Results(tmp_path)
    run_ = whole.cells()[0].run
    outcomes = list(whole.outcomes(run_).values())
    with results.writing():
        results.append(run_, outcomes[:1])
        text = results.raw_path(run_).read_text()

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("kvstrata.evaluate.result.os.fsync", full)
        with pytest.raises(KvstrataError, match=r"No space left on device.*make room"):
            results.append(run_, outcomes[1:])
    assert results.raw_path(run_).read_text() == text
    monkeypatch.undo()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: full(0))
    with pytest.raises(KvstrataError, match="No space left on device"):
        results.write(whole.cells()[0])
    assert list(tmp_path.glob("cells/*")) == []


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    results = Results(tmp_path)
    with results.writing(), pytest.raises(InputError, match="another run is writing"), Results(tmp_path).writing():
        pass


def test_a_length_beyond_the_model_is_refused_before_anything_runs(folder, tmp_path):
    results = Results(tmp_path)
    with results.writing(), pytest.raises(InputError, match="the model is made for 2048: give a smaller --length"):
        plan(worker(folder, settings=Settings(1, 4096)), results, choose(["needle"]), ASKED, "context")
    with results.writing(), pytest.raises(InputError, match="asks no question"):
        plan(worker(folder), results, choose(["ppl"]), ASKED, "prompt")


def test_a_worker_that_dies_is_an_error_with_a_fix(folder, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise running.BrokenProcessPool

    monkeypatch.setattr(running, "wait", broken)
    with pytest.raises(KvstrataError, match="what was finished is kept"):
        run(folder, Results(tmp_path), processes(1))


def test_raw_outcomes_stand_beside_the_records(whole):
    cell = next(cell for cell in whole.cells() if cell.task == "copy")
    lines = whole.raw_path(cell.run).read_text().splitlines()
    assert json.loads(lines[0])["run"] == cell.run.model_dump()
    item = json.loads(lines[1])["items"][0]
    assert {"kind", "depth", "nll", "tokens", "right", "exact"} <= item.keys()
