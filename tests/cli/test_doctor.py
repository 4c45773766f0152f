import copy
import json

import pytest
import torch

from kvstrata.bench.doctor import diagnose
from kvstrata.kernels.attention import native

from ..contract.families import family
from ..contract.runs import prompt
from .conftest import kvstrata


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_run_rightly_is_healthy(folder, dtype):
    done = kvstrata("doctor", "--model", folder, "--tokens", 60, "--dtype", dtype)
    assert done.exit_code == 0, done.output
    assert "3 of 3 layers can be compressed; healthy" in done.stdout
    assert "FAILED" not in done.stdout


def test_json_has_every_check(folder):
    done = kvstrata("doctor", "--model", folder, "--tokens", 60, "--json")
    record = json.loads(done.stdout)
    assert record["passed"]
    assert [check["name"] for check in record["checks"]] == [
        "one prompt, exact kernels",
        "one prompt, auto kernels",
        "in chunks, exact kernels",
        "in chunks, auto kernels",
        "left padding",
    ]
    exact = [check for check in record["checks"] if "exact" in check["name"]]
    assert all(check["largest_difference"] == check["allowed"] == 0 for check in exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_is_wrong_is_found(folder, dtype, monkeypatch):
    attend_pages = native.attend_pages

    def slightly_wrong(*args, **kwargs):
        out, mass = attend_pages(*args, **kwargs)
        return out * 1.05, mass

    monkeypatch.setattr(native, "attend_pages", slightly_wrong)
    done = kvstrata("doctor", "--model", folder, "--tokens", 60, "--dtype", dtype)
    assert done.exit_code == 1
    assert "FAILED" in done.stdout
    assert "not right" in done.stdout


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2", "jamba"])
def test_families_with_layers_passed_through(name):
    found = diagnose(family(name), prompt(50))
    assert found.passed
    assert found.passed_through
    assert found.num_layers == 4


def test_a_model_too_large_to_double_is_measured_by_its_own_noise(monkeypatch):
    monkeypatch.setattr("kvstrata.bench.doctor.MOST_DOUBLED", 0)
    found = diagnose(copy.deepcopy(family("llama")).to(torch.bfloat16), prompt(50))
    assert found.baseline == "what chunks change without kvstrata"
    assert all(check.allowed > 0 for check in found.checks if "exact" not in check.name)
