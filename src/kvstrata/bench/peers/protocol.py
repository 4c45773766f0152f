"""How a peer talks to the benchmark, with the standard library alone: its script runs in an environment of its own.

    python run_NAME.py JOB.json

The job has `model` (folder), `ids` (the prompt), `batch`, `dtype`, `threads`, `folder` (for what is made once),
`prefill` (times to read the prompt once more) and the options of this peer. The script reads the prompt in every row,
says one line of JSON (`cache_bytes`, `prefill_s`, `versions`, `settings`), and then answers every line on standard
input, a number of steps, with one line: `ms` of each step, `tokens` (all tokens of row 0 so far, greedy) and
`tokens_per_s`. So `echo 8 | python run_NAME.py JOB.json` is a benchmark of its own.
"""

import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any, Protocol


class Peer(Protocol):
    """What a script must make of a job.

    One that times itself has `steps(count) -> milliseconds` too, one whose prompts can be timed `read()`, which reads
    the prompt in one row into a new cache.
    """

    tokens: list[int]  # of row 0, greedy, the one that the prompt gave included

    def step(self) -> None:
        """Make one more token in every row."""
        ...

    def about(self) -> dict[str, Any]:
        """`cache_bytes` and `settings`."""
        ...


def read_job() -> dict[str, Any]:
    """The job named on the command line."""
    with open(sys.argv[1], encoding="utf-8") as file:
        return json.load(file)


def serve(make: Any, job: dict[str, Any], packages: list[str]) -> None:
    """Make the peer of a job and answer until standard input ends; only answers reach standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the peer's library prints

    def say(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    peer: Peer = make(job)
    read: Any = getattr(peer, "read", None)
    took = [_seconds(read) for _ in range(job["prefill"])] if read else []
    prefill_s = statistics.median(took) if took else None
    say(prefill_s=prefill_s, versions={name: version(name) for name in packages}, **peer.about())
    steps: Any = getattr(peer, "steps", None)
    for line in sys.stdin:
        ms: list[float] = steps(int(line)) if steps else [1e3 * _seconds(peer.step) for _ in range(int(line))]
        say(ms=ms, tokens=peer.tokens, tokens_per_s=job["batch"] * 1e3 / statistics.median(ms), **peer.about())


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
