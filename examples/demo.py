"""The demo: a real model reads a chapter under several policies at one mean byte budget, beside the full cache.

python examples/demo.py                 3,072 tokens, 160 steps, seven policies; writes demo.png
python examples/demo.py --short         a quick form for continuous integration
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console

from kvstrata.bench.compare import Reference, Trace, run_policy, run_reference, warm_up
from kvstrata.bench.counting import KvShape, count_bytes
from kvstrata.bench.measure import provenance
from kvstrata.cli.tables import MIB, comparison, progress_bar
from kvstrata.hf.models import load_model
from kvstrata.policy import Policy, parse_policy
from kvstrata.policy.budget import ByteBudget

TEXT = Path(__file__).parent / "pride-and-prejudice-41.txt"
POLICIES = ("window", "streaming", "h2o", "tova", "snapkv", "confkv")
SHARE = 0.25  # of the full cache's mean bytes
TAU = 0.7  # CONF-KV's threshold of confidence
ROOM = 16  # evicting policies make room for this many tokens at a time


def main() -> None:
    """Run, print the table, write demo.json and demo.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="700 tokens, 24 steps")
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    options = parser.parse_args()
    limit, steps = (700, 24) if options.short else (3072, 160)
    model, tokenizer = load_model(None, "float32", "cpu", Console(stderr=True))
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :limit]
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    shape = KvShape(tuple(range(model.config.num_hidden_layers)), heads, dim, model.dtype)
    with progress_bar() as progress:
        task = progress.add_task("full", total=(len(POLICIES) + 1) * steps)
        warm_up(model, ids)
        reference = run_reference(model, ids, steps, lambda: progress.advance(task))
        traces = [reference.trace]
        for name in POLICIES:
            progress.update(task, description=name)
            policy = at_mean_bytes(name, reference, ids.shape[1], steps, shape)
            traces.append(run_policy(model, ids, policy, reference, name, lambda: progress.advance(task)))
    rows = [trace.summary(reference.trace) for trace in traces]
    title = (
        f"SmolLM2-135M fp32: {ids.shape[1]} tokens of prompt, all visible when compressing.\n"
        f"Bytes are means over {steps} steps; asked: {SHARE:.0%} of the full cache, live."
    )
    Console(width=100).print(comparison(rows, title))
    figure(traces, options.out)
    record = {"prompt_tokens": ids.shape[1], "steps": steps, "rows": rows, **provenance()}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {options.out} and {options.out.with_suffix('.json')}")
    check(rows)


def at_mean_bytes(name: str, reference: Reference, prompt: int, steps: int, shape: KvShape) -> Policy:
    """The preset with a byte budget such that its mean live bytes are SHARE of the full cache's.

    A policy that does not evict while decoding grows by one token a step, so it starts half of the growth lower; one
    that makes room evicts below its budget, which is set half of the room higher. The levels of confkv follow from
    the confidence that the full cache had at every step, and from what so many tokens take, older ones in INT8.
    """
    full = reference.trace
    budget, token = SHARE * sum(full.live) / len(full.live), full.live[0] / (prompt + 1)
    policy = parse_policy(name)
    if name == "confkv":
        mean = bisect_left(range(1, prompt), budget, key=lambda n: coded_bytes(n, prompt, shape)) + 1
        return by_confidence(reference.confidence, prompt, mean)
    if policy.rule(0, "decode") is None:
        return policy.with_budget(ByteBudget(int(budget - token * (steps + 1) / 2)))
    return policy.with_room(ROOM).with_budget(ByteBudget(int(budget + token * (ROOM - 1) / 2)))


def coded_bytes(tokens: int, prompt: int, shape: KvShape) -> int:
    """Live bytes of CONF-KV with so many tokens, if the newest are among them."""
    policy = parse_policy(f"confkv:high={tokens},low={tokens}")
    return count_bytes(policy, shape, context=prompt, new_tokens=1, confidence=1.0).after_prompt.live


def by_confidence(sure: list[float], prompt: int, mean: float) -> Policy:
    """CONF-KV with low = 2 high, so that `mean` tokens are held on average if confidence is as given."""

    def held(high: int) -> float:
        length, total = prompt, 0
        for step, c in enumerate(sure):
            length = min(length + (step > 0), high if c >= TAU else 2 * high)
            total += length * (step > 0)
        return total / (len(sure) - 1)

    high = max(range(1, prompt), key=lambda n: -abs(held(n) - mean))
    return parse_policy(f"confkv:high={high},low={2 * high},tau={TAU}")


def figure(traces: list[Trace], path: Path) -> None:
    """Live bytes over the steps, the sawtooth of confkv with the confidence under it, and agreement by policy."""
    rows = [["memory", "same"], ["teeth", "same"], ["sure", "same"]]
    fig, axes = plt.subplot_mosaic(rows, figsize=(11, 7), height_ratios=[2, 1, 1], layout="constrained")
    for trace in traces:
        axes["memory"].plot([n / MIB for n in trace.live], label=trace.policy)
    axes["memory"].set(ylabel="live KV bytes, MiB", ylim=(0, None), title="Memory")
    axes["memory"].legend(ncols=2)
    confkv = next(trace for trace in traces if trace.confidence)
    axes["teeth"].plot([n / MIB for n in confkv.live], color="tab:pink")
    later = [n / MIB for n in confkv.live[len(confkv.live) // 8 :]]  # the first cut, from low, would flatten the rest
    margin = max(later) - min(later) + 0.01
    axes["teeth"].set(ylim=(min(later) - margin, max(later) + margin))
    axes["teeth"].set(ylabel="MiB", title="confkv, closer: grows while unsure, is cut when sure")
    axes["sure"].plot(confkv.confidence, color="tab:gray")
    axes["sure"].axhline(TAU, color="black", linestyle="--", label=f"tau {TAU}")
    axes["sure"].set(xlabel="decode step", ylabel="confidence")
    axes["sure"].legend()
    others = traces[1:]
    bars = axes["same"].bar([t.policy for t in others], [100 * sum(t.top1) / len(t.top1) for t in others])
    axes["same"].bar_label(bars, fmt="%.0f")
    axes["same"].set(ylabel="same next token as the full cache, %", ylim=(0, 105), title="Agreement")
    fig.savefig(path, dpi=130)


def check(rows: list[dict[str, Any]]) -> None:
    """Exit non-zero if the policies were not compared at the bytes asked for."""
    asked = SHARE * rows[0]["live_bytes"]
    for row in rows[1:]:
        if abs(row["live_bytes"] / asked - 1) > 0.02:
            sys.exit(f"{row['policy']}: {row['live_bytes']} live bytes on average, but {asked:.0f} were asked for")


if __name__ == "__main__":
    main()
