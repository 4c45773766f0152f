"""What `estimate` says of the demo model is what `run` then finds."""

import importlib.util
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvstrata.bench.compare import run_policy, run_reference
from kvstrata.bench.estimate import Shell, Workload, estimate_bytes
from kvstrata.core import UnsupportedModelError
from kvstrata.hf.models import load_config, load_model
from kvstrata.policy import parse_policy
from tests.contract.families import REFUSED, family
from tests.contract.runs import tiny

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "estimate.py"


def test_a_model_is_known_by_its_config_alone():
    model = tiny()
    shell = Shell(model.config, torch.float32, "cpu")
    assert shell.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert shell.shape.token_bytes == 3 * 2 * 2 * 16 * 4
    assert shell.layers(2).model.layers[0].self_attn.q_proj.weight.device.type == "cpu"


def test_layers_passed_through_are_not_counted():
    shell = Shell(family("gemma3").config, torch.bfloat16, "cpu")
    assert shell.shape.layers == (1, 3)
    assert shell.passed_through == {0: "sliding window", 2: "sliding window"}


@pytest.mark.parametrize("name", ["deepseek-v3", "bloom"])
def test_what_cannot_be_compressed_is_refused_here_too(name):
    assert name in REFUSED
    with pytest.raises(UnsupportedModelError):
        Shell(family(name).config, torch.float32, "cpu")


@pytest.mark.model
@pytest.mark.parametrize("text", ["h2o:budget=25%", "snapkv:budget=64", "streaming:budget=2MiB,room=4"])
def test_bytes_on_the_demo_model_are_exact(text):
    model, _ = load_model(None, "float32", "cpu", Console(stderr=True))
    ids = torch.randint(0, 49152, (1, 200), generator=torch.Generator().manual_seed(0))
    trace = run_policy(model, ids, parse_policy(text), run_reference(model, ids, 6))
    shell = Shell(load_config(None), torch.float32, "cpu")
    bill, least = estimate_bytes(shell, parse_policy(text), Workload(200, 7, 1))
    assert bill == least
    assert (bill.at_end.live, bill.at_end.held) == (trace.live[-1], trace.held[-1])
    assert (bill.peak.live, bill.peak.held) == (trace.peak.live, trace.peak.held)


@pytest.mark.slow
@pytest.mark.model
def test_the_benchmark_compares_estimates_with_runs():
    """Bytes to the byte; how near its times are is what the benchmark prints, since time decides no test."""
    spec = importlib.util.spec_from_file_location("benchmarks_estimate", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    torch.set_num_threads(2)
    for row in benchmark.compare(context=400, steps=4, rounds=1):
        assert (row["held_estimated"], row["live_estimated"]) == (row["held_run"], row["live_run"])
        assert {"ms_ratio", "prefill_ratio"} <= set(row)
