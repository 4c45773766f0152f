"""Engines in other processes, and their runs beside the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .replay import Reference, read_log

HERE = Path(__file__).parent
CLOSE = 1e-4  # natural logarithms; two runs of the same float32 model differ by about 1e-5
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "block_size": 32,
}


def run_jobs(jobs, folder, several_processes=False, timeout=600):
    """Results of jobs (engine.py) that run one after another in one process of their own."""
    given, results = folder / "jobs.json", folder / "results.json"
    given.write_text(json.dumps(jobs))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(several_processes))}
    command = [sys.executable, str(HERE / "engine.py"), str(given), str(results)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(results.read_text())


def job(model, prompts, tokens, policy=None, **engine):
    """A job; `policy` is what stands under the key "kvstrata"."""
    own = {"additional_config": {"kvstrata": policy}} if policy else {}
    return {"engine": {"model": str(model), **ENGINE, **own, **engine}, "prompts": prompts, "tokens": tokens}


def assert_replays(reference: Reference, log: Path, result, controls=True):
    """The tokens of every request are those of a masked reference, and are not if the mask is late or missing."""
    assert "error" not in result, result
    found = read_log(log)
    assert any(step["drops"] for step in found[1])
    for request in result["requests"]:
        compared = reference.compare(found, request)
        assert compared.equal == compared.tokens
        assert compared.worst < CLOSE
    if controls:
        request = result["requests"][0]
        for wrong in (reference.compare(found, request, shift=1), reference.compare(found, request, masked=False)):
            assert wrong.equal < wrong.tokens or wrong.worst > 100 * CLOSE
    return found
