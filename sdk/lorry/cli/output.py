"""How commands print: one console, and tables that fit a terminal of 80 columns and a pipe."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 240


def make_console(*, stderr: bool = False) -> Console:
    """No emoji: ":train:" in a job's id is no picture. What is piped is not cut to a terminal's width."""
    stream = sys.stderr if stderr else sys.stdout
    free = not stream.isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, highlight=False, emoji=False, width=PIPE_COLUMNS if free else None)


def make_table(*columns: str, whole: str | None = None) -> Table:
    """Without lines, which would take a fifth of a narrow terminal. `whole`: the column that is never wrapped."""
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.overflow = "fold"  # nothing that somebody may want to copy is cut off
        column.no_wrap = column.header == whole
        column.min_width = max((len(word) for word in str(column.header).split()), default=0)
    return table
