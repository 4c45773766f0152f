"""The comparison table, shared by `run` and the demo."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.table import Table

MIB = 1 << 20


def comparison(rows: list[dict[str, Any]], title: str) -> Table:
    """Rows of `Trace.summary`, the full cache first; 80 columns wide."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy")
    heads = (
        "KV live\nMiB",
        "KV held\nMiB",
        "of full\n%",
        "KV peak\nMiB",
        "process\npeak MiB",
        "prefill\ns",
        "decode\nms/token",
        "top-1\nsame %",
        "mean KL\nnats",
    )
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['live_bytes'] / MIB:.2f}",
            f"{row['held_bytes'] / MIB:.2f}",
            f"{row['share_of_full'] * 100:.1f}",
            f"{row['peak_held_bytes'] / MIB:.2f}",
            f"{row['process_peak_bytes'] / MIB:.0f}",
            f"{row['prefill_s']:.2f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['top1_agreement'] * 100:.1f}",
            f"{row['mean_kl']:.4f}",
        )
    return table
