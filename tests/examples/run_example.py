"""Run one of the examples as a user does: in a process of its own, in an empty folder, on a server that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lorry.stack import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *options: str, stack: Stack, folder: Path, timeout: float = 600) -> str:
    """What `python examples/<name> <options>` printed. `folder`: where it runs, and the home of its caches."""
    done = subprocess.run(
        command(name, *options),
        env=environment(stack, folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, "-W", "error::RuntimeWarning", str(EXAMPLES / name), *options]


def environment(stack: Stack, folder: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("LORRY_")}
    return own | {"LORRY_URL": stack.url, "LORRY_HOME": str(folder / "home"), "COLUMNS": "200"}


def sections(output: str) -> dict[str, str]:
    """The parts of an output whose headings are lines `== heading`."""
    parts = output.split("\n== ")[1:]
    return {heading: text for heading, _, text in (part.partition("\n") for part in parts)}
