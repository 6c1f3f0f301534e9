"""`with lorry.local(): ...` runs a whole Lorry behind a notebook, a script or a test."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lorry.stack.programs import default_models
from lorry.stack.settings import load_settings
from lorry.stack.stack import Stack


@contextmanager
def local(
    model: str | None = None,
    *,
    workers: int = 1,
    flower: bool = False,
    home: str | os.PathLike[str] | None = None,
    quiet: bool = True,
    start_timeout: float = 120.0,
) -> Iterator[Stack]:
    """Start Redis and `workers` workers for `model`; inside the block `ServiceClient()` finds them.

        with lorry.local(model="smollm2"):
            client = lorry.ServiceClient()

    `model` is NAME or NAME=PATH; by default, every base model that `lorry models fetch` has put here.

    Without a `home` everything lives in a temporary folder, checkpoints included, and is removed at the end
    of the block; such a stack never collides with a running `lorry up`. With a home (or LORRY_STORE_DIR)
    checkpoints stay. Base models are read from the user's models folder either way.

    Raises `ServiceUnavailable`, with the end of the log of what did not start, if the stack is not ready
    within `start_timeout` seconds. What happens later, such as a worker that is started again, is written
    to stderr unless `quiet`; a stack that has broken down is noted on the error that your code gets from it.
    """
    with ExitStack() as held:
        if home is None:
            home = held.enter_context(tempfile.TemporaryDirectory(prefix="lorry-"))
        settings = load_settings(
            own_redis=True,  # a LORRY_URL in the environment is for clients
            home=Path(home),
            models=[model] if model is not None else default_models(),
            workers=workers,
            flower=flower,
            start_timeout_seconds=start_timeout,
        )
        stack = Stack(
            settings,
            on_event=None if quiet else lambda line: print(f"lorry: {line}", file=sys.stderr),
            started_by="lorry.local()",
        )
        stack.start()
        held.callback(stack.stop)
        held.enter_context(_environment("LORRY_URL", stack.url))
        try:
            yield stack
        except BaseException as error:
            if stack.failure is not None:
                error.add_note(f"The local stack had failed: {stack.failure}")
            raise


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
