"""Print tables on stdout, wide enough for all columns if stdout is not a terminal."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

WIDTH = 110  # columns of a file or a pipe


def show(table: Table) -> None:
    """Print a table. Text in its cells is not markup."""
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width, markup=False).print(table)
