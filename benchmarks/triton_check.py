"""Triton kernels on this machine's GPU: checked against float64, then timed beside a copy in the card's own memory.

    python benchmarks/triton_check.py [--formats bfloat16 float16 int8 int4 int2] [--dims 64 128] [--rows 1 8]
                                      [--entries 4096 16384 65536] [--rounds 30] [--tune] [--json FILE]

Decode: one query per row, 8 key-value heads of 4 query heads. Bytes are what a call must read, pages with their grids;
a copy's are read and written. Times are medians of CUDA graphs that are replayed after the L2 cache was overwritten.
Column sums are compared with matrix products in torch (`mass.ref`). What fails its check gets no figures. Without a
GPU it exits with 2. `--tune` tries Triton's options on the longest entries instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvstrata.bench.kernels import Shape, Variant, errors, random_queries, random_tiers
from kvstrata.bench.measure import provenance
from kvstrata.kernels.attention import Softmax
from kvstrata.kernels.mass import ALL_ROWS, Reduction, ref
from kvstrata.kernels.pages import PAGE

HEADS, GROUP = 8, 4
PROBE = 2 << 30  # bytes copied
FLUSH = 256 << 20  # far beyond the L2 cache
NEWEST = Reduction(1)
ROUNDS = 2  # the output is rounded to 16 bit, and probabilities were before
SUMS = ((32, 16384), (32, 65536), (4096, 4096), (8192, 8192))  # queries that count, keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "float16", "int8", "int4", "int2"])
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--entries", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that CUDA can use: nothing was checked", file=sys.stderr)
        raise SystemExit(2)
    clock = Clock(options.rounds)
    copied = clock.copy()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copied:.0f} GB/s (1e9 bytes, read and written)")
    rows = list(tuned(options, clock, copied) if options.tune else measured(options, clock, copied))
    for title in dict.fromkeys(row["what"] for row in rows):
        Console(width=150).print(table(title, [row for row in rows if row["what"] == title]))
    if options.json:
        record = {"copy_gb_s": copied, "triton": version("triton"), "rows": rows, **provenance()}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    raise SystemExit(0 if all(row["passed"] for row in rows) else 1)


class Clock:
    """Medians over some rounds, in milliseconds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def __call__(self, call: Callable[[], Any]) -> float:
        """Launches included."""
        times = []
        for _ in range(self.rounds):
            self.flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def graph(self, call: Callable[[], Any]) -> float:
        """Without the time that launching takes."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self(graph.replay)

    def copy(self) -> float:
        """GB/s of a copy from memory to memory."""
        source = torch.zeros(PROBE, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        for _ in range(3):
            target.copy_(source)
        return 2 * PROBE / self(lambda: target.copy_(source)) / 1e6


def measured(options: argparse.Namespace, clock: Clock, copied: float) -> Iterator[dict[str, Any]]:
    for dim, name in itertools.product(options.dims, options.formats):
        found = {mass: check(name, dim, mass) for mass in (False, True)}
        for rows, entries, mass in itertools.product(options.rows, options.entries, (False, True)):
            shape = Shape(rows, HEADS, GROUP, dim)
            yield decode(name, shape, entries, mass, found[mass], clock, copied)
    for dim, (rows, keys) in itertools.product(options.dims, SUMS):
        yield sums(dim, rows, keys, clock)


def check(name: str, dim: int, mass: bool) -> dict[str, Any]:
    """Errors on ragged lengths against float64, of the largest number."""
    found = errors(Variant("triton", name, mass=mass), Shape(2, HEADS, GROUP, dim), torch.device("cuda"))
    right = found.out <= ROUNDS * found.out_allowed and (found.mass or 0.0) <= (found.mass_allowed or 0.0)
    return {"passed": right, "error": found.out, "mass_error": found.mass}


def decode(
    name: str, shape: Shape, entries: int, mass: bool, found: dict[str, Any], clock: Clock, copied: float
) -> dict[str, Any]:
    row = {"what": "decode", "format": name, "shape": str(shape), "entries": entries, "mass": mass, **found}
    if not found["passed"]:
        return row
    call, read = prepared(name, shape, entries, mass)
    ms, eager = clock.graph(call), clock(call)
    return {
        **row,
        "ms": ms,
        "ms_with_launch": eager,
        "GB/s": read / ms / 1e6,
        "share_of_copy": read / ms / 1e6 / copied,
    }


def prepared(name: str, shape: Shape, entries: int, mass: bool, **tuning: Any) -> tuple[Callable[[], Any], int]:
    """A call on random pages, and the bytes it must read."""
    from kvstrata.kernels.attention import triton

    device, variant = torch.device("cuda"), Variant("triton", name)
    tiers = random_tiers(variant.of(shape.dim), [entries] * shape.segments, device, native=False)
    q = random_queries(variant, shape, device)
    at = [triton.addresses(tier) for tier in tiers]
    options = {"softmax": Softmax(shape.dim**-0.5), "reduction": NEWEST if mass else None, "at": at}
    read = sum(tier.format.page_bytes * int((-(-tier.lengths // PAGE)).sum()) for tier in tiers)
    return lambda: triton.attend_pages(q, tiers, **options, tuning=triton.Tuning(**tuning)), read


def sums(dim: int, rows: int, keys: int, clock: Clock) -> dict[str, Any]:
    """Column sums of a prompt: the two passes in Triton, and in torch."""
    from kvstrata.kernels.mass import triton

    q = torch.randn(1, HEADS * GROUP, rows, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, HEADS, keys, dim, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"scale": dim**-0.5}

    def both(kernels: Any) -> torch.Tensor:
        lse = kernels.column_lse(q, k, **options)
        return kernels.column_mass(q, k, lse, **options, reduction=Reduction(ALL_ROWS))

    error = sums_error(both(triton), q, k, dim**-0.5)
    row = {"what": "column sums", "format": "bf16", "shape": f"R{rows} D{dim}", "entries": keys, "error": error}
    if not error <= 1e-4:
        return {**row, "passed": False}
    ms, torch_ms = clock.graph(lambda: both(triton)), clock(lambda: both(ref))
    flops = 4 * HEADS * GROUP * dim * rows * (keys - rows / 2)
    return {**row, "passed": True, "ms": ms, "torch_ms": torch_ms, "TFLOP/s": flops / ms / 1e9, "faster": torch_ms / ms}


def sums_error(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> float:
    """Of the largest number, one head's against float64."""
    rows, keys = q.shape[2], k.shape[2]
    true = torch.zeros(keys, dtype=torch.float64, device="cuda")
    for first in range(0, rows, 1024):
        part = q[0, :GROUP, first : first + 1024].double()
        scores = scale * part @ k[0, 0].double().T
        row = torch.arange(first, first + part.shape[1], device="cuda")[:, None]
        hidden = torch.arange(keys, device="cuda") > keys - rows + row
        true += scores.masked_fill_(hidden, -math.inf).softmax(-1).sum((0, 1)) / GROUP
    return float((got[0, 0] - true).abs().max() / true.max())


def tuned(options: argparse.Namespace, clock: Clock, copied: float) -> Iterator[dict[str, Any]]:
    """Triton's options on the longest entries, fastest first."""
    shape_of = {dim: Shape(max(options.rows), HEADS, GROUP, dim) for dim in options.dims}
    for (dim, shape), name in itertools.product(shape_of.items(), options.formats):
        found, rows = check(name, dim, mass=False), []
        coded = name.startswith("int")
        stages, registers = ((1, 2, 3), (None, 168, 128)) if coded else ((2, 3, 4, 5), (None,))
        for warps, staged, most, pages in itertools.product((2, 4, 8), stages, registers, (None, 8, 16, 32)):
            tuning = {"warps": warps, "pages": pages, "coded_stages" if coded else "stages": staged}
            tuning |= {"coded_registers": most} if coded else {}
            row = {"what": f"tuning {name} {shape}", **tuning, **found}
            try:
                call, read = prepared(name, shape, max(options.entries), mass=False, **tuning)
                ms = clock.graph(call)
            except Exception as error:  # an option that this card cannot serve
                row["failed"] = str(error).splitlines()[0][:60]
            else:
                row |= {"ms": ms, "share_of_copy": read / ms / 1e6 / copied} if found["passed"] else {}
            rows.append(row)
        yield from sorted(rows, key=lambda row: row.get("ms", math.inf))[:8]


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    made = Table(title=title)
    heads = list(dict.fromkeys(head for row in rows for head in row if head != "what"))
    for head in heads:
        made.add_column(head, justify="right")
    for row in rows:
        made.add_row(*(cell(head, row.get(head)) for head in heads))
    return made


def cell(head: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if "error" in head:
        return f"{value:.1e}"
    return f"{value:.0%}" if "share" in head else f"{value:.3g}"


if __name__ == "__main__":
    main()
