"""A wait is not the op: it ends with a word about why, and the op and its successors go on."""

from __future__ import annotations

import asyncio
import re

import pytest

import lorry
from lorry_jobs.errors import WaitTimeout
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import RANK, Reference, fb, final_state, largest_gap, step, submit


@pytest.fixture
def client(calm_cell: Cell) -> lorry.TrainingClient:
    return lorry.ServiceClient(base_url=calm_cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)


def heavy() -> list[lorry.Datum]:
    """Takes some tens of milliseconds."""
    tokens = list(range(60))
    return [lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})] * 16


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_timeout_names_position_reason_and_eta(calm_cell: Cell, jobs: int) -> None:
    service = lorry.ServiceClient(base_url=calm_cell.url)
    clients = [service.create_lora_training_client(MODEL, rank=RANK) for _ in range(jobs)]
    count = 48 // jobs
    futures = [[client.forward_backward(heavy()) for _ in range(count)] for client in clients]
    futures[0][count // 10].result(120)
    with pytest.raises(WaitTimeout, match=r"ops of its job are ahead of it") as timeout:
        futures[0][-1].result(0.05)
    text = str(timeout.value)
    assert isinstance(timeout.value, TimeoutError)
    assert "worker w" in text
    assert "wait again" in text
    found = re.search(r"(\d+) ops .*about ([\d.]+) (s|min)", text)
    assert found, text
    ahead, told = int(found[1]), float(found[2]) * (60 if found[3] == "min" else 1)
    assert 0 < ahead <= count
    for row in futures:
        row[-1].result(120)
    # The time told is that of all ops up to it, each at a mean of what the ops before took, by the job's ledger.
    took = head_milliseconds(calm_cell, clients[0].model_id, up_to=count - ahead - 1)
    assert (ahead + 1) * min(took) / 1000 - 0.1 <= told <= (ahead + 1) * max(took) / 1000 + 0.1


def head_milliseconds(cell: Cell, job: str, up_to: int) -> list[int]:
    """For how long each op up to this seq was the next of its job."""
    ledger = cell.mailbox.ledger(job)
    return [
        ledger[seq]["committed"] - max(ledger[seq]["queued"], ledger[seq - 1]["committed"])
        for seq in range(1, up_to + 1)
    ]


def test_waits_that_end_early_harm_nothing(calm_cell: Cell, reference: Reference, client: lorry.TrainingClient) -> None:
    ops = [op for seed in range(30) for op in (fb(seed), step())]

    async def impatient() -> None:
        futures = [submit(client, op) for op in ops]
        for future in futures[::3]:
            task = asyncio.ensure_future(future.result_async())
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*[future.result_async() for future in futures]), 0.02)
        with pytest.raises(WaitTimeout):
            await futures[-1].result_async(timeout=0.001)
        for future in futures:
            await future  # and waiting again works

    asyncio.run(impatient())
    _, expected = reference.run(client.model_id, 7, ops)
    assert largest_gap(final_state(calm_cell.store, client), expected) == 0


def test_a_wait_without_a_worker_says_so(calm_cell: Cell, client: lorry.TrainingClient) -> None:
    worker = calm_cell.alive()[0]
    calm_cell.freeze(worker)
    try:
        future = client.forward_backward(heavy())
        wait_until(lambda: "no live worker serves" in future.status(), 10, "the lease to end")
        with pytest.raises(WaitTimeout, match="it is the next op of its job"):
            future.result(0.01)
    finally:
        calm_cell.thaw(worker)
    future.result(60)  # the frozen worker starts itself anew


def test_timing(client: lorry.TrainingClient) -> None:
    future = client.forward_backward(heavy())
    with pytest.raises(AttributeError, match="not its result yet"):
        _ = future.timing
    future.result(60)
    timing = future.timing
    assert timing.compute_seconds is not None
    assert 0 < timing.compute_seconds <= timing.total_seconds < 60
    assert (timing.worker or "").startswith("w")
    assert timing.attempt == 1
    assert (timing.cycle or 0) > 0
