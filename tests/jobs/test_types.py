from __future__ import annotations

import math

import numpy as np
import pytest

from lorry_jobs.errors import UserError
from lorry_jobs.types import (
    AdamParams,
    CreateModelRequest,
    ForwardBackwardOutput,
    LoadStateRequest,
    LoraConfig,
    ModelData,
    OptimStepRequest,
    SampledSequence,
    SamplingParams,
    SaveRequest,
    TensorData,
)


def test_adam_defaults_are_those_of_the_public_protocol():
    assert AdamParams().model_dump() == {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    assert OptimStepRequest().adam_params == AdamParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", "fast"),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("beta1", float("nan")),
        ("eps", -1),
        ("weight_decay", float("inf")),
        ("grad_clip_norm", -1),
    ],
)
def test_adam_values_that_cannot_work_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"AdamParams: {name}: "):
        AdamParams(**{name: value})


def test_a_learning_rate_of_0_is_allowed():
    assert AdamParams(learning_rate=0).learning_rate == 0


@pytest.mark.parametrize(
    ("cls", "arguments", "unknown", "known"),
    [
        (AdamParams, {"lr": 1e-3}, "lr", "learning_rate"),
        (SamplingParams, {"max_new_tokens": 5}, "max_new_tokens", "max_tokens"),
        (LoraConfig, {"r": 8}, "r", "rank"),
        (SaveRequest, {"name": "a", "ttl": 5}, "ttl", "ttl_seconds"),
        (LoadStateRequest, {"path": "a", "with_optimizer": True}, "with_optimizer", "optimizer"),
    ],
)
def test_an_unknown_keyword_is_refused_by_name_and_the_fields_are_listed(cls, arguments, unknown, known):
    with pytest.raises(UserError) as caught:
        cls(**arguments)
    message = str(caught.value)
    assert message.startswith(f"{cls.__name__}: unknown field '{unknown}' (the fields are: ")
    assert known in message.split("the fields are: ")[1]


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError, match=r"learning_rate: .*; beta1: .*; unknown field 'lr'"):
        AdamParams(learning_rate=-1, beta1=2, lr=1)


@pytest.mark.parametrize(
    ("thing", "name"), [(AdamParams(), "beta1"), (SamplingParams(), "stop"), (LoraConfig(), "rank")]
)
def test_requests_do_not_change(thing, name):
    with pytest.raises(ValueError, match="frozen"):
        setattr(thing, name, 0.5)


# ------------------------------------------------------------------------------------------------------- sampling


def test_sampling_defaults():
    params = SamplingParams()
    assert (params.max_tokens, params.seed, params.stop, params.stop_token_ids) == (None, None, None, None)
    assert (params.temperature, params.top_k, params.top_p) == (1.0, -1, 1.0)


@pytest.mark.parametrize(
    ("arguments", "strings", "token_ids", "ignore_eos"),
    [
        ({}, [], [], False),
        ({"stop": "\n"}, ["\n"], [], False),
        ({"stop": ["a", "b"]}, ["a", "b"], [], False),
        ({"stop": [7, 0]}, [], [7, 0], False),
        ({"stop": []}, [], [], True),
        ({"stop": [], "stop_token_ids": [3]}, [], [3], True),
        ({"stop_token_ids": [3]}, [], [3], False),
        ({"stop": "x", "stop_token_ids": [3]}, ["x"], [3], False),
        ({"stop": [7], "stop_token_ids": [3]}, [], [7, 3], False),
    ],
)
def test_every_form_of_stop(arguments, strings, token_ids, ignore_eos):
    params = SamplingParams(**arguments)
    assert params.stop_strings == strings
    assert params.all_stop_token_ids == token_ids
    assert params.ignore_eos is ignore_eos


@pytest.mark.parametrize(
    "arguments",
    [
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": ["a", 3]},
        {"stop": 3},
        {"max_tokens": 0},
        {"seed": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_k": -2},
        {"top_p": 0},
        {"top_p": 1.1},
    ],
)
def test_sampling_values_that_cannot_work_are_refused_by_name(arguments):
    [name] = arguments
    with pytest.raises(UserError, match=f"SamplingParams: .*{name}"):
        SamplingParams(**arguments)


# ---------------------------------------------------------------------------------------------------------- others


def test_lora_config():
    assert LoraConfig().model_dump() == {
        "rank": 32,
        "seed": None,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "alpha": 32.0,
    }
    with pytest.raises(UserError, match="at least one of train_attn, train_mlp and train_unembed"):
        LoraConfig(train_mlp=False, train_attn=False, train_unembed=False)
    for bad in ({"rank": 0}, {"rank": 1025}, {"seed": -1}, {"alpha": 0}, {"alpha": float("nan")}):
        with pytest.raises(UserError):
            LoraConfig(**bad)


@pytest.mark.parametrize("bad", [{"name": ""}, {"name": "x" * 201}, {}, {"name": "a", "ttl_seconds": 0}])
def test_a_save_needs_a_name_and_a_positive_ttl(bad):
    with pytest.raises(UserError):
        SaveRequest(**bad)


def test_requests_cross_as_json():
    request = CreateModelRequest(base_model="m", lora=LoraConfig(rank=8, seed=1), user_metadata={"who": "me"})
    assert CreateModelRequest.model_validate_json(request.model_dump_json()) == request
    step = OptimStepRequest(adam_params=AdamParams(learning_rate=3e-5))
    assert OptimStepRequest.model_validate_json(step.model_dump_json()) == step


def test_results_have_their_fields_even_when_little_is_known():
    output = ForwardBackwardOutput(loss_fn_outputs=[{"logprobs": TensorData([-1.0])}])
    assert math.isnan(output.loss)
    assert (output.metrics, output.cycle, output.loss_fn_output_type) == ({}, None, "ArrayRecord")
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0]
    sequence = SampledSequence(tokens=[1, 2], logprobs=[-0.5, -1.5], stop_reason="stop")
    assert sequence.tokens_np.dtype == np.int64
    assert sequence.logprobs_np.tolist() == [-0.5, -1.5]
    assert sequence.text is None
    with pytest.raises(UserError, match="stop_reason"):
        SampledSequence(tokens=[], logprobs=[], stop_reason="bored")
    assert ModelData(model_id="a", model_name="m", lora_rank=8).arch is None
