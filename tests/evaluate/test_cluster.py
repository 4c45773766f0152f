"""The same grid on a Ray cluster of two workers, one of which is killed. Needs the extra `ray`."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from kvstrata.evaluate.grid import ask
from kvstrata.evaluate.result import Results
from kvstrata.evaluate.run import here, plan, run_grid
from kvstrata.evaluate.task import Settings, choose

from .conftest import worker

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("default")]
ray = pytest.importorskip("ray", reason="needs kvstrata[ray]")


def run(folder, results, runner):
    with results.writing():
        job = worker(folder, settings=Settings(4, 384), batch=1)
        grid = plan(job, results, choose(["copy"]), ask(["h2o"], ["50%"], controls=False), "context")
        run_grid(grid, results, runner)
    return {(c.task, c.run.label): (c.values, c.held_bytes) for c in results.cells()}


def ray_workers():
    """Processes that run a unit now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:
            continue
        if title.startswith(b"ray::run_unit"):
            found.append(int(process.name))
    return found


def test_a_worker_that_is_killed_changes_nothing(folder, tmp_path):
    from kvstrata.evaluate.cluster import cluster

    expected = run(folder, Results(tmp_path / "one"), here)
    killed = []

    def kill_one():
        limit = time.monotonic() + 120
        while not killed and time.monotonic() < limit:
            for process in ray_workers():
                time.sleep(0.3)  # in the middle of its work
                os.kill(process, signal.SIGKILL)
                killed.append(process)
                break
            time.sleep(0.01)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        killer = threading.Thread(target=kill_one)
        killer.start()
        found = run(folder, Results(tmp_path / "two"), cluster(None))
        killer.join()
    finally:
        ray.shutdown()
    assert killed
    assert found.keys() == expected.keys()
    for key, (values, held) in found.items():
        assert values == pytest.approx(expected[key][0], abs=1e-5)
        assert held == expected[key][1]
