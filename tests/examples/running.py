"""An example as its reader runs it: a process of its own, against a server that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lorry.stack import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *options: str, stack: Stack, folder: Path, timeout: float) -> str:
    """What `examples/<name>` printed. It must have ended well. `folder`: its working folder, and its Lorry's home."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("LORRY_")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        env=env | {"LORRY_URL": stack.url, "LORRY_HOME": str(folder), "COLUMNS": "200"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
