"""The command line: one file per command."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from kvstrata.cli.bench import bench
from kvstrata.cli.calibrate import app as calibrate
from kvstrata.cli.diagnose import diagnose
from kvstrata.cli.doctor import doctor
from kvstrata.cli.estimate import estimate
from kvstrata.cli.evaluate import app as evaluate
from kvstrata.cli.ls import ls
from kvstrata.cli.run import run
from kvstrata.core import KvstrataError

app = typer.Typer(help="Key-value-cache compression that really frees memory.", no_args_is_help=True)
app.command()(run)
app.command()(estimate)
app.command()(doctor)
app.command()(bench)
app.add_typer(evaluate, name="evaluate")
app.command()(diagnose)
app.add_typer(calibrate, name="calibrate")
app.command()(ls)


def main() -> None:
    """Run the command line; errors of ours are one line and exit code 2."""
    try:
        app()
    except KvstrataError as error:
        Console(stderr=True).print(f"[red]kvstrata:[/] {error}", highlight=False)
        sys.exit(2)
