"""A cell that a test can hurt: Redis and worker processes, to be killed, frozen, cut off and started again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import redis

import lorry
from lorry import process
from lorry.settings import ClientSettings
from lorry.stack import ProcessSpec, RedisServer
from lorry.stack.guard import Guard
from lorry.stack.process import Child
from lorry.stack.programs import PYTHON, free_port, holds_a_lease
from lorry_jobs.mailbox import Mailbox

LEASE_SECONDS = 2.0
MODEL = "tiny"


def wait_until(condition: Callable[[], object], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.02)


def new_service(url: str, **settings: object) -> lorry.ServiceClient:
    """A client with settings of its own, beside the one that this process shares."""
    key = ClientSettings(url=url, **settings)  # type: ignore[arg-type]
    with process._lock:
        process._processes[key.redis_url] = process.ClientProcess(key)
    try:
        return lorry.ServiceClient(base_url=url)
    finally:
        process._processes.pop(key.redis_url, None)


class Cell:
    """Redis and `workers` workers of the tiny model at `model`, with a short lease.

    `worker_module` stands in for `lorry_workers`, `env` is added to the workers' environment.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        workers: int,
        worker_argv: tuple[str, ...] = ("-m", "lorry_workers"),
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.model = folder, model
        self.store = folder / "store"
        self._argv = worker_argv
        self._count = workers
        self._started = 0
        self.server = RedisServer(folder / "redis", free_port(), "test-password", folder / "redis.log")
        self.workers: list[Child] = []
        self._guard = Guard()  # ends them all if this process is killed
        self._env = {
            "LORRY_LEASE_SECONDS": str(LEASE_SECONDS),
            "LORRY_LEASE_RENEW_SECONDS": "0.4",
            "LORRY_STORE_DIR": str(self.store),
            "LORRY_SNAPSHOT_STEPS": "5",
            "LORRY_THREADS": "1",
            "LORRY_LOG_LEVEL": "INFO",
            "LORRY_MAX_TOKENS_PER_CYCLE": "1",  # every batch alone: the same numbers each time, bit for bit
            **(env or {}),
        }

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def mailbox(self) -> Mailbox:
        return Mailbox(self.client())

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def __enter__(self) -> Cell:
        try:
            self._start_redis()
            for _ in range(self._count):
                self.start_worker()
            self.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.is_running:
                os.kill(worker.pid, signal.SIGCONT)
                worker.ask_to_stop()
        for worker in self.workers:
            worker.wait_or_kill(20.0)
        self.server.stop()
        self._guard.close()

    # ------------------------------------------------------------------------------------------------- workers

    def start_worker(self) -> Child:
        self._started += 1
        name = f"w{self._started}"
        spec = ProcessSpec(
            name=name,
            argv=(*PYTHON, *self._argv, "--model", f"{MODEL}={self.model}", "--name", name),
            env={**self._env, "LORRY_URL": self.url},
            ready=holds_a_lease,
        )
        child = Child(spec.name, spec.argv, self.folder / f"{name}.log", spec.env)
        self.workers.append(child)
        self._guard.watch(child.pid)
        return child

    def wait_ready(self, timeout: float = 90.0) -> None:
        """Until every running worker holds a lease."""
        deadline = time.monotonic() + timeout
        for worker in [worker for worker in self.workers if worker.is_running]:
            while not holds_a_lease(self.url, worker.pid):
                assert worker.is_running, worker.obituary()
                assert time.monotonic() < deadline, f"{worker.name} is not ready: {worker.tail()}"
                time.sleep(0.05)

    def stop(self, worker: Child, timeout: float = 40.0) -> None:
        """SIGTERM, and wait until it is gone by itself."""
        worker.ask_to_stop()
        wait_until(lambda: not worker.is_running, timeout, f"{worker.name} to end")
        assert worker.exit_code == 0, worker.obituary()

    def alive(self) -> list[Child]:
        return [worker for worker in self.workers if worker.is_running]

    def kill(self, worker: Child) -> None:
        os.kill(worker.pid, signal.SIGKILL)
        while worker.is_running:
            time.sleep(0.005)
        self._guard.forget(worker.pid)

    def freeze(self, worker: Child) -> None:
        os.kill(worker.pid, signal.SIGSTOP)

    def thaw(self, worker: Child) -> None:
        if worker.is_running:
            os.kill(worker.pid, signal.SIGCONT)

    def name_of(self, worker: Child) -> str | None:
        """The incarnation under which this process is registered now."""
        for name in self.mailbox.live_workers():
            if f'"pid": {worker.pid}' in self.mailbox.worker_record(name).get("info", ""):
                return name
        return None

    # --------------------------------------------------------------------------------------------------- Redis

    def restart_redis(self, pause: float = 0.5) -> None:
        os.kill(self.server.child.pid, signal.SIGKILL)
        while self.server.is_running:
            time.sleep(0.005)
        time.sleep(pause)
        self._start_redis()

    def _start_redis(self) -> None:
        self.server.start()
        self._guard.watch(self.server.child.pid)

    def cut_connections(self, chance: random.Random, share: float = 0.8) -> int:
        """Close most connections of clients and workers from Redis's side."""
        cut = 0
        with self.client() as client:
            me = client.client_id()
            for other in client.client_list():
                if int(other["id"]) != me and chance.random() < share:
                    cut += int(client.client_kill_filter(_id=other["id"]))
        return cut
