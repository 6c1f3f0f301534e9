"""A real worker that dies the first time that it has saved a checkpoint, before it can say so."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lorry_workers import worker
from lorry_workers.cli import worker as command
from lorry_workers.engine.engine import Engine

DEADLY_NAME = "last-words"
DIED = "DIED_AT_A_SAVE"
"""The variable that names a folder. A file of each op that a worker has died of lies there."""


class DyingEngine(Engine):
    def _save(self, state: Any, kind: Any, content: Any, request: Any, op_id: str) -> Any:
        saved = super()._save(state, kind, content, request, op_id)
        mark = Path(os.environ[DIED]) / kind
        if request.name == DEADLY_NAME and not mark.exists():
            mark.write_text(op_id)
            os.kill(os.getpid(), signal.SIGKILL)
        return saved


if __name__ == "__main__":
    import typer

    worker.Engine = DyingEngine  # type: ignore[misc]
    sys.exit(typer.run(command))
