"""Calls that need no op of a job, in the shape of one: what their `_async` twins return."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lorry_jobs.errors import LorryError
from lorry_jobs.results import Outcome

from .futures import APIFuture, Submission

if TYPE_CHECKING:
    from .process import ClientProcess

T = TypeVar("T")


def at_once(process: ClientProcess, op: str, function: Callable[[], T]) -> Submission[T]:
    """It runs now, and awaiting it gives the value."""
    value = function()
    future: APIFuture[T] = APIFuture(process, op, op, lambda _: value)
    future._resolve(Outcome(op, None, {}, None, False))
    return Submission(future, levels=1)


def in_background(process: ClientProcess, op: str, function: Callable[[], T]) -> Submission[T]:
    """For a call that has to wait for the server: an event loop must not stand still. It starts now."""
    value: concurrent.futures.Future[T] = concurrent.futures.Future()
    future: APIFuture[T] = APIFuture(process, op, op, lambda _: value.result())

    def run() -> None:
        failure: LorryError | None = None
        try:
            value.set_result(function())
        except Exception as error:  # noqa: BLE001  raised again where the value is asked for
            value.set_exception(error)
            failure = error if isinstance(error, LorryError) else None
        future._resolve(Outcome(op, failure, {}, None, False))

    threading.Thread(target=run, name=f"lorry-{op}", daemon=True).start()
    return Submission(future, levels=1)
