"""Flower shows every op by name, with its job, its seq, its state and its worker."""

from __future__ import annotations

import ast
import time
from typing import Any

import httpx
import pytest

import lorry
from lorry.stack import Stack
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import random_batch, wait_until


@pytest.fixture
def flower(stack: Stack) -> Any:
    assert stack.flower is not None
    login = (stack.flower.user, stack.flower.password)
    with httpx.Client(base_url=stack.flower.url, auth=login, timeout=30, trust_env=False) as client:
        yield client


def tasks_of(flower: httpx.Client, job: str) -> dict[int, dict[str, Any]]:
    """What Flower shows of a job's ops, by seq."""
    found = {}
    for task in flower.get("/api/tasks", params={"limit": 10000}).raise_for_status().json().values():
        arguments = ast.literal_eval(task["args"]) if task["args"] else ()
        if arguments and arguments[0] == job:
            found[arguments[1]] = task
    return found


def test_it_needs_the_password(stack: Stack) -> None:
    assert stack.flower is not None
    for auth in (None, ("lorry", "wrong"), ("somebody", stack.flower.password)):
        with httpx.Client(base_url=stack.flower.url, auth=auth, trust_env=False) as client:
            for page in ("/", "/api/tasks", "/api/workers", "/tasks"):
                assert client.get(page).status_code == 401


def test_every_op_is_shown_with_its_job_its_state_and_its_worker(
    service: lorry.ServiceClient, flower: httpx.Client
) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=4, seed=1)
    job = client.model_id
    client.forward(random_batch(1))
    client.forward_backward(random_batch(1))
    client.optim_step(lorry.AdamParams())
    state = client.save_state("flower")
    client.save_weights_for_sampler("flower")
    client.load_state(state.result(60).path)
    failed = client.optim_step(lorry.AdamParams())
    with pytest.raises(lorry.UserError):
        failed.result(60)
    sampler = service.create_sampling_client(base_model=QWEN_SMALL)
    sampled = sampler.sample(lorry.ModelInput.from_ints([1, 2]), 1, lorry.SamplingParams(max_tokens=2))
    sampled.result(60)

    expected = {
        0: ("lorry.create_model", "SUCCESS"),
        1: ("lorry.forward", "SUCCESS"),
        2: ("lorry.forward_backward", "SUCCESS"),
        3: ("lorry.optim_step", "SUCCESS"),
        4: ("lorry.save_state", "SUCCESS"),
        5: ("lorry.save_weights_for_sampler", "SUCCESS"),
        6: ("lorry.load_state", "SUCCESS"),
        7: ("lorry.optim_step", "FAILURE"),
    }

    def shown() -> dict[int, tuple[str, str]]:
        return {seq: (task["name"], task["state"]) for seq, task in tasks_of(flower, job).items()}

    wait_until(lambda: shown() == expected)  # events are sent in groups, about once a second
    tasks = tasks_of(flower, job)
    assert {task["uuid"] for task in tasks.values()} == {f"{job}.{seq}" for seq in expected}
    workers = {task["worker"] for task in tasks.values()}
    assert len(workers) == 1
    assert next(iter(workers)).startswith("Qwen-Qwen3-0.6B-1-")
    assert "nothing is accumulated" in tasks[7]["exception"]
    assert "loss" in tasks[2]["result"]
    assert all(task["runtime"] is not None for seq, task in tasks.items() if seq < 7)

    def sample_task() -> dict[str, Any]:
        answer = flower.get(f"/api/task/info/{sampled.task_id}")
        # Its result is here before its events are there: they go out ten times in a second.
        return {} if answer.status_code == 404 else answer.raise_for_status().json()

    wait_until(lambda: sample_task().get("state") == "SUCCESS")
    assert sample_task()["name"] == "lorry.sample"


def online(flower: httpx.Client) -> dict[str, bool]:
    status: dict[str, bool] = flower.get("/api/workers", params={"status": "true"}).raise_for_status().json()
    return status


def keep_busy(service: lorry.ServiceClient, flower: httpx.Client, seconds: float) -> None:
    """One op that computes for at least so long, while Flower is asked every second who is online."""
    client = service.create_lora_training_client(QWEN_SMALL, rank=4, train_unembed=False)

    def op(rows: int) -> lorry.APIFuture[lorry.ForwardBackwardOutput]:
        return client.forward_backward(random_batch(1, rows=rows, length=500))

    op(8).result(60)
    started = time.monotonic()
    op(64).result(120)
    per_row = (time.monotonic() - started) / 64
    rows = int(1.3 * seconds / per_row)
    started = time.monotonic()
    busy = op(rows)
    seen: list[dict[str, bool]] = []
    while not busy.done():
        seen.append(online(flower))
        time.sleep(1)
    lasted = time.monotonic() - started
    assert busy.result().loss > 0
    print(f"{rows} rows of 500 tokens: {lasted:.1f} s, {len(seen)} answers of Flower")
    assert lasted > seconds / 2  # else this has shown nothing
    assert len(seen) > seconds / 4
    here = [name for name in seen[0] if name.startswith("Qwen-Qwen3-0.6B-1-")]
    assert len(here) == 1
    assert all(answer[name] for answer in seen for name in here), seen
    assert service._process.mailbox.live_workers(QWEN_SMALL)


@pytest.mark.slow
def test_workers_stay_online_while_an_op_computes(service: lorry.ServiceClient, flower: httpx.Client) -> None:
    keep_busy(service, flower, seconds=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_stay_online_while_an_op_computes_for_a_minute(
    service: lorry.ServiceClient, flower: httpx.Client
) -> None:
    keep_busy(service, flower, seconds=75)
