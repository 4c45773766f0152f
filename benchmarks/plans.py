"""What a plan costs in the store: holes filled by the last entries, against entries copied in order to new pages.

    python benchmarks/plans.py [--context 2048] [--rows 1] [--heads 3] [--dim 64] [--rounds 15]

One layer in bf16, native kernels and torch alone. Every share of the entries is dropped at random both ways, taking
turns; medians of ms per layer. "MiB" is what the arena holds afterwards: filled holes leave free pages inside blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from kvstrata.core import Plan, Tier
from kvstrata.store import Account, LayerStore, exact

WAYS = {"fill": 0.0, "copy": 2.0}  # by the share of entries below which a plan copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("context", 2048), ("rows", 1), ("heads", 3), ("dim", 64), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    table = Table("kernels", "dropped", "fill ms", "copy ms", "fill / copy", "fill MiB", "copy MiB")
    for kernels in ("native", "reference"):
        for dropped in (1 / options.context, 0.05, 0.1, 0.25, 0.5, 0.75):
            ms, mib = compare(options, kernels, dropped)
            table.add_row(
                kernels,
                f"{max(1, round(dropped * options.context))}",
                *(f"{ms[way]:.3f}" for way in WAYS),
                f"{ms['fill'] / ms['copy']:.2f}",
                *(f"{mib[way]:.2f}" for way in WAYS),
            )
    Console(width=100).print(table)


def compare(options: argparse.Namespace, kernels: str, dropped: float) -> tuple[dict[str, float], dict[str, float]]:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    mib: dict[str, float] = {}
    for turn in range(options.rounds):
        for way, threshold in WAYS.items():
            exact.MOVE_BELOW = threshold
            account = Account()
            store = LayerStore(0, [], False, account, kernels=kernels)
            k = torch.randn(options.rows, options.heads, options.context, options.dim).bfloat16()
            store.append(k, k, [options.context] * options.rows, [0] * options.rows, 0)
            gone = torch.rand(options.rows, 1, options.context).argsort(dim=-1) < dropped * options.context
            plan = Plan(torch.where(gone, int(Tier.DROP), int(Tier.EXACT)).to(torch.uint8))
            start = time.perf_counter()
            store.apply(plan)
            if turn:  # the first round warms up
                times[way].append((time.perf_counter() - start) * 1e3)
            mib[way] = account.now.reserved / 2**20
    return {way: statistics.median(found) for way, found in times.items()}, mib


if __name__ == "__main__":
    main()
