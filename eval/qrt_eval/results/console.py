"""Tables on stdout, wide enough for all columns where there is no terminal to fit."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

WIDTH = 110  # of a file or a pipe


def show(table: Table) -> None:
    """Print a table; text in its cells is no markup."""
    width = None if sys.stdout.isatty() else WIDTH
    Console(width=width, markup=False).print(table)
