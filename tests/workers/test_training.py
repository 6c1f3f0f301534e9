"""The ops of a cycle where the engine itself fails: as a whole, or with an answer that cannot be sent."""

from __future__ import annotations

from typing import Any

import torch

from lorry_jobs import ops
from lorry_jobs.errors import AccumulationIncomplete
from lorry_jobs.types import AdamParams, OptimStepRequest
from lorry_jobs.wire import TrainingBatch
from lorry_workers.engine.engine import Engine
from lorry_workers.executor import Reply
from lorry_workers.lanes import Delivery, Lane
from lorry_workers.training import OpRun, step, train
from tests.tiny_engine import create_job, make_engine, random_data


def two_jobs(store) -> tuple[Engine, dict[str, Lane]]:
    engine = make_engine(store)
    for job in "ab":
        create_job(engine, job)
    return engine, {job: Lane(job, applied=0) for job in "ab"}


def batch_of(lane: Lane, seq: int = 1) -> OpRun:
    request = TrainingBatch(random_data([5, 9]), "cross_entropy", {})
    return OpRun(lane, Delivery(f"{lane.job}:{seq}", ops.FORWARD_BACKWARD, request, "", seq))


def step_of(lane: Lane, seq: int = 2) -> OpRun:
    request = OptimStepRequest(adam_params=AdamParams(learning_rate=1e-3))
    return OpRun(lane, Delivery(f"{lane.job}:{seq}", ops.OPTIM_STEP, request, "", seq))


def test_a_batch_whose_answer_cannot_be_sent_fails_alone(tmp_path):
    engine, lanes = two_jobs(tmp_path)
    run_batches = engine.run_batches

    def without_metrics_of_the_first(batches: Any) -> Any:
        outputs = run_batches(batches)
        outputs[0].metrics.clear()
        return outputs

    engine.run_batches = without_metrics_of_the_first  # type: ignore[method-assign]
    runs = [batch_of(lanes["a"]), step_of(lanes["a"]), batch_of(lanes["b"]), step_of(lanes["b"])]
    before = engine.state("a").adapter.flat.clone()
    train(engine, runs, 1)
    step(engine, runs, 1)
    assert isinstance(runs[0].result, KeyError)
    assert isinstance(runs[1].result, AccumulationIncomplete)  # its gradients were dropped
    assert torch.equal(engine.state("a").adapter.flat, before)
    assert all(isinstance(run.result, Reply) for run in runs[2:])
    assert (engine.state("a").step, engine.state("b").step) == (0, 1)


def test_steps_that_fail_as_a_whole_leave_no_gradients(tmp_path):
    engine, lanes = two_jobs(tmp_path)

    def out_of_memory(steps: Any) -> Any:
        raise torch.OutOfMemoryError("no room for the steps")

    optim_steps, engine.optim_steps = engine.optim_steps, out_of_memory  # type: ignore[method-assign]
    runs = [run for lane in lanes.values() for run in (batch_of(lane), step_of(lane))]
    train(engine, runs, 1)
    assert all(engine.state(job).has_gradients for job in "ab")
    step(engine, runs, 1)
    assert [type(run.result) for run in runs] == [Reply, torch.OutOfMemoryError] * 2
    assert not any(engine.state(job).has_gradients for job in "ab")

    # The next update is a normal one, and has none of the old gradients in it: it is that of a fresh engine.
    engine.optim_steps = optim_steps  # type: ignore[method-assign]
    fresh, its_lanes = two_jobs(tmp_path)
    for each, of in ((engine, lanes), (fresh, its_lanes)):
        runs = [run for lane in of.values() for run in (batch_of(lane, 3), step_of(lane, 4))]
        train(each, runs, 2)
        step(each, runs, 2)
        assert all(isinstance(run.result, Reply) for run in runs)
    for job in "ab":
        assert torch.equal(engine.state(job).adapter.flat, fresh.state(job).adapter.flat)
