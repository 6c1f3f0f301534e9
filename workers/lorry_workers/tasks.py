"""The Celery tasks: one per op. A task hands its op to the clock, waits until it is committed, and says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, bootsteps
from celery.exceptions import Ignore
from celery.signals import task_unknown

from lorry_jobs import ops, transport
from lorry_jobs.errors import StaleOwner, UserError

from .lanes import Outcome
from .runtime import Runtime


class OpTask(Task):  # type: ignore[misc]
    """Results are written by the commit, so Celery ignores what a task returns, except to show it in Flower."""

    abstract = True
    ignore_result = True
    acks_late = False
    throws = (UserError,)  # expected: no traceback in the worker's log


def register_tasks(app: Celery, runtime: Callable[[], Runtime]) -> None:
    """`runtime` is called when a task runs: by then the bootstep has started it."""

    def finish(task: OpTask, run: Callable[[], Outcome | None]) -> dict[str, Any]:
        try:
            outcome = run()
        except StaleOwner:
            outcome = None
        if outcome is None:
            # A duplicate, or the job moved. Without the event Flower would show the task as started for ever.
            task.send_event("task-rejected", requeue=False)
            raise Ignore
        if outcome.error is not None:
            raise outcome.error
        return outcome.summary

    def op_task(op: str) -> None:
        @app.task(base=OpTask, bind=True, name=ops.task_name(op))
        def run(self: OpTask, job: str, seq: int) -> dict[str, Any]:
            channel = getattr(self.request, "lorry_channel", None) or ""
            return finish(self, lambda: runtime().run_op(op, job, seq, channel))

    for op in ops.CHAIN_OPS:
        op_task(op)

    # An op of a newer client. Celery would only report it, and the job's chain would wait for its commit for ever;
    # run like any other, it fails in its turn, with the reason.
    def unknown(sender: Any, name: str, message: Any, **_: Any) -> None:
        headers = message.headers
        if headers.get(transport.JOB) is not None:
            op, job, seq = name.removeprefix("lorry."), headers[transport.JOB], headers[transport.SEQ]
            arguments = (op, job, seq, headers.get(transport.CHANNEL) or "")
            threading.Thread(target=runtime().run_op, args=arguments, daemon=True).start()

    task_unknown.connect(unknown, weak=False)

    def request_task(op: str) -> None:
        @app.task(base=OpTask, bind=True, name=ops.task_name(op))
        def run(self: OpTask, *args: Any) -> dict[str, Any]:
            channel = getattr(self.request, "lorry_channel", None) or ""
            return finish(self, lambda: runtime().run_request(op, self.request.id, channel))

    for op in (ops.SAMPLE, *ops.CHECKPOINT_OPS):
        request_task(op)


def hand_over_at_sigterm(runtime: Runtime) -> None:
    """Celery's own reaction to SIGTERM, to hear no more messages, comes after the runtime has handed its jobs on."""
    celerys = signal.getsignal(signal.SIGTERM)
    if not callable(celerys):
        return

    def on_signal(number: int, frame: Any) -> None:
        def stop() -> None:
            if threading.current_thread() is threading.main_thread():
                celerys(number, frame)
            else:
                os.kill(os.getpid(), number)  # comes back here, in the main thread

        runtime.on_sigterm(stop)

    signal.signal(signal.SIGTERM, on_signal)


def runtime_step(make: Callable[[], Runtime]) -> tuple[type[bootsteps.StartStopStep], Callable[[], Runtime]]:
    """-> (the bootstep that owns the runtime for the life of the worker, a way to reach it)."""
    holder: list[Runtime] = []

    class RuntimeStep(bootsteps.StartStopStep):  # type: ignore[misc]
        # Started after the pool, so stopped before it: when the pool is joined, no task waits for the clock any more.
        requires = ("celery.worker.components:Pool",)

        def start(self, worker: Any) -> None:
            runtime = make()
            holder.append(runtime)
            runtime.start()
            hand_over_at_sigterm(runtime)

        def stop(self, worker: Any) -> None:
            for runtime in holder:
                runtime.stop()

    return RuntimeStep, lambda: holder[0]
