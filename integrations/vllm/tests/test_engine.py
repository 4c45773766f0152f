"""Whole engines on a small random model: a run is replayed from its drop log with a mask, token for token."""

import pytest
import torch

from . import tiny
from .engines import assert_replays, job, run_jobs
from .replay import Reference, read_log

RUNS = {
    # several requests in one batch, prompts in one piece
    "streaming": ("streaming:budget=25%", {}),
    "h2o": ("h2o:budget=25%", {}),
    # prompts in chunks, so that blocks go while the prompt is read
    "snapkv, chunked": ("snapkv:budget=96", {"max_num_batched_tokens": 128}),
    "tova, chunked, freed at once": ({"policy": "tova:budget=64", "lag": 0}, {"max_num_batched_tokens": 128}),
    "keynorm": ("keynorm:budget=96", {}),
    "qevict, two classes": ({"policy": "qevict:budget=25%", "classes": 2}, {"max_num_batched_tokens": 128}),
    "confkv": ("confkv:high=64,low=128,tau=0.3", {}),
    "polykv": ("polykv:{strategy}", {}),
    # requests that grow until the pool cannot hold all of them, so that some are preempted and start again
    "h2o, preempted": (
        "h2o:budget=50%,sinks=4",
        {"num_gpu_blocks_override": 15, "max_num_batched_tokens": 64, "max_model_len": 320},
    ),
}
SMOKE = ("streaming", "h2o", "snapkv, chunked", "h2o, preempted")
STRATEGY = """
polykv: 1
model: {name: tiny, layers: 4, kv_heads: 2}
policy:
  plan:
    L0-L1: {prefill: {pattern: h2o, budget: 128}, decode: full}
    L2: {prefill: {pattern: streaming, budget: 64}, decode: {pattern: tova, budget: 96}}
    L3: {prefill: {pattern: snapkv, budget: 96}, decode: {pattern: h2o, budget: 96}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny.make(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


def small(model, name, folder):
    """The job of one of RUNS, and where its log will be."""
    policy, engine = RUNS[name]
    table = {"policy": policy} if isinstance(policy, str) else dict(policy)
    (folder / "plan.yaml").write_text(STRATEGY)
    table["policy"] = table["policy"].format(strategy=folder / "plan.yaml")
    table["log"] = str(folder / f"{list(RUNS).index(name)}.jsonl")
    prompts, tokens = (tiny.prompts(4, 60), 220) if "preempted" in name else (tiny.prompts(3, 300), 64)
    engine = {"skip_tokenizer_init": True, **engine}
    return job(model, prompts, tokens, table, **engine), folder / f"{list(RUNS).index(name)}.jsonl"


@pytest.fixture(scope="module")
def smoke_runs(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    jobs = {name: small(model, name, folder) for name in SMOKE}
    results = run_jobs([one for one, _ in jobs.values()], folder)
    return {name: (log, result) for (name, (_, log)), result in zip(jobs.items(), results, strict=True)}


@pytest.fixture(scope="module")
def other_runs(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    jobs = {name: small(model, name, folder) for name in RUNS if name not in SMOKE}
    results = run_jobs([one for one, _ in jobs.values()], folder)
    return {name: (log, result) for (name, (_, log)), result in zip(jobs.items(), results, strict=True)}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SMOKE)
def test_a_run_is_that_of_a_masked_reference(name, smoke_runs, reference):
    assert_replays(reference, *smoke_runs[name])


@pytest.mark.parametrize("name", [name for name in RUNS if name not in SMOKE])
def test_another_run_is_that_of_a_masked_reference(name, other_runs, reference):
    assert_replays(reference, *other_runs[name])


@pytest.mark.smoke
def test_a_preempted_request_started_again(smoke_runs):
    _, steps = read_log(smoke_runs["h2o, preempted"][0])
    started = [name for step in steps for name in step["fresh"]]
    assert len(started) > len(set(started))
    assert min(step["free"] for step in steps) <= 1


@pytest.mark.smoke
def test_the_first_blocks_to_go_are_those_with_least_attention_in_the_reference(smoke_runs, reference):
    log, result = smoke_runs["h2o"]
    head, steps = read_log(log)
    dropped = {owner.rpartition("-")[0]: blocks for step in steps[:2] for _, owner, blocks in step["drops"]}
    assert len(dropped) == 3
    for request in result["requests"]:
        tokens, size = len(request["prompt"]), head["block_size"][0]
        mass = reference.attention(request["prompt"]).sum(dim=(0, 1, 2))  # over layers, heads and queries
        worth = torch.nn.functional.pad(mass, (0, -tokens % size)).view(-1, size).sum(dim=-1)
        keep = int(tokens * 0.25)  # tokens, of which the newest half is protected
        free = [block for block in range(tokens // size) if (block + 1) * size <= tokens - keep // 2]
        count = tokens // size - keep // size
        assert dropped[request["id"]] == sorted(free, key=lambda block: float(worth[block]))[:count]
