"""What a user can get wrong, and that the job is as before afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.errors import JobNotFound, UserError
from lorry_jobs.types import AdamParams, CreateModelRequest, Datum, LoraConfig, ModelInput, SaveRequest
from tests.tiny_engine import create_job, make_engine, random_data, randomize
from tests.tiny_models import CONTEXT_LENGTH

JOB = "a1:train:0"


@pytest.fixture
def engine(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    return engine


def datum(length=3, targets=None, **inputs):
    return Datum(ModelInput.from_ints([1] * length), {"target_tokens": targets or [2] * length, **inputs})


@pytest.mark.parametrize("method", ["forward", "forward_backward"])
@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "reason"),
    [
        ([], "cross_entropy", None, "data is empty"),
        ([datum()], "kl", None, "unknown loss_fn 'kl'; the losses are: cross_entropy, importance_sampling, ppo"),
        ([datum()], "cross_entropy", {"beta": 1.0}, "cross_entropy has no option 'beta'"),
        ([datum()], "ppo", {"clip_low": 1.0}, "its options: clip_low_threshold, clip_high_threshold"),
        ([datum()], "ppo", {"clip_low_threshold": "x"}, "must be a finite number"),
        ([datum()], "ppo", {"clip_low_threshold": 2.0}, "is above"),
        ([datum(), datum()], "ppo", None, r"datum 0: the loss ppo needs loss_fn_inputs\['logprobs'\]"),
        ([datum(logprobs=[0.0] * 3)], "dro", None, r"needs loss_fn_inputs\['advantages'\]"),
        ([datum(), datum(targets=[1, 2, 999])], "cross_entropy", None, "datum 1: target_tokens has token 999"),
        ([datum(), datum(CONTEXT_LENGTH + 1)], "cross_entropy", None, "datum 1: model_input has 513 tokens"),
        (
            [Datum(ModelInput.from_ints([1, 777]), {"target_tokens": [1, 2]})],
            "cross_entropy",
            None,
            "datum 0: model_input has token 777, but the vocabulary has 512",
        ),
        (
            [datum(targets=[[1, 2]] * 3, logprobs=[0.0] * 3, advantages=[0.0] * 3)],
            "ppo",
            None,
            "datum 0: target_tokens must be one-dimensional",
        ),
        ([datum(logprobs=np.zeros((3, 2)), advantages=[1.0] * 3)], "ppo", None, "logprobs has shape"),
    ],
)
def test_bad_batches_name_the_datum_and_the_field(engine, method, data, loss_fn, config, reason):
    with pytest.raises(UserError, match=reason) as caught:
        getattr(engine, method)(JOB, data, loss_fn, config)
    assert caught.value.job == JOB
    assert caught.value.op == method
    assert not engine.state(JOB).has_gradients


def test_a_failed_forward_backward_drops_the_whole_accumulation(engine):
    engine.forward_backward(JOB, random_data([6]), "cross_entropy")
    with pytest.raises(UserError):
        engine.forward_backward(JOB, [], "cross_entropy")
    assert not engine.state(JOB).adapter.require_gradients().any()
    with pytest.raises(UserError, match="nothing is accumulated"):
        engine.optim_step(JOB, AdamParams())


def test_a_failure_in_the_middle_of_a_batch_leaves_no_gradient(engine):
    engine.trainer.max_tokens_per_microbatch = 8
    passes = []

    def fail_on_second(module, args, kwargs):
        passes.append(module)
        if len(passes) == 2:
            raise ArithmeticError("broken")

    engine.trainer.body.register_forward_pre_hook(fail_on_second, with_kwargs=True)
    with pytest.raises(ArithmeticError):
        engine.forward_backward(JOB, random_data([8, 8, 8]), "cross_entropy")
    assert not engine.state(JOB).adapter.require_gradients().any()
    assert engine.trainer.active.bank is None


def test_a_loss_that_is_not_finite_is_refused_and_names_the_datum(engine):
    weights = np.ones(4, np.float32)
    good = datum(4)
    bad = datum(4, weights=weights * 3e38)
    with pytest.raises(UserError, match=r"the loss is not finite .datum 1"):
        engine.forward_backward(JOB, [good, bad], "cross_entropy")
    assert not engine.state(JOB).has_gradients


def test_a_gradient_that_is_not_finite_is_dropped_and_the_state_stays(engine):
    engine.forward_backward(JOB, random_data([6]), "cross_entropy")
    engine.optim_step(JOB, AdamParams())
    state = engine.state(JOB)
    before = state.adapter.flat.clone(), state.adam.exp_avg.clone(), state.adam.step
    engine.forward_backward(JOB, random_data([6]), "cross_entropy")
    state.adapter.require_gradients()[0] = float("nan")
    with pytest.raises(UserError, match="norm is nan"):
        engine.optim_step(JOB, AdamParams())
    assert torch.equal(state.adapter.flat, before[0])
    assert torch.equal(state.adam.exp_avg, before[1])
    assert state.adam.step == before[2]
    engine.forward_backward(JOB, random_data([6]), "cross_entropy")
    engine.optim_step(JOB, AdamParams())


def test_jobs_that_are_unknown_or_known_already(engine):
    with pytest.raises(JobNotFound):
        engine.forward("other", random_data([4]), "cross_entropy")
    with pytest.raises(UserError, match="exists already"):
        create_job(engine)
    with pytest.raises(UserError, match="serves tiny, not big"):
        engine.create_model("x", CreateModelRequest(base_model="big", lora=LoraConfig(rank=1)))
    engine.drop_job(JOB)
    engine.drop_job(JOB)
    with pytest.raises(JobNotFound):
        engine.optim_step(JOB, AdamParams())


def test_a_job_without_a_seed_gets_the_same_adapter_when_its_creation_is_replayed(engine):
    create_job(engine, "x:train:0", seed=None)
    create_job(engine, "y:train:0", seed=None)
    first, other = engine.state("x:train:0"), engine.state("y:train:0")
    assert not torch.equal(first.adapter.flat, other.adapter.flat)
    engine.drop_job("x:train:0")
    create_job(engine, "x:train:0", seed=None)
    assert torch.equal(engine.state("x:train:0").adapter.flat, first.adapter.flat)
    assert engine.state("x:train:0").lora.seed == first.lora.seed


def test_names_of_checkpoints_are_checked(engine):
    for name in ("a/b", "..", ".x"):
        with pytest.raises(UserError, match="checkpoint name"):
            engine.save_state(JOB, SaveRequest(name=name), "op")
