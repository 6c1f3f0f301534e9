"""What every benchmark shares: its options, a table, and one line of JSON at the end."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the line of JSON there")
    return parser.parse_args()


def in_turn(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run the contenders A, B, C, A, B, C, ..., so that a machine that gets slower slows all of them."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            found[name].append(run())
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def report(title: str, rows: Sequence[tuple[str, ...]], figures: dict[str, float], path: Path | None) -> None:
    """The table, then one line of JSON. The first of `rows` is the header."""
    show(title, rows)
    line = json.dumps({key: round(value, 4) for key, value in figures.items()})
    print(line)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")


def show(title: str, rows: Sequence[tuple[str, ...]]) -> None:
    """A table; the first of `rows` is the header."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(rows[0]):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=110).print(table)
