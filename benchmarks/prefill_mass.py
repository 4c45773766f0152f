"""Log-sum-exp and attention mass of a prefill's keys: native kernels against the torch reference, in one run.

    python benchmarks/prefill_mass.py [--keys 4096] [--rows 32 88 all] [--dtype float32 bfloat16] [--threads 1] [--isa]

The two take turns; medians over all rounds. "GFLOP/s" counts the products of queries and keys alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from kvstrata import _native
from kvstrata.kernels.mass import column_lse, column_mass

SHAPES = [(3, 3, 64), (8, 4, 128)]  # kv heads, query heads of each, channels: SmolLM2-135M, Qwen3-8B
SCALE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--rows", nargs="+", default=["32", "88", "all"], help="queries that count")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="of the native kernels; default: the best this machine runs")
    options = parser.parse_args()
    if options.isa:
        _native._force_isa(options.isa)
    torch.set_num_threads(options.threads)
    title = f"{options.keys} keys, {options.threads} threads, {_native.isa()}; ms"
    table = Table("H x G x D", "dtype", "rows", "what", "torch", "native", "torch / native", "GFLOP/s", title=title)
    for shape in SHAPES:
        for dtype in options.dtype:
            for rows in options.rows:
                count = options.keys if rows == "all" else int(rows)
                for cells in case(shape, getattr(torch, dtype), count, options):
                    table.add_row("x".join(map(str, shape)), dtype, rows, *cells)
    Console(width=110).print(table)


def case(shape: tuple[int, int, int], dtype: torch.dtype, rows: int, options: argparse.Namespace) -> list[list[str]]:
    """Cells of one line for the lse and one for the mass."""
    heads, group, dim = shape
    torch.manual_seed(0)
    q = torch.randn(1, heads * group, rows, dim).to(dtype)
    k = torch.randn(1, heads, options.keys, dim).to(dtype)
    lse, mass = torch.empty(q.shape[:3]), torch.empty(k.shape[:3])
    threads = options.threads
    calls = {
        "lse": (
            lambda: column_lse(q, k, scale=SCALE),
            lambda: _native.column_lse(q, k, lse, SCALE, threads=threads),
        ),
        "mass": (
            lambda: column_mass(q, k, lse, scale=SCALE),
            lambda: _native.column_mass(q, k, lse, mass, SCALE, threads=threads),
        ),
    }
    for what, found in (("lse", lse), ("mass", mass)):
        theirs = calls[what][0]()
        calls[what][1]()
        if not torch.allclose(found, theirs, rtol=1e-4, atol=1e-4):
            raise SystemExit(f"native {what} is not what the reference gives: no speed is printed")
    flops = 2 * dim * heads * group * (rows * options.keys - rows * (rows - 1) / 2)
    lines = []
    for what, (theirs, ours) in calls.items():
        times = [(elapsed(theirs), elapsed(ours)) for _ in range(options.rounds)]
        torch_ms, native_ms = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        lines.append([what, f"{torch_ms:.1f}", f"{native_ms:.1f}", f"{ratio:.2f}x", f"{flops / native_ms / 1e6:.1f}"])
    return lines


def elapsed(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
