"""How a peer talks to the benchmark, with the standard library alone: its script runs in an environment of its own.

    python run_NAME.py JOB.json

The job has `model` (folder), `ids` (the prompt), `batch`, `dtype`, `threads`, `folder` (for what is made once) and the
options of this peer. The script reads the prompt in every row, says one line of JSON (`cache_bytes`, `prefill_s`,
`versions`, `settings`), and then answers every line on standard input, a number of steps, with one line: `ms` of each
step, `tokens` (all tokens of row 0 so far, greedy) and `tokens_per_s`. So `echo 8 | python run_NAME.py JOB.json` is a
benchmark of its own.
"""

import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any, Protocol


class Peer(Protocol):
    """What a script must make of a job. One that times itself has `steps(count) -> milliseconds` too."""

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

    start = time.perf_counter()
    peer: Peer = make(job)
    took = time.perf_counter() - start
    say(prefill_s=took, versions={name: version(name) for name in packages}, **peer.about())
    steps: Any = getattr(peer, "steps", None)
    for line in sys.stdin:
        ms: list[float] = steps(int(line)) if steps else [_timed(peer) for _ in range(int(line))]
        say(ms=ms, tokens=peer.tokens, tokens_per_s=job["batch"] * 1e3 / statistics.median(ms), **peer.about())


def _timed(peer: Peer) -> float:
    """Milliseconds of one step."""
    start = time.perf_counter()
    peer.step()
    return (time.perf_counter() - start) * 1e3
