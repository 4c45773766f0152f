"""Decode speed and bytes of the full cache under kvstrata against transformers' DynamicCache with sdpa, in one run.

    python benchmarks/decode.py [--dtype float32|bfloat16] [--batch 1 8] [--context 2048 4096] [--out FILE.json]

One row is prefilled and repeated, with its memory not shared. Then the two caches take turns: `rounds` rounds of
`steps` steps each, medians over all steps. "Our Python" is the share of a step spent in our layers outside the
attention operator, appending included, timed on further steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import kvstrata
from kvstrata.bench.measure import provenance
from kvstrata.cache import Layer
from kvstrata.hf.compat import CACHE_KEYWORD
from kvstrata.hf.models import load_model

TEXT = Path(__file__).parent.parent / "examples" / "pride-and-prejudice-41.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(None, options.dtype, "cpu", Console(stderr=True))
    text = TEXT.read_text(encoding="utf-8")
    ids = tokenizer(text * 2, return_tensors="pt", verbose=False)["input_ids"]
    rows = []
    for context in options.context:
        for batch in options.batch:
            rows.append(case(model, ids[:, :context], batch, options.rounds, options.steps))
            Console(stderr=True).print(rows[-1])
    Console(width=110).print(table(rows, options.dtype))
    if options.out:
        record = {
            "dtype": options.dtype,
            "rounds": options.rounds,
            "steps": options.steps,
            "rows": rows,
            **provenance(),
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


@torch.no_grad()
def case(model: Any, ids: torch.Tensor, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    stock = DynamicCache(config=model.config)
    model(ids, logits_to_keep=1, **{CACHE_KEYWORD: stock})
    stock.batch_repeat_interleave(batch)
    with kvstrata.compress(model, "full") as ours:
        model(ids, logits_to_keep=1, **{CACHE_KEYWORD: ours})
        ours.batch_repeat_interleave(batch)
        prefilled = ours.nbytes
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        token = ids[:, :1].expand(batch, 1)
        logits: dict[str, torch.Tensor] = {}
        for turn in range(rounds + 1):
            for name, cache in (("stock", stock), ("ours", ours)):
                for _ in range(steps):
                    start = time.perf_counter()
                    logits[name] = model(token, logits_to_keep=1, **{CACHE_KEYWORD: cache}).logits
                    if turn:  # the first round warms up
                        times[name].append((time.perf_counter() - start) * 1e3)
        share = python_share(model, token, ours, steps)
    if not torch.equal(logits["stock"].argmax(-1), logits["ours"].argmax(-1)):
        raise SystemExit("the two caches disagree on the next token: no speed is printed")
    stock_ms, our_ms = statistics.median(times["stock"]), statistics.median(times["ours"])
    layer = stock.layers[0]
    stock_bytes = len(stock.layers) * (layer.keys.nbytes + layer.values.nbytes)
    return {
        "context": ids.shape[1],
        "batch": batch,
        "stock_ms": stock_ms,
        "ours_ms": our_ms,
        "speedup": stock_ms / our_ms,
        "stock_bytes": stock_bytes,
        "live_bytes": prefilled.live,
        "held_bytes": prefilled.held,
        "python_share": share,
    }


def python_share(model: Any, token: torch.Tensor, cache: Any, steps: int) -> float:
    """Share of a step spent in `Layer.attend` outside the attention operator."""
    inside, attention = 0.0, 0.0
    attend, kernel = Layer.attend, kvstrata.cache.layer.attend

    def timed_layer(*args: Any) -> torch.Tensor:
        nonlocal inside
        start = time.perf_counter()
        out = attend(*args)
        inside += time.perf_counter() - start
        return out

    def timed_kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal attention
        start = time.perf_counter()
        out = kernel(*args, **kwargs)
        attention += time.perf_counter() - start
        return out

    Layer.attend, kvstrata.cache.layer.attend = timed_layer, timed_kernel  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        for _ in range(steps):
            model(token, logits_to_keep=1, **{CACHE_KEYWORD: cache})
        whole = time.perf_counter() - start
    finally:
        Layer.attend, kvstrata.cache.layer.attend = attend, kernel  # type: ignore[method-assign]
    return (inside - attention) / whole


def table(rows: list[dict[str, Any]], dtype: str) -> Table:
    made = Table(title=f"SmolLM2-135M {dtype}, full cache, decode; stock = DynamicCache with sdpa")
    heads = (
        "context",
        "batch",
        "stock ms",
        "ours ms",
        "stock / ours",
        "stock MiB",
        "live MiB",
        "held MiB",
        "our Python",
    )
    for head in heads:
        made.add_column(head, justify="right")
    for r in rows:
        sizes = (f"{r[key] / 2**20:.1f}" for key in ("stock_bytes", "live_bytes", "held_bytes"))
        cells = (
            f"{r['stock_ms']:.1f}",
            f"{r['ours_ms']:.1f}",
            f"{r['speedup']:.2f}x",
            *sizes,
            f"{r['python_share']:.1%}",
        )
        made.add_row(str(r["context"]), str(r["batch"]), *cells)
    return made


if __name__ == "__main__":
    main()
