"""What is wrong with a request is said clearly, at once or on its future, and the job goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lorry
from lorry_jobs import ops, wire
from lorry_jobs import wire_pb2 as pb
from lorry_jobs.errors import AccumulationIncomplete, CheckpointExists, CheckpointNotFound, UnknownModel, UserError
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import random_batch

CONTEXT = 512
ADAM = lorry.AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def long_lived(stack: Any) -> lorry.TrainingClient:
    """One job that hears all the nonsense of this module, and has to go on after each piece of it."""
    return lorry.ServiceClient(stack.url).create_lora_training_client(QWEN_SMALL, rank=4, seed=1)


@pytest.fixture
def client(long_lived: lorry.TrainingClient) -> lorry.TrainingClient:
    return long_lived


@pytest.fixture
def sampler(service: lorry.ServiceClient) -> lorry.SamplingClient:
    return service.create_sampling_client(base_model=QWEN_SMALL)


def check_alive(client: lorry.TrainingClient) -> None:
    """A step works, and its loss is a number."""
    output, step = client.forward_backward(random_batch(1)), client.optim_step(ADAM)
    assert math.isfinite(output.result(60).loss)
    assert step.result(60).metrics["grad_norm"] > 0


def datum(tokens: Any, **inputs: Any) -> lorry.Datum:
    return lorry.Datum(lorry.ModelInput.from_ints(tokens), inputs)


# -- refused at the call: nothing is sent, no seq is used ------------------------------------------------------

AT_THE_CALL: dict[str, tuple[Callable[[lorry.TrainingClient], object], str]] = {
    "targets too short": (
        lambda c: c.forward_backward([datum([1, 2, 3], target_tokens=[2, 3])]),
        r"target_tokens has shape \(2,\), but model_input has 3 tokens.*one entry per input token",
    ),
    "weights too long": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[2, 3], weights=[1.0, 1.0, 1.0])]),
        r"weights has shape \(3,\), but model_input has 2 tokens",
    ),
    "three dimensions": (
        lambda c: c.forward_backward([datum([1], target_tokens=[[[1]]])]),
        r"target_tokens has shape \(1, 1, 1\)",
    ),
    "ragged": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[[1], [1, 2]])]),
        "target_tokens is not a rectangular array",
    ),
    "fractional targets": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[1.5, 2.0])]),
        "fractional",
    ),
    "text for tokens": (lambda c: c.forward_backward([datum(["a", "b"], target_tokens=[1, 2])]), "must hold numbers"),
    "no targets": (lambda c: c.forward_backward([datum([1, 2])]), "has no 'target_tokens'"),
    "no tokens": (lambda c: c.forward_backward([datum([], target_tokens=[])]), "has no tokens"),
    "unknown input": (
        lambda c: c.forward_backward([datum([1], target_tokens=[1], weigths=[1.0])]),
        r"unknown loss input 'weigths' \(known: .*weights",
    ),
    "NaN weight": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[1, 2], weights=[1.0, math.nan])]),
        r"weights is nan at position \(1,\); it must be finite",
    ),
    "infinite weight": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[1, 2], weights=[math.inf, 1.0])]),
        r"weights is inf at position \(0,\)",
    ),
    "token past the vocabulary": (
        lambda c: c.forward_backward([random_batch(1)[0], datum([1, 10**6], target_tokens=[1, 2])]),
        r"datum 1: token 1000000 is outside the vocabulary of .* \(0 to \d+\)",
    ),
    "target past the vocabulary": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[1, 10**6])]),
        r"datum 0: target_tokens has 1000000, but the vocabulary ends at \d+",
    ),
    "negative token": (lambda c: c.forward_backward([datum([1, -2], target_tokens=[1, 2])]), "must not be negative"),
    "negative target": (
        lambda c: c.forward_backward([datum([1, 2], target_tokens=[1, -7])]),
        "target_tokens has the negative token -7",
    ),
    "row past the context": (
        lambda c: c.forward_backward([datum([1] * (CONTEXT + 1), target_tokens=[1] * (CONTEXT + 1))]),
        rf"{CONTEXT + 1} tokens exceed the context of {QWEN_SMALL}, {CONTEXT} tokens",
    ),
    "empty batch": (lambda c: c.forward_backward([]), "forward_backward: the batch is empty"),
    "a datum without its list": (
        lambda c: c.forward(random_batch(1)[0]),  # type: ignore[arg-type]
        "forward takes a list of Datum",
    ),
    "no datums": (
        lambda c: c.forward_backward([{"tokens": [1]}]),  # type: ignore[list-item]
        "item 0 is dict, not a Datum",
    ),
    "a function for a loss": (
        lambda c: c.forward_backward(random_batch(1), print),  # type: ignore[arg-type]
        "forward_backward_custom",
    ),
    "negative learning rate": (lambda c: c.optim_step(lorry.AdamParams(learning_rate=-1e-3)), "learning_rate"),
    "NaN learning rate": (lambda c: c.optim_step(lorry.AdamParams(learning_rate=math.nan)), "learning_rate"),
    "infinite learning rate": (lambda c: c.optim_step(lorry.AdamParams(learning_rate=math.inf)), "learning_rate"),
    "beta of one": (lambda c: c.optim_step(lorry.AdamParams(beta1=1.0)), "beta1"),
    "negative clipping": (lambda c: c.optim_step(lorry.AdamParams(grad_clip_norm=-1)), "grad_clip_norm"),
    "unknown parameter": (
        lambda c: c.optim_step(lorry.AdamParams(lr=1e-3)),  # type: ignore[call-arg]
        r"unknown field 'lr' \(the fields are: learning_rate",
    ),
    "a number for parameters": (lambda c: c.optim_step(1e-3), "takes AdamParams, not float"),  # type: ignore[arg-type]
    "empty name": (lambda c: c.save_state(""), "name"),
    "endless name": (lambda c: c.save_state("x" * 201), "name"),
    "no time to live": (lambda c: c.save_state("a", ttl_seconds=0), "ttl_seconds"),
    "empty path": (lambda c: c.load_state(""), "path"),
}


@pytest.mark.parametrize("case", AT_THE_CALL)
def test_refused_at_the_call(client: lorry.TrainingClient, case: str) -> None:
    call, message = AT_THE_CALL[case]
    before = client._next_seq
    with pytest.raises(UserError, match=message):
        call(client)
    assert client._next_seq == before
    assert isinstance(client, lorry.TrainingClient)


def test_refused_at_the_call_of_an_async_method_too(client: lorry.TrainingClient) -> None:
    with pytest.raises(UserError, match="batch is empty"):
        client.forward_backward_async([])


def test_the_job_lives_after_what_was_refused_at_the_call(client: lorry.TrainingClient) -> None:
    for call, _ in AT_THE_CALL.values():
        with pytest.raises(UserError):
            call(client)
    check_alive(client)


# -- past the client's checks: bytes made by somebody else's client --------------------------------------------


def raw_batch(tokens: list[int], targets: list[int], weights: list[float] | None = None, **changes: Any) -> pb.Any:
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    target = row.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = pb.DTYPE_INT64, np.asarray(targets, "<i8").tobytes()
    target.shape.extend(changes.get("shape", [len(targets)]))
    if weights is not None:
        weight = row.loss_fn_inputs["weights"]
        weight.dtype, weight.dense = pb.DTYPE_FLOAT32, np.asarray(weights, "<f4").tobytes()
        weight.shape.extend([len(weights)])
    return message


def empty() -> Any:
    return pb.ForwardBackwardRequest(loss_fn="cross_entropy")


def unknown_loss() -> Any:
    message = raw_batch([1, 2], [2, 3])
    message.loss_fn = "no_such_loss"
    return message


RAW_BATCHES: dict[str, tuple[Callable[[], Any], str]] = {
    "token past the vocabulary": (lambda: raw_batch([1, 10**6], [1, 2]), r"1000000|vocabulary"),
    "target past the vocabulary": (lambda: raw_batch([1, 2], [1, 10**6]), r"1000000|vocabulary"),
    "negative token": (lambda: raw_batch([1, -5], [1, 2]), "-5"),
    "targets too short": (lambda: raw_batch([1, 2, 3], [1, 2]), r"\(2,\).*3 tokens"),
    "shape that lies": (lambda: raw_batch([1, 2], [1, 2], shape=[5]), "do not fill"),
    "NaN weight": (lambda: raw_batch([1, 2], [1, 2], [1.0, math.nan]), "weights is nan at position"),
    "row past the context": (lambda: raw_batch([1] * (CONTEXT + 1), [1] * (CONTEXT + 1)), str(CONTEXT)),
    "no tokens": (lambda: raw_batch([], []), "no tokens"),
    "empty batch": (empty, "empty"),
    "unknown loss": (unknown_loss, "no_such_loss"),
}


def submit_raw(client: lorry.TrainingClient, op: str, payload: bytes) -> lorry.APIFuture[Any]:
    return client._submit(op, lambda seq: payload, lambda outcome: outcome.info)


@pytest.mark.parametrize("case", RAW_BATCHES)
@pytest.mark.parametrize("op", [ops.FORWARD, ops.FORWARD_BACKWARD])
def test_refused_by_the_worker(client: lorry.TrainingClient, op: str, case: str) -> None:
    make, message = RAW_BATCHES[case]
    future = submit_raw(client, op, make().SerializeToString())
    with pytest.raises(UserError, match=message) as caught:
        future.result(60)
    error = caught.value
    assert (error.job, error.op, error.seq) == (client.model_id, op, future.seq)
    assert f"op {op}, seq {future.seq}, job {client.model_id}" in str(error)
    if op == ops.FORWARD_BACKWARD:
        with pytest.raises(AccumulationIncomplete):
            client.optim_step(ADAM).result(60)
    check_alive(client)


@pytest.mark.parametrize("op", ops.CHAIN_OPS[1:])
def test_bytes_that_are_no_request(client: lorry.TrainingClient, op: str) -> None:
    with pytest.raises(UserError):
        submit_raw(client, op, b"\xff\xfe nonsense \x00").result(60)
    with pytest.raises(UserError):
        client.optim_step(ADAM).result(60)
    check_alive(client)


def test_an_unknown_loss_is_said_with_the_known_ones(client: lorry.TrainingClient) -> None:
    with pytest.raises(UserError, match=r"unknown loss_fn 'crossentropy'.*cross_entropy"):
        client.forward(random_batch(1), "crossentropy").result(60)
    with pytest.raises(UserError, match=r"unknown loss_fn 'crossentropy'.*cross_entropy"):
        client.forward_backward(random_batch(1), "crossentropy").result(60)
    with pytest.raises(AccumulationIncomplete):
        client.optim_step(ADAM).result(60)
    check_alive(client)


# -- a step and what it needs ----------------------------------------------------------------------------------


def test_a_step_with_nothing_accumulated(client: lorry.TrainingClient) -> None:
    check_alive(client)
    for _ in range(2):
        with pytest.raises(UserError, match=r"nothing is accumulated.*forward_backward before it"):
            client.optim_step(ADAM).result(60)
    check_alive(client)


def test_a_failed_forward_backward_takes_its_accumulation_with_it(
    service: lorry.ServiceClient, client: lorry.TrainingClient
) -> None:
    """Nothing of the accumulation is applied: the weights after it are those of a job that never saw it."""
    make = lambda: service.create_lora_training_client(QWEN_SMALL, rank=4, seed=5)  # noqa: E731
    disturbed, clean = make(), make()
    good = disturbed.forward_backward(random_batch(1))
    bad = submit_raw(disturbed, ops.FORWARD_BACKWARD, raw_batch([1, 10**6], [1, 2]).SerializeToString())
    also_good = disturbed.forward_backward(random_batch(2))
    step = disturbed.optim_step(ADAM)
    assert good.result(60).loss > 0
    with pytest.raises(UserError):
        bad.result(60)
    assert also_good.result(60).loss > 0
    with pytest.raises(
        AccumulationIncomplete, match=rf"forward_backward with seq {bad.seq} failed.*Submit the forward_backward again"
    ) as caught:
        step.result(60)
    assert caught.value.seq == step.seq
    for job in (disturbed, clean):
        job.forward_backward(random_batch(3))
        job.optim_step(ADAM)
    assert disturbed.forward(random_batch(3)).result(60).loss == pytest.approx(
        clean.forward(random_batch(3)).result(60).loss, abs=1e-6
    )


# -- models, adapters, checkpoints -----------------------------------------------------------------------------


def test_an_unknown_model_is_said_with_the_known_ones(service: lorry.ServiceClient) -> None:
    for create in (
        lambda: service.create_lora_training_client("Qwen/Qwen9"),
        lambda: service.create_lora_training_client_async("Qwen/Qwen9"),
        lambda: service.create_sampling_client(base_model="Qwen/Qwen9"),
        lambda: service.create_sampling_client_async(base_model="Qwen/Qwen9").result(20),
        lambda: service.get_tokenizer("Qwen/Qwen9"),
    ):
        with pytest.raises(UnknownModel, match=rf"'Qwen/Qwen9'.*{QWEN_SMALL}.*lorry worker --model Qwen/Qwen9"):
            create()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -3}, "rank"),
        ({"rank": 10**6}, "rank"),
        ({"seed": -1}, "seed"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "at least one of"),
    ],
)
def test_adapters_that_cannot_be(service: lorry.ServiceClient, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        service.create_lora_training_client(QWEN_SMALL, **arguments)
    with pytest.raises(UserError, match=message):
        service.create_lora_training_client_async(QWEN_SMALL, **arguments)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("lorry://nobody/weights/x", "lorry://nobody/weights/x"),
        ("lorry://a/b/c/d/e", "it must look like lorry://<job>/weights/<name>"),
        ("s3://bucket/key", "the scheme must be one of lorry,"),
        ("lorry://../weights/x", r"must not start with a dot or contain '\.\.'"),
        ("lorry://job/weights/../../x", "it must look like"),
        ("../../etc/passwd", "names no job: give the whole path|must not contain a slash"),
        ("/etc/passwd", "names no job: give the whole path|must not contain a slash"),
    ],
)
def test_checkpoint_paths_that_lead_nowhere(
    service: lorry.ServiceClient, client: lorry.TrainingClient, path: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        client.load_state(path).result(60)
    for create in (
        lambda: client.create_sampling_client(path),
        lambda: service.create_training_client_from_state(path),
        lambda: service.create_training_client_from_state_with_optimizer(path),
    ):
        with pytest.raises(UserError, match=said):
            create()
    check_alive(client)


def test_a_checkpoint_that_is_not_there_says_so(service: lorry.ServiceClient, client: lorry.TrainingClient) -> None:
    with pytest.raises(CheckpointNotFound, match="never-saved"):
        client.load_state("never-saved").result(60)
    with pytest.raises(CheckpointNotFound, match="nobody"):
        service.create_sampling_client(model_path="lorry://nobody/sampler_weights/x")


def test_a_name_is_used_once_unless_told_otherwise(client: lorry.TrainingClient) -> None:
    path = client.save_state("once").result(60).path
    with pytest.raises(CheckpointExists, match=r"once.*overwrite"):
        client.save_state("once").result(60)
    assert client.save_state("once", overwrite=True).result(60).path == path
    check_alive(client)


@pytest.mark.parametrize("name", ["a/b", "../up", "..", ".hidden", "new\nline"])
def test_names_that_are_no_folder(client: lorry.TrainingClient, name: str) -> None:
    for save in (client.save_state, client.save_weights_for_sampler):
        with pytest.raises(UserError, match="checkpoint name"):
            save(name).result(60)
    check_alive(client)


def test_a_checkpoint_of_another_shape(service: lorry.ServiceClient, client: lorry.TrainingClient) -> None:
    other = service.create_lora_training_client(QWEN_SMALL, rank=8)
    path = other.save_state("rank-8").result(60).path
    with pytest.raises(UserError, match=r"rank|shape|8"):
        client.load_state(path).result(60)
    check_alive(client)


# -- sampling --------------------------------------------------------------------------------------------------

PROMPT = lorry.ModelInput.from_ints([1, 2, 3])

SAMPLING: dict[str, tuple[Callable[[lorry.SamplingClient], object], str]] = {
    "prompt past the context": (
        lambda s: s.sample(lorry.ModelInput.from_ints([1] * (CONTEXT + 1))).result(60),
        rf"{CONTEXT + 1} tokens exceed the context of {QWEN_SMALL}, {CONTEXT} tokens",
    ),
    "empty prompt": (lambda s: s.sample(lorry.ModelInput.empty()).result(60), "no tokens"),
    "token past the vocabulary": (
        lambda s: s.sample(lorry.ModelInput.from_ints([10**6])).result(60),
        "token 1000000 is outside the vocabulary",
    ),
    "no samples": (lambda s: s.sample(PROMPT, 0).result(60), "num_samples must be at least 1"),
    "negative temperature": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(temperature=-1)), "temperature"),
    "NaN temperature": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(temperature=math.nan)), "temperature"),
    "top_p of zero": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(top_p=0)), "top_p"),
    "top_k of zero": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(top_k=0)), "top_k"),
    "no tokens wanted": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(max_tokens=0)), "max_tokens"),
    "empty stop": (lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(stop="")), "must not be empty"),
    "unknown parameter": (
        lambda s: s.sample(PROMPT, 1, lorry.SamplingParams(max_new_tokens=3)),  # type: ignore[call-arg]
        "unknown field 'max_new_tokens'",
    ),
    "a dictionary for parameters": (
        lambda s: s.sample(PROMPT, 1, {"max_tokens": 3}),  # type: ignore[arg-type]
        "must be SamplingParams, not dict",
    ),
}


@pytest.mark.parametrize("case", SAMPLING)
def test_sampling(sampler: lorry.SamplingClient, case: str) -> None:
    call, message = SAMPLING[case]
    with pytest.raises(UserError, match=message):
        call(sampler)
    params = lorry.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    assert len(sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens) == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([10**6], "1000000|vocabulary"), ([1] * (CONTEXT + 1), str(CONTEXT)), ([], "no tokens|empty")],
    ids=["vocabulary", "context", "empty"],
)
def test_sampling_past_the_clients_checks(sampler: lorry.SamplingClient, prompt: list[int], message: str) -> None:
    request = wire.SampleRequest(
        base_model=QWEN_SMALL,
        model_path=None,
        prompt=lorry.ModelInput.from_ints(prompt),
        num_samples=1,
        params=lorry.SamplingParams(max_tokens=2),
    )
    process = sampler._process
    payload = wire.encode_sample_request(request)
    with pytest.raises(UserError, match=message):
        process.submit_request(QWEN_SMALL, ops.SAMPLE, payload, lambda outcome: outcome).result(60)
    with pytest.raises(UserError):
        process.submit_request(QWEN_SMALL, ops.SAMPLE, b"\xff\xff nonsense", lambda outcome: outcome).result(60)
    params = lorry.SamplingParams(max_tokens=2, temperature=0.0, stop=[])
    path = "lorry://nobody/sampler_weights/x"
    missing = wire.encode_sample_request(wire.SampleRequest(QWEN_SMALL, path, PROMPT, 1, params))
    with pytest.raises(UserError, match="nobody"):
        process.submit_request(QWEN_SMALL, ops.SAMPLE, missing, lambda outcome: outcome).result(60)
    assert len(sampler.sample(PROMPT, 1, params).result(60).sequences[0].tokens) == 2


def test_an_op_that_the_worker_does_not_know_fails_in_its_turn(service: lorry.ServiceClient) -> None:
    """As from a client that is newer than the worker. Celery knows no such task, and the chain must go on."""
    client = service.create_lora_training_client(QWEN_SMALL, rank=2)
    before = client.forward_backward(random_batch(1))
    unknown = client._submit("distill", lambda seq: b"request", lambda outcome: None)
    after = client.optim_step()
    assert before.result(60).loss > 0
    assert isinstance(unknown.exception(60), lorry.LorryError)
    assert after.result(60).metrics["grad_norm"] > 0
