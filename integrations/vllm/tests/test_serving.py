"""What takes longer: prefix caching, torch.compile, several ranks, and the server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from kvstrata.hf.demo import demo_model
from kvstrata.policy.surrogate import read_surrogate, shipped

from . import tiny
from .engines import assert_replays, job, run_jobs
from .replay import Reference, read_log

ROOT = Path(__file__).parents[3]
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


def table(policy, log, **more):
    return {"policy": policy, "log": str(log), **more}


@pytest.mark.slow
def test_prefixes_are_shared_and_still_right(model, reference, tmp_path):
    log = tmp_path / "log.jsonl"
    (first,) = tiny.prompts(1, 300)
    prompts = [first, first[:200] + first[:50], first]
    engine = {
        "enable_prefix_caching": True,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 128,
        "skip_tokenizer_init": True,
    }
    (result,) = run_jobs([job(model, prompts, 48, table("h2o:budget=96", log), **engine)], tmp_path)
    _, steps = assert_replays(reference, log, result)
    begun = {name.rpartition("-")[0]: step["requests"][name][0] for step in steps for name in step["fresh"]}
    assert begun["0"] == 0
    assert begun["1"] > 0  # blocks that the first request computed before it lost any
    assert begun["2"] > 0
    assert max(begun.values()) <= 2 * 128  # none of those that it computed afterwards


@pytest.mark.slow
def test_a_compiled_model_is_right_too(model, reference, tmp_path):
    log = tmp_path / "log.jsonl"
    engine = {"enforce_eager": False, "skip_tokenizer_init": True}
    (result,) = run_jobs([job(model, tiny.prompts(2, 300), 64, table("h2o:budget=25%", log), **engine)], tmp_path)
    assert_replays(reference, log, result)


@pytest.mark.slow
def test_two_ranks_choose_what_one_would(model, reference, tmp_path):
    logs = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    chunked = {"max_num_batched_tokens": 128, "skip_tokenizer_init": True}
    prompts = tiny.prompts(2, 300)
    (one,) = run_jobs([job(model, prompts, 48, table("h2o:budget=96", logs[0]), **chunked)], tmp_path)
    ranks = {**chunked, "tensor_parallel_size": 2}
    (two,) = run_jobs([job(model, prompts, 48, table("h2o:budget=96", logs[1]), **ranks)], tmp_path, True)
    assert_replays(reference, logs[1], two)
    assert [r["out"] for r in one["requests"]] == [r["out"] for r in two["requests"]]
    dropped = [[blocks for step in read_log(log)[1] for _, _, blocks in step["drops"]] for log in logs]
    assert dropped[0] == dropped[1]


@pytest.mark.slow
def test_a_real_model_on_three_ranks_in_two_classes(tmp_path):
    log = tmp_path / "log.jsonl"
    prompts = real_prompts(2, 400)
    made = job(demo_model(), prompts, 32, table("h2o:budget=128", log, classes=2), tensor_parallel_size=3)
    (result,) = run_jobs([made], tmp_path, True)
    assert_replays(Reference(demo_model()), log, result)


def real_prompts(count, length):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(demo_model())(TEXT * 40, add_special_tokens=False)["input_ids"]
    return [ids[7 * i : 7 * i + length - 3 * i] for i in range(count)]


def novel(length):
    from transformers import AutoTokenizer

    text = (ROOT / "examples" / "pride-and-prejudice-41.txt").read_text(encoding="utf-8")
    return [AutoTokenizer.from_pretrained(demo_model())(text, add_special_tokens=False)["input_ids"][:length]]


@pytest.mark.slow
def test_a_real_model_s_confidence_moves_its_budget(tmp_path):
    log = tmp_path / "log.jsonl"
    made = job(demo_model(), real_prompts(2, 400), 96, table("confkv:high=64,low=256,tau=0.7", log))
    (result,) = run_jobs([made], tmp_path)
    _, steps = assert_replays(Reference(demo_model()), log, result)
    held = {blocks[0][0] for step in steps for blocks in step["blocks"].values() if step["step"] > 5}
    assert min(held) <= 4  # sure of what it has read forty times
    assert any(step["drops"] for step in steps[4:])


@pytest.mark.slow
def test_a_surrogate_s_threshold_drops_the_blocks_that_its_scores_say(tmp_path):
    log, tau = tmp_path / "log.jsonl", -4.02
    engine = {"max_num_batched_tokens": 256}
    made = job(demo_model(), novel(600), 40, table(f"kvzap:tau={tau},window=64", log), **engine)
    (result,) = run_jobs([made], tmp_path)
    reference = Reference(demo_model())
    head, steps = assert_replays(reference, log, result)
    (dropped, *_) = [blocks for step in steps for _, _, blocks in step["drops"]]
    hidden = reference.hidden(
        result["requests"][0]["prompt"][:256]
    )  # of the first chunk, which nothing was hidden from
    scores = torch.stack([read_surrogate(shipped("linear"))(i, h[None])[0] for i, h in enumerate(hidden)])  # [L, H, T]
    worth = scores.mean(dim=(0, 1)).view(-1, head["block_size"][0]).mean(dim=1)
    expected = [block for block in range(1, 6) if worth[block] < tau]  # 6 and 7 hold the newest 64 tokens
    assert sorted(dropped) == expected
    assert 0 < len(expected) < 5


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--model", str(demo_model()), "--served-model-name", "demo", "--port", str(port), "--dtype", "float32"]
    options += ["--max-model-len", "2048", "--block-size", "32", "--enforce-eager", "--max-num-batched-tokens", "256"]
    options += ["--additional-config", json.dumps({"kvstrata": "h2o:budget=25%"})]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(address, process, log, seconds=400):
    for _ in range(seconds):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def post(address, body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_server_answers_and_says_what_it_evicted(server):
    address, log = server
    body = {"model": "demo", "prompt": TEXT * 12, "max_tokens": 40, "temperature": 0}
    text = post(f"{address}/v1/completions", body)["choices"][0]["text"]
    assert "single man in possession of a good fortune" in text
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    assert (
        "The capital of France is Paris."
        in post(f"{address}/v1/chat/completions", chat)["choices"][0]["message"]["content"]
    )
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    found = dict(re.findall(r"^(kvstrata:\w+)\{[^}]*\} (\S+)$", metrics, re.MULTILINE))
    assert float(found["kvstrata:evicted_blocks_total"]) > 5
    assert float(found["kvstrata:request_live_share_count"]) == 2
    assert float(found["kvstrata:request_live_share_sum"]) < 2
    line = next(line for line in log.read_text().splitlines() if "kvstrata: h2o:budget=25% in blocks of 32" in line)
    assert "30 of 30 layers" in line
