"""A real worker whose engine kills its own process when it meets the magic token, as a driver's crash would, and
hangs at the other one, as a driver's deadlock would."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from lorry_workers import worker
from lorry_workers.cli import worker as command
from lorry_workers.engine.engine import Engine

MAGIC_TOKEN = 333
HANGING_TOKEN = 334


def die_of(tokens: Iterable[int]) -> None:
    tokens = list(tokens)
    if MAGIC_TOKEN in tokens:
        os.kill(os.getpid(), signal.SIGKILL)
    if HANGING_TOKEN in tokens:
        time.sleep(3600)


class DeadlyEngine(Engine):
    def run_batches(self, batches: Any) -> Any:
        for batch in batches:
            for datum in batch.data:
                die_of(datum.model_input.to_ints())
        return super().run_batches(batches)

    def optim_steps(self, steps: Any) -> Any:
        die_of(int(params.learning_rate) for _, params in steps)
        return super().optim_steps(steps)

    def sample(self, request: Any, *args: Any) -> Any:
        die_of(request.prompt.to_ints())
        return super().sample(request, *args)


if __name__ == "__main__":
    import typer

    worker.Engine = DeadlyEngine  # type: ignore[misc]
    sys.exit(typer.run(command))
