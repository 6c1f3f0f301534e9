"""Flower shows every op by its name, with job and seq, state and worker; its API wants the password."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

import lorry
from lorry.stack import Stack
from tests.conftest import QWEN_SMALL

SHOWN_WITHIN_SECONDS = 15.0


class FlowerAPI:
    def __init__(self, stack: Stack) -> None:
        assert stack.flower is not None
        self.address = stack.flower.url
        self._client = httpx.Client(
            base_url=stack.flower.url, auth=(stack.flower.user, stack.flower.password), trust_env=False, timeout=20
        )

    def tasks_of(self, job: str) -> dict[int, dict[str, Any]]:
        """seq -> what Flower knows of the op."""
        tasks = self._client.get("/api/tasks", params={"limit": 2000}).raise_for_status().json()
        found = {}
        for task_id, task in tasks.items():
            if task_id.startswith(f"{job}."):
                found[int(task_id.removeprefix(f"{job}."))] = task
        return found

    def online(self) -> dict[str, bool]:
        """worker -> whether Flower thinks that it is there."""
        return self._client.get("/api/workers", params={"status": 1}).raise_for_status().json()  # type: ignore[no-any-return]


@pytest.fixture
def flower(stack: Stack) -> FlowerAPI:
    return FlowerAPI(stack)


def batch(rows: int = 1, length: int = 8) -> list[lorry.Datum]:
    tokens = [(7 * i) % 300 for i in range(length + 1)]
    return [lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})] * rows


def test_every_op_by_name_with_state_and_worker(service: lorry.ServiceClient, flower: FlowerAPI) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=2)
    client.forward(batch())
    client.forward_backward(batch())
    client.optim_step()
    failing = client.forward_backward(batch(), "no such loss")
    client.optim_step()
    client.save_state("flower")
    client.load_state("flower")
    client.save_weights_for_sampler("flower").result(60)
    assert isinstance(failing.exception(60), lorry.UserError)

    expected = {
        0: ("lorry.create_model", "SUCCESS"),
        1: ("lorry.forward", "SUCCESS"),
        2: ("lorry.forward_backward", "SUCCESS"),
        3: ("lorry.optim_step", "SUCCESS"),
        4: ("lorry.forward_backward", "FAILURE"),
        5: ("lorry.optim_step", "FAILURE"),
        6: ("lorry.save_state", "SUCCESS"),
        7: ("lorry.load_state", "SUCCESS"),
        8: ("lorry.save_weights_for_sampler", "SUCCESS"),
    }
    deadline = time.monotonic() + SHOWN_WITHIN_SECONDS
    while True:
        tasks = flower.tasks_of(client.model_id)
        shown = {seq: (task["name"], task["state"]) for seq, task in tasks.items()}
        if shown == expected or time.monotonic() > deadline:
            break
        time.sleep(0.3)
    assert shown == expected
    for seq, task in tasks.items():
        assert task["args"] == f"('{client.model_id}', {seq})"
        assert task["worker"].startswith("Qwen-Qwen3-0.6B-1-")
        assert task["kwargs"] == "{}"
    assert "unknown loss_fn" in tasks[4]["exception"]


def test_no_password_no_answer(stack: Stack, flower: FlowerAPI) -> None:
    for path in ("/", "/api/tasks", "/api/workers"):
        assert httpx.get(flower.address + path, trust_env=False).status_code == 401
        wrong = httpx.get(flower.address + path, auth=("lorry", "wrong"), trust_env=False)
        assert wrong.status_code == 401


def test_workers_stay_online_while_an_op_computes(service: lorry.ServiceClient, flower: FlowerAPI) -> None:
    watch_while_computing(service, flower, seconds=15)


@pytest.mark.slow
def test_workers_stay_online_for_a_minute(service: lorry.ServiceClient, flower: FlowerAPI) -> None:
    watch_while_computing(service, flower, seconds=60)


def watch_while_computing(service: lorry.ServiceClient, flower: FlowerAPI, *, seconds: float) -> None:
    """One op that computes for at least `seconds`, found by measuring a small one first."""
    client = service.create_lora_training_client(QWEN_SMALL, rank=2)
    client.forward_backward(batch(rows=8, length=500)).result(120)
    started = time.monotonic()
    client.forward_backward(batch(rows=32, length=500)).result(120)
    per_row = (time.monotonic() - started) / 32
    rows = int(seconds * 1.5 / per_row)

    future = client.forward_backward(batch(rows=rows, length=500))
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    started = time.monotonic()
    seen: list[dict[str, bool]] = []
    while not done.wait(1.0):
        seen.append(flower.online())
    assert time.monotonic() - started >= seconds
    assert len(seen) >= seconds / 4
    mine = [name for name in seen[0] if name.startswith("Qwen-Qwen3-0.6B-1-")]
    assert mine
    assert all(online[name] for online in seen for name in mine)
    assert future.result().metrics["tokens:sum"] == rows * 500
