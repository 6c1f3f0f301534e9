"""What the clock puts into one cycle, seen from clients: results carry the number of theirs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import lorry
from lorry_jobs.errors import AccumulationIncomplete, UserError
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.redis_client import connect
from lorry_jobs.settings import QueueSettings
from tests.chaos.cell import wait_until
from tests.conftest import QWEN_SMALL, StackMaker
from tests.seeds.test_seeds import text_of

ADAM = lorry.AdamParams(learning_rate=1e-3)


def datum(length: int = 5, first: int = 5) -> lorry.Datum:
    tokens = [first + i % 50 for i in range(length + 1)]
    return lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})


HEAVY = [datum(200)] * 16
"""Takes a while: what is submitted meanwhile is collected together."""


@pytest.fixture
def clients(service: lorry.ServiceClient) -> list[lorry.TrainingClient]:
    return [service.create_lora_training_client(QWEN_SMALL, rank=4, seed=seed) for seed in range(8)]


def test_updates_of_many_jobs_that_are_queued_enter_one_cycle(clients: list[lorry.TrainingClient]) -> None:
    blocker, *others = clients
    for _ in range(10):  # of which one must find every request in time
        first = blocker.forward(HEAVY)
        updates = [(client.forward_backward([datum()]), client.optim_step(ADAM)) for client in others]
        cycles = {future.result(60).cycle for update in updates for future in update}
        if len(cycles) == 1:
            break
    assert len(cycles) == 1
    assert first.result(60).cycle not in cycles


def test_an_update_whose_requests_are_queued_enters_one_cycle_and_one_by_one_two(
    clients: list[lorry.TrainingClient],
) -> None:
    client = clients[0]
    for _ in range(10):  # of which one must find every request in time
        client.forward(HEAVY)
        update = [*[client.forward_backward([datum()]) for _ in range(9)], client.optim_step(ADAM)]
        cycles = {future.result(60).cycle for future in update}
        if len(cycles) == 1:
            break
    assert len(cycles) == 1

    alone = client.forward_backward([datum()]).result(60).cycle
    assert client.optim_step(ADAM).result(60).cycle == (alone or 0) + 1


def test_the_documents_pipelined_loop_takes_fewer_cycles_than_the_naive_one(
    clients: list[lorry.TrainingClient],
) -> None:
    document: dict[str, Any] = {}
    exec(text_of("s003.py").partition("async def main")[0], document)
    pipelined = document["train_pipelined"]
    batches = [[datum(100, first)] * 8 for first in range(6)]

    async def naive() -> list[lorry.types.ForwardBackwardOutput]:
        found = []
        for batch in batches:
            found.append(await (await clients[0].forward_backward_async(batch, "cross_entropy")))
            await (await clients[0].optim_step_async(ADAM))
        return found

    first = asyncio.run(naive())
    second = asyncio.run(pipelined(clients[1], batches, ADAM.learning_rate))
    assert len(second) == len(batches)
    # From the first batch to the last: the naive loop takes two cycles each, the other mostly one.
    assert span(first) == 2 * (len(batches) - 1)
    assert span(second) < span(first)


def span(results: list[lorry.types.ForwardBackwardOutput]) -> int:
    return (results[-1].cycle or 0) - (results[0].cycle or 0)


def test_a_bad_op_fails_alone_and_the_good_ones_of_its_cycle_succeed(clients: list[lorry.TrainingClient]) -> None:
    blocker, bad, *good = clients
    blocker.forward(HEAVY)
    infinite = lorry.Datum(lorry.ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7], "weights": [3e38, 3e38]})
    broken = [bad.forward_backward([datum()]), bad.forward_backward([infinite]), bad.optim_step(ADAM)]
    fine = [(client.forward_backward([datum()]), client.optim_step(ADAM)) for client in good]
    for forward_backward, step in fine:
        assert forward_backward.result(60).loss > 0
        assert step.result(60).metrics["grad_norm"] > 0
    assert broken[0].result(60).loss > 0
    with pytest.raises(UserError):
        broken[1].result(60)
    with pytest.raises(AccumulationIncomplete, match="forward_backward with seq 2"):
        broken[2].result(60)
    bad.forward_backward([datum()])
    assert bad.optim_step(ADAM).result(60).metrics["grad_norm"] > 0


def test_workers_tell_what_their_cycles_held(make_stack: StackMaker) -> None:
    stack = make_stack()
    client = lorry.ServiceClient(base_url=stack.url).create_lora_training_client(QWEN_SMALL, rank=4)
    client.forward_backward([datum(7), datum(4)])
    client.optim_step(ADAM).result(60)
    mailbox = Mailbox(connect(QueueSettings(url=stack.url)))
    [worker] = mailbox.live_workers()

    def recent() -> dict[str, float]:
        return json.loads(mailbox.worker_record(worker)["info"]).get("recent") or {}

    wait_until(lambda: recent().get("cycles", 0) >= 2, 30, "the next heartbeat")
    found = recent()
    assert found["tokens"] * found["cycles"] == pytest.approx(11)
    assert found["ops"] * found["cycles"] == pytest.approx(3)  # create_model, forward_backward, optim_step
    assert found["train_ms"] > 0
    assert 0 <= found["idle"] <= 1
