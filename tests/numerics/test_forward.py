"""`forward` says what `forward_backward` would, and leaves no trace: the run goes on bit for bit as without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.types import AdamParams
from lorry_workers.engine.engine import Batch, Engine
from lorry_workers.engine.losses import LOSSES
from tests.tiny_engine import create_job, make_engine, random_data, randomize

INPUTS = {"weights": "uniform", "logprobs": "normal", "advantages": "normal"}
ADAM = AdamParams(learning_rate=1e-3, weight_decay=0.01)


def start(store) -> Engine:
    engine = make_engine(store)
    for seed, job in enumerate("ab"):
        create_job(engine, job, seed=seed, rank=3 + seed)
        randomize(engine, job)
    return engine


def everything(engine: Engine, job: str) -> dict[str, object]:
    state = engine.state(job)
    return {
        "weights": state.adapter.flat.tolist(),
        "gradient": state.adapter.require_gradients().tolist(),
        "exp_avg": state.adam.exp_avg.tolist(),
        "exp_avg_sq": state.adam.exp_avg_sq.tolist(),
        "steps": (state.step, state.adam.step),
        "accumulated": (state.accumulated_calls, state.accumulated_tokens, list(state.loss_history)),
    }


@pytest.mark.parametrize("loss_fn", list(LOSSES))
def test_forward_gives_the_same_and_changes_nothing(tmp_path, loss_fn):
    engine, without = start(tmp_path), start(tmp_path)
    data = random_data([12, 30, 5], **INPUTS)
    for each in (engine, without):  # moments and an open accumulation, that there is something to disturb
        for job in "ab":
            each.forward_backward(job, data, "cross_entropy")
        each.optim_steps([("a", ADAM), ("b", ADAM)])
        each.forward_backward("a", data[:1], "cross_entropy")
    before = everything(engine, "a")
    [scored, _] = engine.run_batches([Batch("a", data, loss_fn, backward=False), Batch("b", data, loss_fn)])
    without.forward_backward("b", data, loss_fn)
    assert everything(engine, "a") == before

    trained = [each.forward_backward("a", data, loss_fn) for each in (engine, without)]
    assert scored.metrics == pytest.approx(trained[0].metrics, rel=1e-6)
    assert scored.loss == pytest.approx(trained[0].loss, rel=1e-6)
    for one, two in zip(scored.loss_fn_outputs, trained[0].loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].array, two["logprobs"].array, rtol=0, atol=1e-5)
    # With and without the forward, to the last bit.
    assert trained[0].metrics == trained[1].metrics
    for each in (engine, without):
        each.optim_step("a", ADAM)
    assert torch.equal(engine.state("a").adapter.flat, without.state("a").adapter.flat)
    assert everything(engine, "a") == everything(without, "a")
