"""The ops of one cycle on the engine: the batches of all jobs in one call, then their steps, then what goes alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lorry_jobs import ops
from lorry_jobs.errors import AccumulationIncomplete, LorryError
from lorry_jobs.types import ForwardBackwardOutput

from .committer import CLEAR, KEEP
from .engine.engine import Engine
from .executor import Reply, as_batch, batch_reply, execute, step_reply
from .lanes import Delivery, Lane

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class OpRun:
    """An op of this cycle, and what came of it."""

    lane: Lane
    delivery: Delivery
    result: Reply | Exception | None = None
    started_ms: int = 0
    milliseconds: float = 0.0
    """How long the part of the cycle took that it was in, together with the ops of other jobs."""
    incomplete: str = KEEP
    """Whether it changes that the job's accumulation lacks a part: KEEP, CLEAR, or the seq of that part."""

    @property
    def job(self) -> str:
        return self.lane.job


def train(engine: Engine, runs: Sequence[OpRun], cycle: int) -> None:
    """`forward` and `forward_backward` of all jobs, in one call of the engine.

    A job with a failed `forward_backward` has lost all that it accumulated, and its lane is incomplete.
    """
    with _Phase(runs, ops.FORWARD, ops.FORWARD_BACKWARD) as phase:
        outputs = _call(engine.run_batches, [as_batch(run.job, run.delivery) for run in phase.runs])
        for run, output in zip(phase.runs, outputs, strict=True):
            run.result = _batch_reply(output, cycle)
    for run in runs:
        if run.delivery.op == ops.FORWARD_BACKWARD and isinstance(run.result, Exception):
            _drop_gradients(engine, run.job)
            if run.lane.incomplete is None:
                run.lane.incomplete = run.delivery.seq
                run.incomplete = str(run.delivery.seq)


def step(engine: Engine, runs: Sequence[OpRun], cycle: int) -> None:
    """`optim_step` of all jobs, in one call; refused for those whose accumulation lacks a part."""
    for run in runs:
        if run.delivery.op == ops.OPTIM_STEP and run.lane.incomplete is not None:
            run.result = _incomplete(run)
            run.lane.incomplete, run.incomplete = None, CLEAR
            _drop_gradients(engine, run.job)
    with _Phase(runs, ops.OPTIM_STEP) as phase:
        steps = [(run.job, run.delivery.request.adam_params) for run in phase.runs]
        for run, response in zip(phase.runs, _call(engine.optim_steps, steps), strict=True):
            run.result = response if isinstance(response, Exception) else step_reply(response, cycle)
    for run in phase.runs:
        if isinstance(run.result, Exception):
            _drop_gradients(engine, run.job)  # as a replay will, however far the engine came


def run_others(engine: Engine, runs: Sequence[OpRun], cycle: int) -> None:
    """Everything else (create, save, load), one after the other."""
    for run in runs:
        if run.result is None:
            with _Phase([run], run.delivery.op):
                try:
                    run.result = execute(engine, run.job, run.delivery, cycle)
                except Exception as error:  # noqa: BLE001 (recorded as the op's result)
                    run.result = error
                if run.delivery.op == ops.LOAD_STATE and isinstance(run.result, Reply):
                    run.lane.incomplete, run.incomplete = None, CLEAR


class _Phase:
    """The ops of these kinds that have no result yet, and how long they take. What cannot be read fails here, in its
    turn, and is none of them."""

    def __init__(self, runs: Sequence[OpRun], *kinds: str) -> None:
        self.runs: list[OpRun] = []
        for run in runs:
            if run.delivery.op in kinds and run.result is None:
                run.started_ms = int(time.time() * 1000)
                if isinstance(run.delivery.request, Exception):
                    run.result = run.delivery.request
                else:
                    self.runs.append(run)

    def __enter__(self) -> _Phase:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        milliseconds = (time.perf_counter() - self._started) * 1000
        for run in self.runs:
            run.milliseconds = milliseconds


def _call(method: Callable[[list[Any]], list[Result | Exception]], items: list[Any]) -> list[Result | Exception]:
    """The engine answers for each item. Where it fails as a whole, which is a bug, so has each."""
    if not items:
        return []
    try:
        return method(items)
    except Exception as error:
        log.exception("%s of %d ops", method.__name__, len(items))
        return [error] * len(items)


def _batch_reply(output: ForwardBackwardOutput | Exception, cycle: int) -> Reply | Exception:
    """The op's reply, or why it has none."""
    if isinstance(output, Exception):
        return output
    try:
        return batch_reply(output, cycle)
    except Exception as error:  # noqa: BLE001 (recorded as the op's result, and as_failure logs it)
        return error


def _drop_gradients(engine: Engine, job: str) -> None:
    if job in engine.jobs:  # it is not if its create_model failed
        engine.drop_gradients(job)


def _incomplete(run: OpRun) -> LorryError:
    return AccumulationIncomplete(
        f"the forward_backward with seq {run.lane.incomplete} failed or was cancelled, so this step would use "
        "only a part of its gradients; they were dropped and no step was taken. Submit the "
        "forward_backward again, then optim_step",
        job=run.job,
        op=run.delivery.op,
        seq=run.delivery.seq,
    )
