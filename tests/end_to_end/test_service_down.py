"""The worker away, Redis away, or both: clients are told, and go on when they are back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lorry
from lorry.stack import RedisServer
from lorry.stack.programs import free_port
from lorry_jobs.errors import ServiceUnavailable
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import WorkerProcess, random_batch, train, wait_until, worker_process

CONNECT_TIMEOUT = 2.0
A_FEW_SECONDS = 10.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of clients and workers alike under which a test need not wait long."""
    for name in [name for name in os.environ if name.startswith("LORRY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LORRY_CONNECT_TIMEOUT_SECONDS", str(CONNECT_TIMEOUT))
    monkeypatch.setenv("LORRY_LEASE_SECONDS", "4")
    monkeypatch.setenv("LORRY_LEASE_RENEW_SECONDS", "0.5")
    monkeypatch.setenv("LORRY_SNAPSHOT_STEPS", "5")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", free_port(), "test-password", tmp_path / "redis.log") as running:
        yield running


@pytest.fixture
def model(tiny_qwen3: Path) -> str:
    return f"{QWEN_SMALL}={tiny_qwen3}"


def make_client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(QWEN_SMALL, rank=4, seed=1)


class Run:
    """Twenty steps, all submitted at once, of batches large enough that a run lasts for seconds."""

    steps = 20
    adam = lorry.AdamParams(learning_rate=1e-3)

    def __init__(self, client: lorry.TrainingClient) -> None:
        self.outputs, self.updates = [], []
        for seed in range(self.steps):
            self.outputs.append(client.forward_backward(random_batch(seed, rows=16, length=100)))
            self.updates.append(client.optim_step(self.adam))

    def wait_for(self, step: int) -> None:
        self.updates[step].result(60)

    def finish(self) -> list[float]:
        """Every loss, and every norm of the gradient."""
        losses = [output.result(120).loss for output in self.outputs]
        return losses + [update.result(120).metrics["grad_norm"] for update in self.updates]

    @property
    def is_under_way(self) -> bool:
        return not self.outputs[-1].done()


def check_equals_an_undisturbed_run(service: lorry.ServiceClient, found: list[float]) -> None:
    assert Run(make_client(service)).finish() == pytest.approx(found, abs=1e-6, rel=1e-5)


def test_no_worker_is_said_and_waited_for(
    server: RedisServer, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said(what: str) -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == "lorry"]
        return [m for m in messages if f"no live worker serves '{QWEN_SMALL}'" in m and what in m]

    async def create_sampler() -> tuple[lorry.SamplingClient, int]:
        creating = asyncio.ensure_future(service.create_sampling_client_async(base_model=QWEN_SMALL).result_async())
        turns = 0
        while not creating.done():
            await asyncio.sleep(0.1)
            turns += 1
        return creating.result(), turns

    service = lorry.ServiceClient(server.url)
    assert service.get_server_capabilities().supported_models == []
    with ThreadPoolExecutor(3) as pool:
        training = pool.submit(make_client, service)
        sampling = pool.submit(service.create_sampling_client, base_model=QWEN_SMALL)
        from_a_loop = pool.submit(asyncio.run, create_sampler())
        wait_until(lambda: said("create_model") and len(said("waiting until one appears")) == 2, A_FEW_SECONDS)
        assert all(f"lorry worker --model {QWEN_SMALL}" in message for message in said(""))
        assert not training.done()
        assert not sampling.done()
        with worker_process(server.url, model, tmp_path) as worker:
            worker.wait_ready()
            assert len(train(training.result(30), [1, 2])) == 3
            params = lorry.SamplingParams(max_tokens=3, stop=[])
            sampler, turns = from_a_loop.result(30)
            assert turns > 10  # the loop did not stand still
            for client in (sampling.result(30), sampler):
                assert (
                    len(client.sample(lorry.ModelInput.from_ints([1]), 1, params).result(30).sequences[0].tokens) == 3
                )
            assert worker.stop() == 0


@pytest.mark.parametrize("how", ["refused", "frozen"])
def test_no_redis_is_said_within_the_connect_timeout(server: RedisServer, how: str) -> None:
    if how == "frozen":
        os.kill(server.child.pid, signal.SIGSTOP)
    else:
        server.stop()
    started = time.monotonic()
    try:
        with pytest.raises(ServiceUnavailable, match=r"cannot be reached.*lorry up.*LORRY_URL"):
            lorry.ServiceClient(server.url)
        assert time.monotonic() - started < CONNECT_TIMEOUT + 3
    finally:
        if how == "frozen":
            os.kill(server.child.pid, signal.SIGCONT)
    if how == "refused":
        server.start()
    assert lorry.ServiceClient(server.url).get_server_capabilities().supported_models == []


def test_redis_killed_and_restarted_with_ops_in_flight(server: RedisServer, model: str, tmp_path: Path) -> None:
    with worker_process(server.url, model, tmp_path) as worker:
        worker.wait_ready()
        service = lorry.ServiceClient(server.url)
        client = make_client(service)
        run = Run(client)
        run.wait_for(3)
        os.kill(server.child.pid, signal.SIGKILL)
        server.child.wait_or_kill(10)
        killed = time.monotonic()
        assert run.is_under_way

        # Whoever waits is told; whoever submits is not kept waiting; whoever asks is told at once.
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(run.updates[-1].result), pool.submit(asyncio.run, run.updates[-2].result_async())]
            for wait in waits:
                error = wait.exception(CONNECT_TIMEOUT + A_FEW_SECONDS)
                assert isinstance(error, ServiceUnavailable)
                assert "wait for the same future again" in str(error)
        assert time.monotonic() - killed >= CONNECT_TIMEOUT
        late = client.forward(random_batch(0, rows=16, length=100))
        with pytest.raises(ServiceUnavailable, match="cannot be reached"):
            service.get_server_capabilities()
        assert not run.updates[-1].done()

        server.start()
        found = run.finish()
        assert late.result(60).loss > 0
        assert worker.child.is_running
        check_equals_an_undisturbed_run(service, found)


def test_a_worker_killed_in_the_middle_and_another_one_started(server: RedisServer, model: str, tmp_path: Path) -> None:
    """A snapshot after step 5, a journal after it: the new worker goes on at the exact op."""
    with worker_process(server.url, model, tmp_path) as first:
        first.wait_ready()
        service = lorry.ServiceClient(server.url)
        client = make_client(service)
        run = Run(client)
        run.wait_for(8)
        first.kill()
        assert run.is_under_way
    with worker_process(server.url, model, tmp_path) as second:
        second.wait_ready()
        found = run.finish()
        check_equals_an_undisturbed_run(service, found)
        log = second.child.log.read_text()
        assert f"job {client.model_id}: replayed" in log
        assert service._process.mailbox.status(client.model_id).committed == 2 * Run.steps


def test_a_worker_told_to_stop_hands_its_jobs_to_another(
    server: RedisServer, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        worker_process(server.url, model, tmp_path, number=1) as one,
        worker_process(server.url, model, tmp_path, number=2) as two,
    ):
        one.wait_ready()
        two.wait_ready()
        service = lorry.ServiceClient(server.url)
        clients = [make_client(service) for _ in range(2)]
        runs = [Run(client) for client in clients]
        status = service._process.mailbox.status
        by_label = {worker.child.name.removeprefix("worker-"): worker for worker in (one, two)}

        def owners() -> list[WorkerProcess]:
            return [by_label[status(client.model_id).owner.rsplit("-", 1)[0]] for client in clients]

        assert {id(owner) for owner in owners()} == {id(one), id(two)}  # both have jobs
        runs[0].wait_for(3)
        leaving = owners()[0]
        staying = two if leaving is one else one
        stopping = threading.Thread(target=leaving.stop)
        stopping.start()
        found = [run.finish() for run in runs]
        stopping.join()
        assert leaving.child.exit_code == 0
        assert staying.child.is_running
        assert [record for record in caplog.records if record.name == "lorry" and record.levelname == "ERROR"] == []
        for losses in found:
            assert losses == pytest.approx(found[0], abs=1e-6, rel=1e-5)
        check_equals_an_undisturbed_run(service, found[0])
