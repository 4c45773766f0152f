"""Runs engines in a process of their own: `python engine.py JOBS.json RESULTS.json`.

vLLM keeps the model's connector and its process groups in globals, so tests never share a process with an engine. Each
job is {"engine": arguments of LLM, "prompts": token ids, "tokens": how many to generate}; of each come the requests in
order, {"prompt", "out", "logprobs", "id"}, or {"error"} where the engine refused.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def run(job):
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(**job["engine"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=1)
    start = time.perf_counter()
    done = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], params, use_tqdm=False)
    found = {"seconds": time.perf_counter() - start, "requests": [request(one) for one in done]}
    llm.llm_engine.engine_core.shutdown(timeout=120)  # the drop log appears when the scheduler ends
    return found


def request(done):
    out = done.outputs[0]
    chosen = [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
    return {
        "id": done.request_id,
        "prompt": list(done.prompt_token_ids),
        "out": list(out.token_ids),
        "logprobs": chosen,
    }


def main(jobs, results):
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for job in json.loads(Path(jobs).read_text()):
        found.append(run(job))
        cleanup_dist_env_and_memory()
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
