"""Speed of the native attention kernel against what one thread can read, and its error against float64.

    python benchmarks/native_kernels.py [--formats bf16 fp32 fp16 int8 int4 int2] [--entries 8192] [--segments 8]
                                 [--queries 1] [--threads 1] [--rounds 60] [--mass] [--isa NAME] [--json FILE]

For each format and head_dim, attention and `read` of as many bytes take turns; the best round of each counts, since
whatever else runs on the machine only ever adds time. One thread is timed by its processor time, several by the clock.
A format whose result is off prints no figures.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvstrata import _native
from kvstrata.bench.measure import provenance

SHAPES = ((64, 3), (128, 4))  # head_dim, query heads per kv head
FORMATS: dict[str, tuple[torch.dtype, tuple[Any, ...] | None, float]] = {  # dtype, codec, error allowed
    "fp32": (torch.float32, None, 1e-5),
    "bf16": (torch.bfloat16, None, 4e-3),
    "fp16": (torch.float16, None, 5e-4),
    "int8": (torch.bfloat16, (8, 8, True, False, 64), 4e-3),
    "int4": (torch.bfloat16, (4, 4, False, True, 64), 4e-3),
    "int4-w16": (torch.bfloat16, (4, 4, False, True, 16), 4e-3),
    "int2": (torch.bfloat16, (2, 2, False, True, 64), 4e-3),
}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Case:
    """`segments` kv heads of one row with `entries` entries each, in shuffled pages of one arena."""

    def __init__(self, name: str, dim: int, group: int, entries: int, segments: int, queries: int) -> None:
        self.dtype, self.codec, self.allowed = FORMATS[name]
        pages = -(-entries // _native.PAGE)
        total = pages * segments
        self.k, self.v = (torch.randn(total, _native.PAGE, dim).to(self.dtype) for _ in range(2))
        self.arena = _native.Arena(NAMES[self.dtype], self.codec, dim, dim)
        if self.codec is None:
            block = self.k, self.v, torch.empty(total, 0, dtype=self.dtype)
        else:
            block = self.coded(dim, total)
        self.block = tuple(torch.empty_like(part) for part in block)  # the bytes that attention reads
        self.arena.add(0, *self.block)  # before they are touched, as a store does
        for mine, part in zip(self.block, block, strict=True):
            mine.copy_(part)
        self.table = torch.randperm(total, dtype=torch.int32).view(segments, pages)
        self.lengths = torch.full((segments,), entries, dtype=torch.int32)
        self.own = _native.Arena(NAMES[self.dtype], None, dim, dim)
        nothing = torch.zeros(segments, 1, dtype=torch.int32)
        self.tiers = [_native.Pages(self.arena, self.table, self.lengths)]
        if self.codec:
            self.tiers.insert(0, _native.Pages(self.own, nothing, nothing[:, 0].clone()))
        self.q = torch.randn(1, segments * group, queries, dim).to(self.dtype)
        self.out = torch.empty_like(self.q)
        self.scale = 1 / math.sqrt(dim)
        self.mass = torch.empty(1, segments, entries)

    def coded(self, dim: int, total: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Code the pages, and replace k and v by what the codes stand for."""
        k_bits, v_bits, symmetric, _, window = self.codec or ()
        numbers = 2 * dim if symmetric else 2 * (_native.PAGE // window) * dim + 2 * _native.PAGE
        k, v = (torch.empty(total, _native.PAGE * dim * bits // 8, dtype=torch.uint8) for bits in (k_bits, v_bits))
        grid = torch.empty(total, numbers, dtype=torch.float32 if symmetric else self.dtype)
        _native.pack(self.arena, self.k, self.v, k, v, grid)
        self.k, self.v = (torch.empty(total, _native.PAGE, dim) for _ in range(2))
        _native.unpack(self.arena, k, v, grid, self.k, self.v)
        return k, v, grid

    def attend(self, threads: int, mass: bool) -> None:
        """Compute once, into `out`."""
        options = {"mass": self.mass, "offsets": [0] * len(self.tiers), "weights": [1.0]} if mass else {}
        _native.attend(self.q, self.tiers, self.out, self.scale, threads=threads, **options)

    def error(self, threads: int) -> float:
        """Largest error of one segment's results, relative to its largest number."""
        self.attend(threads, mass=False)
        entries, group = int(self.lengths[0]), self.q.shape[1] // len(self.lengths)
        k, v = (x[self.table[0].long()].flatten(0, 1)[:entries].double() for x in (self.k, self.v))
        scores = self.scale * self.q[0, :group].double() @ k.T
        queries = self.q.shape[2]
        if self.codec is None:  # the queries' own entries are the newest ones here
            scores[:, :, entries - queries :].masked_fill_(torch.ones(queries, queries).triu(1).bool(), -math.inf)
        truth = scores.softmax(dim=-1) @ v
        return float((self.out[0, :group].double() - truth).abs().max() / truth.abs().max())


def measure(case: Case, threads: int, rounds: int, mass: bool) -> dict[str, Any]:
    """Best seconds of attention, of attention with mass, and of reading the same bytes, in turns."""
    read = torch.cat([part.flatten().view(torch.uint8) for part in case.block if part.numel()])
    best: dict[str, float] = {}
    works = {"attend": lambda: case.attend(threads, mass=False), "read": lambda: _native.read(read, threads)}
    if mass:
        works["mass"] = lambda: case.attend(threads, mass=True)
    clock = time.thread_time if threads == 1 else time.perf_counter
    for _ in range(rounds):
        for name, work in works.items():
            start = clock()
            work()
            best[name] = min(best.get(name, math.inf), clock() - start)
    keys = int(case.lengths.sum())
    row = {
        "gb_s": read.numel() / best["attend"] / 1e9,
        "read_gb_s": read.numel() / best["read"] / 1e9,
        "share": best["read"] / best["attend"],
        "ns_per_key": best["attend"] / keys * 1e9,
    }
    return row | ({"mass_costs": best["mass"] / best["attend"] - 1} if mass else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["fp32", "bf16", "fp16", "int8", "int4", "int2"])
    parser.add_argument("--entries", type=int, default=8192)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--mass", action="store_true")
    parser.add_argument("--isa")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.isa:
        _native._force_isa(args.isa)
    torch.manual_seed(0)
    table = Table("format", "head_dim", "G", "GB/s", "read GB/s", "share", "ns/key/kv head", "error", "mass costs")
    rows: list[dict[str, Any]] = []
    for name in args.formats:
        for dim, group in SHAPES:
            case = Case(name, dim, group, args.entries, args.segments, args.queries)
            row: dict[str, Any] = {"format": name, "dim": dim, "group": group, "error": case.error(args.threads)}
            if not row["error"] <= case.allowed:
                table.add_row(name, str(dim), str(group), *["-"] * 4, f"{row['error']:.1e} is too much", "-")
                rows.append(row)
                continue
            row |= measure(case, args.threads, args.rounds, args.mass)
            rows.append(row)
            cost = f"{row['mass_costs']:.0%}" if args.mass else "-"
            figures = f"{row['gb_s']:.1f}", f"{row['read_gb_s']:.1f}", f"{row['share']:.0%}", f"{row['ns_per_key']:.1f}"
            table.add_row(name, str(dim), str(group), *figures, f"{row['error']:.1e}", cost)
    console = Console()
    console.print(f"isa {_native.isa()}, {args.threads} thread(s), {args.queries} queries, {args.entries} entries")
    console.print(table)
    if args.json:
        report = {"machine": provenance(), "isa": _native.isa(), "arguments": vars(args) | {"json": None}, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
