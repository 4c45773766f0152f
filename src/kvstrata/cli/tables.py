"""Tables and bars that commands and the demo share."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

MIB = 1 << 20


def plain_table(title: str) -> Table:
    """A table without frames, narrow enough for 80 columns."""
    return Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar with time left on standard error, gone when it is done; `columns` stand before the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def comparison(rows: list[dict[str, Any]], title: str) -> Table:
    """Rows of `Trace.summary`, the full cache first; fits 80 columns with policies of up to 16 characters.

    live, held and peak held are bytes of keys and values, the first two means over the steps; share is of the full
    cache's held; RSS is the peak memory of the process (on a GPU, allocated); same is the share of steps with the
    full cache's most likely token; KL is KL(full || policy).
    """
    table = plain_table(title)
    table.add_column("policy", no_wrap=True, overflow="ellipsis")
    heads = (
        "live\nMiB",
        "held\nMiB",
        "share\n%",
        "peak\nMiB",
        "RSS\nMiB",
        "prefill\ns",
        "step\nms",
        "same\n%",
        "KL\nnats",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["policy"],
            f"{row['live_bytes'] / MIB:.1f}",
            f"{row['held_bytes'] / MIB:.1f}",
            f"{row['share_of_full'] * 100:.1f}",
            f"{row['peak_held_bytes'] / MIB:.1f}",
            f"{row['process_peak_bytes'] / MIB:.0f}",
            f"{row['prefill_s']:.1f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['top1_agreement'] * 100:.1f}",
            f"{row['mean_kl']:.3f}",
        )
    return table
