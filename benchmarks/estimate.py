"""How well `kvstrata estimate` foretells `run`: bytes exactly, times as a ratio, on the demo model.

    python benchmarks/estimate.py [--context 2048] [--steps 24] [--rounds 3]

Estimate and run take turns in one process; times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch
from rich.console import Console

from kvstrata.bench.compare import run_policy, run_reference, warm_up
from kvstrata.bench.estimate import Shell, Workload, estimate_bytes, measure_times
from kvstrata.bench.measure import provenance
from kvstrata.hf.models import load_config, load_model
from kvstrata.policy import parse_policy

POLICIES = ("full", "window:budget=25%", "h2o:budget=25%", "snapkv:budget=25%")


def compare(context: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """One row per policy: estimated and measured figures."""
    model, _ = load_model(None, "float32", "cpu", Console(stderr=True))
    shell = Shell(load_config(None), torch.float32, "cpu")
    work = Workload(context, steps + 1, 1)  # the last new token is never fed
    policies = [parse_policy(text) for text in POLICIES]
    bills = [estimate_bytes(shell, policy, work)[0] for policy in policies]
    ids = torch.randint(0, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    warm_up(model, ids)
    estimates, runs = [], []
    for _ in range(rounds):
        estimates.append(measure_times(shell, policies, bills, work, lambda: None))
        reference = run_reference(model, ids, steps)
        traces = [reference.trace, *(run_policy(model, ids, policy, reference) for policy in policies[1:])]
        runs.append(traces)
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(POLICIES):
        estimated = [statistics.median(e[index][part] for e in estimates) for part in (0, 1)]
        prefill = statistics.median(traces[index].prefill_s for traces in runs)
        step = statistics.median(statistics.median(traces[index].step_ms) for traces in runs)
        trace = runs[0][index]
        rows.append(
            {
                "policy": text,
                "held_estimated": bills[index].at_end.held,
                "held_run": trace.held[-1],
                "live_estimated": bills[index].at_end.live,
                "live_run": trace.live[-1],
                "peak_held_estimated": bills[index].peak.held,
                "peak_held_run": trace.peak.held,
                "prefill_s_estimated": estimated[0],
                "prefill_s_run": prefill,
                "prefill_ratio": estimated[0] / prefill,
                "ms_estimated": estimated[1],
                "ms_run": step,
                "ms_ratio": estimated[1] / step,
            }
        )
    return rows


def main() -> None:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = compare(options.context, options.steps, options.rounds)
    print(json.dumps({"context": options.context, "rows": rows, **provenance()}, indent=2))


if __name__ == "__main__":
    main()
