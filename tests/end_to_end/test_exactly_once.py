"""The same op submitted twice runs once; another op under the same seq is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

import lorry
from lorry.stack import Stack
from lorry_jobs import ops, wire
from lorry_jobs.errors import SequenceConflict
from lorry_jobs.results import Outcome
from lorry_jobs.types import AdamParams, OptimStepRequest
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import random_batch

STEP = OptimStepRequest(adam_params=AdamParams(learning_rate=1e-2)).model_dump_json().encode()
OTHER_STEP = OptimStepRequest(adam_params=AdamParams(learning_rate=2e-2)).model_dump_json().encode()

FROM_ANOTHER_PROCESS = """
import json, sys
from lorry.process import ClientProcess
from lorry.settings import ClientSettings
job, seq, op, payload = json.loads(sys.stdin.read())
process = ClientProcess(ClientSettings(url=sys.argv[1]))
future = process.submit_op(job, seq, op, bytes.fromhex(payload), lambda outcome: outcome.info)
error = future.exception(60)
print(json.dumps({"error": type(error).__name__, "text": str(error)} if error else future.result()))
"""


def submit_elsewhere(stack: Stack, job: str, seq: int, op: str, payload: bytes) -> dict[str, object]:
    """What another client process gets for this op."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_ANOTHER_PROCESS, stack.url],
        input=json.dumps([job, seq, op, payload.hex()]),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def info(outcome: Outcome) -> dict[str, object]:
    return outcome.info


def make_client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(QWEN_SMALL, rank=4, seed=11)


def losses_after(client: lorry.TrainingClient, steps: int) -> float:
    """The loss of batch 0 after this many steps of STEP on it."""
    for _ in range(steps):
        client.forward_backward(random_batch(0))
        client.optim_step(AdamParams(learning_rate=1e-2))
    return client.forward(random_batch(0)).result(60).loss


@pytest.fixture
def once_and_twice(service: lorry.ServiceClient) -> tuple[float, float]:
    once, twice = losses_after(make_client(service), 1), losses_after(make_client(service), 2)
    assert abs(once - twice) > 1e-2
    return once, twice


def test_the_same_bytes_run_once(
    stack: Stack, service: lorry.ServiceClient, once_and_twice: tuple[float, float]
) -> None:
    client = make_client(service)
    job, process = client.model_id, client._process
    batch = wire.encode_batch(job, 1, random_batch(0), "cross_entropy", None, forward_only=False)
    copies: list[lorry.APIFuture[dict[str, object]]] = []

    def submit() -> None:
        copies.append(process.submit_op(job, 1, ops.FORWARD_BACKWARD, batch, info))
        copies.append(process.submit_op(job, 2, ops.OPTIM_STEP, STEP, info))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [copy.result(60) for copy in copies]
    steps = [answer for copy, answer in zip(copies, answers, strict=True) if copy.seq == 2]
    assert len(steps) == 4
    assert all(step == steps[0] for step in steps)

    # After the commit, from here and from another process: the same result again, and nothing runs.
    assert process.submit_op(job, 2, ops.OPTIM_STEP, STEP, info).result(60) == steps[0]
    assert submit_elsewhere(stack, job, 2, ops.OPTIM_STEP, STEP) == steps[0]
    assert process.mailbox.status(job).committed == 2

    client._next_seq = 3
    assert client.forward(random_batch(0)).result(60).loss == pytest.approx(once_and_twice[0], abs=1e-6)


def test_a_retry_before_the_commit_from_another_process(stack: Stack, service: lorry.ServiceClient) -> None:
    """Seq 1 is still missing, so both submissions of seq 2 wait; each client hears of the one result."""
    client = make_client(service)
    job, process = client.model_id, client._process
    here = process.submit_op(job, 2, ops.OPTIM_STEP, STEP, info)
    found: list[dict[str, object]] = []
    elsewhere = threading.Thread(target=lambda: found.append(submit_elsewhere(stack, job, 2, ops.OPTIM_STEP, STEP)))
    elsewhere.start()
    assert not here.done()
    client.forward_backward(random_batch(0)).result(60)
    elsewhere.join()
    assert found == [here.result(60)]
    assert process.mailbox.status(job).committed == 2


def test_other_bytes_are_refused_and_change_nothing(
    stack: Stack, service: lorry.ServiceClient, once_and_twice: tuple[float, float]
) -> None:
    client = make_client(service)
    job, process = client.model_id, client._process
    client.forward_backward(random_batch(0)).result(60)
    first = process.submit_op(job, 2, ops.OPTIM_STEP, STEP, info)
    result = first.result(60)
    for op, payload in ((ops.OPTIM_STEP, OTHER_STEP), (ops.FORWARD, STEP)):
        with pytest.raises(SequenceConflict, match="give the new request the next seq") as caught:
            process.submit_op(job, 2, op, payload, info).result(60)
        assert (caught.value.job, caught.value.seq) == (job, 2)
    elsewhere = submit_elsewhere(stack, job, 2, ops.OPTIM_STEP, OTHER_STEP)
    assert elsewhere["error"] == "SequenceConflict"
    assert first.result() == result
    assert first.async_result.get(timeout=20) == result
    client._next_seq = 3
    assert client.forward(random_batch(0)).result(60).loss == pytest.approx(once_and_twice[0], abs=1e-6)


def test_a_second_request_with_the_same_job_id_is_refused(service: lorry.ServiceClient) -> None:
    """Two sessions never share an id by chance; if they did, neither would train on the other's job."""
    mine = make_client(service)
    stranger = lorry.ServiceClient(service._process.settings.redis_url)
    stranger._session = service._session
    stranger._next_model = int(mine.model_id.rsplit(":", 1)[1])
    with pytest.raises(SequenceConflict, match="another job has this id already"):
        stranger.create_lora_training_client(QWEN_SMALL, rank=8, seed=11)
    assert mine.forward(random_batch(0)).result(60).loss > 0
