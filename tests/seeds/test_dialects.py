"""The acceptance list of the dialects (`A0.1` to `A4.3` and "extra"), row by row, against the real stack.

What is verbatim in the documents runs as a script, as in `test_seeds`; here each row is also asked what it promises.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

import lorry
from lorry import types
from lorry.stack import Stack
from tests.conftest import QWEN_SMALL, StackMaker
from tests.seeds.test_seeds import losses, run, text_of

ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def client(stack: Stack) -> lorry.TrainingClient:
    return lorry.ServiceClient(base_url=stack.url).create_lora_training_client(QWEN_SMALL, rank=4, seed=1)


@pytest.fixture
def fresh(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(base_model=QWEN_SMALL, rank=4, seed=1)


def datum(tokens: list[int] | None = None) -> types.Datum:
    tokens = tokens or [5, 6, 7, 8, 9]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


def step(client: lorry.TrainingClient) -> float:
    future = client.forward_backward([datum()], "cross_entropy")
    client.optim_step(ADAM)
    return future.result(60).loss


def greedy(sampler: lorry.SamplingClient) -> list[float]:
    """What tells two sets of weights apart: the logprobs of a prompt."""
    values = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9])).result(60)
    return [value for value in values if value is not None]


# --------------------------------------------------------------------------------------------- seed 001: A1.1, A1.2


def test_a1_1_the_sync_loop_fifteen_times(fresh: lorry.TrainingClient) -> None:
    found = []
    for _ in range(15):
        future = fresh.forward_backward([datum()], "cross_entropy")
        optim = fresh.optim_step(ADAM)
        found.append(future.result().loss)
        optim.result()
    assert found[-1] < found[0]


def test_a1_2_two_awaits_fifteen_times(fresh: lorry.TrainingClient) -> None:
    async def train() -> list[float]:
        found = []
        for _ in range(15):
            future = await fresh.forward_backward_async([datum()], "cross_entropy")
            assert isinstance(future, lorry.APIFutureResult)
            optim = await fresh.optim_step_async(ADAM)
            found.append((await future).loss)
            await optim
        return found

    found = asyncio.run(train())
    assert found[-1] < found[0]


# ------------------------------------------------------------------------------------------------- seed 002: A2.*


def test_a2_the_documents_steps(make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path) -> None:
    """The script as it is; only the placeholder `run-id` becomes the id of the run."""
    stack = make_stack(models=[f"Qwen/Qwen3-8B={tiny_qwen3}"])
    source = text_of("s002.py")
    assert '"mindlab-toolkit://run-id/weights/checkpoint-001"' in source
    source = source.replace('"mindlab-toolkit://run-id/', 'f"mindlab-toolkit://{training_client.model_id}/')
    output = run(source, stack, tmp_path)
    # "Hello" and "world" are one token each for Qwen; for the test's tokenizer they differ, which is refused clearly.
    (refused,) = re.findall(r"FAIL .*", output)
    assert "target_tokens has shape (4,), but model_input has 3 tokens" in refused
    assert output.count("OK  ") == 11
    assert re.search(r"Metrics: \{.*'custom_metric': -?\d", output)
    assert re.search(r"Saved to: lorry://\S+/weights/checkpoint-001", output)
    assert "LoRA rank: 32" in output


def test_a2_2_and_a2_3_a_model_input_as_targets_and_no_weights(fresh: lorry.TrainingClient) -> None:
    tokenizer = fresh.get_tokenizer()
    hello = tokenizer.encode("Hello")
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(hello),
            loss_fn_inputs={"target_tokens": types.ModelInput.from_ints(tokenizer.encode("Hello"))},
        )
    ]

    async def both() -> tuple[float, float]:
        forward = await fresh.forward(data, "cross_entropy")
        backward = await fresh.forward_backward(data, "cross_entropy")
        return forward.loss, backward.loss

    forward, backward = asyncio.run(both())
    assert forward == pytest.approx(backward)
    assert forward > 0


def test_a2_4_a_custom_loss(fresh: lorry.TrainingClient) -> None:
    import torch

    def custom_loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.mean(torch.stack([torch.mean(lp) for lp in logprobs]))
        return loss, {"custom_metric": loss.item()}

    result = fresh.forward_backward_custom([datum()], custom_loss, "logprobs").result(60)
    assert result.loss == pytest.approx(result.metrics["custom_metric"])
    assert result.loss < 0


def test_a2_6_to_a2_8_save_and_load(fresh: lorry.TrainingClient) -> None:
    step(fresh)
    saved = fresh.save_state("checkpoint-001").result(60)
    after = [step(fresh) for _ in range(3)]
    for scheme in ("mindlab-toolkit", "tinker", "mint", "trio", "lorry"):
        path = f"{scheme}://{fresh.model_id}/weights/checkpoint-001"
        loaded = fresh.load_state_with_optimizer(path).result(60)
        assert (loaded.path, loaded.optimizer) == (saved.path, True)
        assert [step(fresh) for _ in range(3)] == after
    fresh.load_state(f"trio://{fresh.model_id}/checkpoint-001").result(60)  # PyTRIO's form, without a kind
    without = [step(fresh) for _ in range(3)]
    assert without[0] == after[0]  # the same weights,
    assert without[1:] != after[1:]  # and other moments
    assert fresh.load_state("checkpoint-001", None).result(60).path == saved.path


def test_a2_9_the_samplers_path(fresh: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    result = fresh.save_weights_for_sampler("sampler-001").result(60)
    again = service.create_sampling_client(model_path=result.path)
    assert greedy(again) == greedy(result)
    assert (again.name, again.size) == (result.name, result.size)


def test_a2_10_get_info(fresh: lorry.TrainingClient) -> None:
    info = fresh.get_info()
    assert info.model_data.model_id == info.model_id == fresh.model_id
    assert info.model_data.lora_rank == info.lora_rank == 4
    assert info.model_data.model_name == QWEN_SMALL


def test_a2_11_the_tokenizer(fresh: lorry.TrainingClient) -> None:
    tokenizer = fresh.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello world", add_special_tokens=False)) == "Hello world"


def test_a2_12_sampling_from_a_training_state(fresh: lorry.TrainingClient) -> None:
    step(fresh)
    fresh.save_state("s").result(60)
    sampler = fresh.save_weights_for_sampler("other").result(60)
    state = fresh.create_sampling_client(f"mindlab-toolkit://{fresh.model_id}/weights/s")
    assert state.path == f"lorry://{fresh.model_id}/weights/s"
    assert greedy(state) == greedy(sampler)
    assert greedy(fresh.create_sampling_client("s")) == greedy(sampler)  # by its bare name, whatever its kind


def test_a2_13_the_order_of_arguments(fresh: lorry.TrainingClient) -> None:
    sampler = fresh.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=3, stop=[])
    result = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, params).result(60)
    assert len(result.sequences[0].tokens) == 3
    assert isinstance(result.sequences[0].text, str)


# ------------------------------------------------------------------------------------------------- seed 003: A3.*


def test_a3_pipelining_saves_cycles(fresh: lorry.TrainingClient) -> None:
    """A3.1: an update whose step is submitted late enters two cycles; A3.2: submitted together, it needs one or two,
    never more than the naive way."""

    async def naive() -> int:
        first = await fresh.forward_backward_async([datum()], "cross_entropy")
        start = (await first).cycle
        optim = await fresh.optim_step_async(ADAM)
        return (await optim).cycle - start

    async def pipelined() -> int:
        # Behind an op that takes a while, both requests are here before the cycle is collected.
        await fresh.forward_async([datum([7] * 200)] * 8, "cross_entropy")
        first = await fresh.forward_backward_async([datum()], "cross_entropy")
        optim = await fresh.optim_step_async(ADAM)
        return (await optim).cycle - (await first).cycle

    assert asyncio.run(naive()) >= 1
    assert min(asyncio.run(pipelined()) for _ in range(5)) == 0


def test_a3_3_the_look_ahead_in_its_three_lengths(stack: Stack, tmp_path: Path) -> None:
    output = run(text_of("s003.py"), stack, tmp_path)
    assert output.splitlines()[1] == "[]"


# ------------------------------------------------------------------------------------------------- seed 004: A4.*


def test_a4_1_the_whole_pattern(stack: Stack, tmp_path: Path) -> None:
    probe = (
        "\nprint('resumed', resumed_client.get_info().model_id != training_client.model_id)"
        "\nprint('path', sampling_client.path)"
        "\nresumed_client.forward_backward([datum], 'cross_entropy').result()"
        "\nprint('step', resumed_client.optim_step(adam_params).result().metrics['grad_norm'] > 0)\n"
    )
    output = run(text_of("s004.py") + probe, stack, tmp_path)
    assert output.count("Saved checkpoint at step") == 2
    assert "resumed True" in output
    assert re.search(r"path lorry://\S+/sampler_weights/checkpoint-step-5", output)
    assert "step True" in output


def test_a4_2_metadata_and_ttl(fresh: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    step(fresh)
    saved = fresh.save_state("meta").result(60)
    found = service.get_checkpoint_metadata("meta")
    assert isinstance(found, types.CheckpointMetadata)
    assert (found.path, found.size, found.created) == (saved.path, saved.size, saved.created)
    assert (found.base_model, found.lora_rank, found.step, found.kind) == (QWEN_SMALL, 4, 1, "weights")
    assert found.ttl is None
    service.set_checkpoint_ttl("meta", 24)
    assert service.get_checkpoint_metadata("meta").ttl.total_seconds() == pytest.approx(24 * 3600, abs=60)
    fresh.set_checkpoint_ttl("meta", ttl_seconds=90)
    assert fresh.get_checkpoint_metadata(saved.path).ttl.total_seconds() == pytest.approx(90, abs=60)
    fresh.set_checkpoint_ttl("meta", None)
    assert fresh.get_checkpoint_metadata("meta").ttl is None
    with pytest.raises(lorry.UserError, match="ttl_hours or ttl_seconds"):
        service.set_checkpoint_ttl("meta", 1, ttl_seconds=1)

    async def by_await() -> None:
        assert (await service.get_checkpoint_metadata_async("meta")).path == saved.path
        assert (await (await fresh.set_checkpoint_ttl_async("meta", ttl_hours=1))).expires is not None

    asyncio.run(by_await())


def test_a4_2_publishing_without_a_token(fresh: lorry.TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.save_weights_for_sampler("public").result(60)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(lorry.UserError, match="HF_TOKEN"):
        fresh.publish_checkpoint("public", "user/repo")


def test_a4_3_old_samplers_keep_old_weights(fresh: lorry.TrainingClient) -> None:
    step(fresh)
    old = fresh.save_weights_for_sampler("old").result(60)
    before = greedy(old)
    for _ in range(3):
        step(fresh)
    new = fresh.save_weights_for_sampler("new").result(60)
    assert greedy(old) == before
    assert greedy(new) != before


def test_a4_3_names_are_unique_within_a_kind(fresh: lorry.TrainingClient) -> None:
    fresh.save_state("x").result(60)
    fresh.save_weights_for_sampler("x").result(60)  # the other kind
    for again in (fresh.save_state, fresh.save_weights_for_sampler):
        with pytest.raises(lorry.CheckpointExists, match="overwrite=True"):
            again("x").result(60)
    fresh.save_state("x", overwrite=True).result(60)
    with pytest.raises(lorry.UserError, match=r"two kinds.*sampler_weights/x.*weights/x"):
        fresh.get_checkpoint_metadata("x")
    assert fresh.create_sampling_client("x").path.endswith("/sampler_weights/x")


def test_a4_3_state_is_larger_than_sampler_weights(fresh: lorry.TrainingClient) -> None:
    step(fresh)
    state, sampler = fresh.save_state("big").result(60), fresh.save_weights_for_sampler("small").result(60)
    assert state.size > 2 * sampler.size


def test_a4_3_a_ttl_ends(fresh: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    path = fresh.save_state("brief", ttl_seconds=1).result(60).path
    time.sleep(1.2)
    with pytest.raises(lorry.CheckpointNotFound):
        service.get_checkpoint_metadata(path)
    with pytest.raises(lorry.CheckpointNotFound, match="expired"):
        fresh.load_state(path).result(60)
    fresh.save_state("brief").result(60)  # the name is free


# ----------------------------------------------------------------------------------------------------------- extra

SERVICE = (
    "create_lora_training_client", "create_sampling_client", "create_training_client_from_state",
    "create_training_client_from_state_with_optimizer", "create_lora_training_client_from_state",
    "create_sampling_client_from_checkpoint", "get_server_capabilities",
)  # fmt: skip
CHECKPOINTS = (
    "list_checkpoints", "get_checkpoint_metadata", "set_checkpoint_ttl", "pin_checkpoint", "unpin_checkpoint",
    "delete_checkpoint", "prune_checkpoints", "download_checkpoint", "export_checkpoint", "publish_checkpoint",
    "reindex_checkpoints",
)  # fmt: skip
SAMPLING = ("sample", "compute_logprobs", "get_base_model", "get_tokenizer")
TRAINING = (
    "forward", "forward_backward", "forward_backward_custom", "optim_step", "save_state", "save_weights_for_sampler",
    "load_state", "load_state_with_optimizer", "create_sampling_client", "save_weights_and_get_sampling_client",
    "get_info", "get_tokenizer",
)  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        *((lorry.ServiceClient, name) for name in SERVICE + CHECKPOINTS),
        *((lorry.TrainingClient, name) for name in TRAINING + CHECKPOINTS),
        *((lorry.SamplingClient, name) for name in SAMPLING),
    ],
)
def test_extra_every_method_has_a_twin_that_takes_the_same(cls: type, name: str) -> None:
    twin = inspect.signature(getattr(cls, f"{name}_async"))
    assert twin.parameters == inspect.signature(getattr(cls, name)).parameters
    assert not inspect.iscoroutinefunction(getattr(cls, f"{name}_async"))  # it submits at the call


def test_extra_return_kinds(client: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    async def kinds() -> None:
        assert isinstance(await client.forward_async([datum()]), lorry.APIFuture)
        (output,) = await asyncio.gather(client.forward_async([datum()]))
        assert math.isfinite(output.loss)
        sampler = await service.create_sampling_client_async(base_model=QWEN_SMALL)
        response = await sampler.sample_async(
            prompt=types.ModelInput.from_ints([5]), sampling_params=types.SamplingParams(max_tokens=1), num_samples=2
        )
        assert len(response.sequences) == 2
        assert (await response) == response
        info = await client.get_info_async()
        assert (await info).model_id == client.model_id
        assert isinstance(await client.get_tokenizer_async(), object)
        named = await client.save_weights_and_get_sampling_client_async(name="what-is-trio")
        assert named.path.endswith("/sampler_weights/what-is-trio")

    asyncio.run(kinds())


def test_extra_results_end_recursive_resolvers(client: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    """mint-cookbook awaits whatever can be awaited, again and again."""

    async def resolve(value: object) -> object:
        for _ in range(10):
            if hasattr(value, "result_async"):
                value = await value.result_async()
            elif inspect.isawaitable(value):
                value = await value
            else:
                return value
        raise AssertionError("it never ends")

    async def all_of_them() -> None:
        sampler = service.create_sampling_client(base_model=QWEN_SMALL)
        prompt, params = types.ModelInput.from_ints([5]), types.SamplingParams(max_tokens=1)
        for call in (
            lambda: client.forward_backward_async([datum()]),
            lambda: client.optim_step_async(ADAM),
            lambda: client.save_state_async("resolved", overwrite=True),
            lambda: client.save_weights_for_sampler_async("resolved", overwrite=True),
            lambda: service.create_training_client_from_state_async(f"tinker://{client.model_id}/weights/resolved"),
            lambda: sampler.sample_async(prompt, 1, params),
            lambda: service.get_checkpoint_metadata_async(f"lorry://{client.model_id}/weights/resolved"),
        ):
            assert await resolve(call()) is not None

    asyncio.run(all_of_them())


def test_extra_a_timed_out_wait_and_a_cancelled_op(fresh: lorry.TrainingClient) -> None:
    async def waits() -> None:
        future = await fresh.forward_backward_async([datum([7] * 100)] * 8, "cross_entropy")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.0001)
        assert math.isfinite((await future).loss)

    asyncio.run(waits())
    fresh.optim_step(ADAM).result(60)
    busy = [fresh.forward([datum([7] * 200)] * 8) for _ in range(30)]
    late = fresh.forward([datum()])
    behind = fresh.forward([datum()])
    assert late.cancel()
    assert math.isfinite(behind.result(60).loss)
    assert late.cancelled()
    assert all(math.isfinite(future.result(60).loss) for future in busy)


def test_extra_two_identical_prompts_at_once(service: lorry.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=QWEN_SMALL)
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    both = [sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params) for _ in range(2)]
    first, second = (future.result(60).sequences[0].tokens for future in both)
    assert first == second


def test_extra_forty_ops_that_nobody_awaits(fresh: lorry.TrainingClient) -> None:
    for _ in range(20):
        fresh.forward_backward([datum()], "cross_entropy")
        fresh.optim_step_async(ADAM)
    saved = fresh.save_state("after-forty").result(120)
    assert fresh.get_checkpoint_metadata(saved.path).step == 20


def test_extra_unknown_arguments_are_named(fresh: lorry.TrainingClient, service: lorry.ServiceClient) -> None:
    for call in (
        lambda: types.SamplingParams(max_token=1),
        lambda: types.AdamParams(lr=1),
        lambda: fresh.save_state("x", ttl=1),
        lambda: service.set_checkpoint_ttl("x", days=1),
        lambda: service.create_lora_training_client(QWEN_SMALL, ranks=1),
    ):
        with pytest.raises((lorry.UserError, TypeError), match=r"max_token|lr|ttl|days|ranks"):
            call()


def test_extra_bare_names(stack: Stack) -> None:
    """In one's own job first, then in one's session, then anywhere; never a guess."""
    shared, single = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("shared", "single"))
    one, two = (lorry.ServiceClient(base_url=stack.url) for _ in range(2))
    a, b = (one.create_lora_training_client(QWEN_SMALL, rank=2) for _ in range(2))
    for each in (a, b):
        each.save_state(shared).result(60)
    a.save_state(single).result(60)
    assert b.get_checkpoint_metadata(shared).job == b.model_id
    with pytest.raises(lorry.UserError, match=f"2 jobs.*{a.model_id}/weights/{shared}.*{b.model_id}"):
        one.create_lora_training_client_from_state(checkpoint_state=shared)
    assert two.get_checkpoint_metadata(single).job == a.model_id
    with pytest.raises(lorry.CheckpointNotFound, match="no checkpoint 'never-saved'"):
        two.create_sampling_client_from_checkpoint(checkpoint_name="never-saved")
    c = two.create_lora_training_client(QWEN_SMALL, rank=2)
    c.save_state(single).result(60)
    assert two.get_checkpoint_metadata(single).job == c.model_id
    assert one.get_checkpoint_metadata(single).job == a.model_id


def test_extra_logprobs_and_weights_are_tensors(client: lorry.TrainingClient) -> None:
    output = client.forward([datum()], "cross_entropy").result(60)
    logprobs = np.array(output.loss_fn_outputs[0]["logprobs"].tolist())
    assert output.loss == pytest.approx(-logprobs.mean(), rel=1e-5)
    assert {"loss:sum", "loss_sum", "loss_mean", "token_count"} <= set(output.metrics)
    assert len(losses("Loss: 1.0")) == 1
