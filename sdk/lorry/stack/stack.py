"""Start everything that Lorry needs on this machine, look after it, stop it in the right order."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import redis

from lorry.stack.guard import Guard
from lorry.stack.process import HEALTHY_SECONDS, Child, ProcessSpec, restart_delay
from lorry.stack.programs import flower_is_installed, flower_spec, free_port, worker_specs
from lorry.stack.redis_server import HOST, RedisServer, stop_stale_server, write_private
from lorry.stack.settings import StackSettings
from lorry.stack.state import FlowerInfo, StackInfo, stack_lock, state_file, write_state
from lorry_jobs.errors import ServiceError, ServiceUnavailable, UserError
from lorry_jobs.paths import models_dir
from lorry_jobs.settings import masked_url

POLL_SECONDS = 0.1
# When Redis is gone, workers have nowhere to commit to: there is nothing to wait for.
STOP_SECONDS_WITHOUT_REDIS = 3.0


class Stack:
    """Redis, workers and Flower as children of this process.

        with Stack(StackSettings(models=["smollm2"])) as stack:
            print(stack.url)
            stack.wait()

    `processes` stands in for the workers that the settings describe. `on_event` is called with one line of
    text for each thing that a person would want to know, from the thread in which it happened.
    """

    def __init__(
        self,
        settings: StackSettings,
        *,
        processes: Sequence[ProcessSpec] | None = None,
        on_event: Callable[[str], None] | None = None,
        started_by: str = "lorry up",
    ) -> None:
        self.settings = settings
        self.home = settings.home
        self.logs = settings.home / "logs"
        self.url = ""
        self.flower: FlowerInfo | None = None
        self.failure: ServiceError | None = None
        self._processes = processes
        self._say = on_event or (lambda line: None)
        self._started_by = started_by
        self._started_at = datetime.now(UTC)
        self._stop_requests = 0
        self._redis: RedisServer | None = None
        self._kept: list[_Kept] = []  # in the order of their start
        self._held = ExitStack()  # the lock and the guard
        self._watcher: threading.Thread | None = None
        self._watching = threading.Event()

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until it is ready. If anything is not in time, stop it all and raise."""
        self._held.enter_context(stack_lock(self.home, self._started_by))
        try:
            self._guard = Guard()
            self._held.callback(self._guard.close)
            self.url = self._start_redis()
            for spec in self._specs():
                self._kept.append(_Kept(spec, self._start_child(spec)))
            self._wait_until_ready(self.settings.start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        self._write_state()
        self._watching.set()
        # A daemon, so that a notebook that ends without leaving its `with` block can end.
        self._watcher = threading.Thread(target=self._watch, name="lorry-stack", daemon=True)
        self._watcher.start()

    def wait(self) -> None:
        """Return when a stop is requested; raise when the stack has failed."""
        # Sleep and look, instead of an Event: an Event that a signal handler sets while its own thread
        # enters `Event.wait` would never be released.
        while not self._stop_requests:
            if self.failure is not None:
                raise self.failure
            time.sleep(POLL_SECONDS)

    def request_stop(self) -> None:
        """Make `start` or `wait` end. Safe in a signal handler. A second request makes `stop` impatient."""
        self._stop_requests += 1

    @property
    def stop_requested(self) -> bool:
        return self._stop_requests > 0

    def stop(self) -> None:
        """Stop Flower, then the workers (they finish and give back their jobs), then Redis."""
        self._watching.clear()
        if self._watcher is not None:
            self._watcher.join()
        self._stop_children()
        self._held.close()

    @property
    def pids(self) -> dict[str, int]:
        pids = {kept.spec.name: kept.child.pid for kept in self._kept}
        return pids if self._redis is None else {"redis": self._redis.child.pid, **pids}

    # -- start ---------------------------------------------------------------------------------------

    def _start_redis(self) -> str:
        if self.settings.url is not None:
            url = self.settings.url.get_secret_value()
            self._check_answers(url)
            return url
        folder = self.home / "redis"
        stop_stale_server(folder)  # before a port is chosen: it may hold the one that we want
        server = RedisServer(
            folder,
            self._redis_port(folder),
            self._redis_password(folder),
            self._fresh_log("redis"),
            appendfsync=self.settings.appendfsync,
        )
        self._say(f"Redis: {server.binary.path} {server.binary.version} (from {server.binary.origin})")
        server.start()
        self._redis = server
        self._guard.watch(server.child.pid)
        return server.url

    def _check_answers(self, url: str) -> None:
        try:
            with redis.Redis.from_url(url, socket_connect_timeout=5.0, socket_timeout=5.0) as client:
                client.ping()
        except redis.RedisError as error:
            raise ServiceUnavailable(
                f"LORRY_URL is {masked_url(url)}, and that Redis does not answer: {error}. "
                f"Unset LORRY_URL to let `lorry up` start a Redis of its own."
            ) from error

    def _redis_port(self, folder: Path) -> int:
        if self.settings.redis_port is not None:
            return self.settings.redis_port
        remembered = folder / "port"
        last = int(remembered.read_text()) if remembered.exists() else None
        port = free_port(last)
        if port != last:
            write_private(remembered, f"{port}\n")
        return port

    def _redis_password(self, folder: Path) -> str:
        if self.settings.redis_password is not None:
            return self.settings.redis_password.get_secret_value()
        remembered = folder / "password"
        if not remembered.exists():
            write_private(remembered, secrets.token_urlsafe(32) + "\n")
        return remembered.read_text().strip()

    def _specs(self) -> list[ProcessSpec]:
        workers = self._processes
        if workers is None:
            if not self.settings.models:
                raise UserError("a stack needs at least one base model to serve")
            workers = worker_specs(self.settings.models, self.settings.workers)
        if not self.settings.flower:
            return [*workers]
        if not flower_is_installed():
            self._say("Flower is not installed, so it is left out: pip install 'lorry[monitor]'")
            return [*workers]
        port = free_port(self.settings.flower_port)
        self.flower = FlowerInfo(url=f"http://{HOST}:{port}", user="lorry", password=secrets.token_urlsafe(18))
        return [*workers, flower_spec(self.url, port, self.flower)]

    def _start_child(self, spec: ProcessSpec) -> Child:
        env = {**self._environment(), **spec.env}
        child = Child(spec.name, spec.argv, self._fresh_log(spec.name), env)
        self._say(f"{spec.name}: started, pid {child.pid}, log {child.log}")
        self._guard.watch(child.pid)
        return child

    def _environment(self) -> Mapping[str, str]:
        """What every child is told. Models are the user's also when the home is a temporary one."""
        return {
            "LORRY_URL": self.url,
            "LORRY_HOME": str(self.home),
            "LORRY_MODELS_DIR": str(models_dir()),
            "LORRY_STORE_DIR": os.environ.get("LORRY_STORE_DIR") or str(self.home / "store"),
            "PYTHONUNBUFFERED": "1",  # a log's last lines have to be there when its process is killed
        }

    def _fresh_log(self, name: str) -> Path:
        """This run's log; the one of the run before is kept as `<name>.log.1`."""
        log = self.logs / f"{name}.log"
        if log.exists() and name not in {kept.spec.name for kept in self._kept}:
            log.replace(log.with_name(f"{log.name}.1"))
        return log

    def _wait_until_ready(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        waiting = list(self._kept)
        while waiting:
            if self._stop_requests:
                raise ServiceError("stopped before everything was ready")
            if self._redis is not None and not self._redis.is_running:
                raise ServiceUnavailable(self._redis.child.obituary())
            for kept in self._kept:
                # An end this early is a mistake that a restart would only repeat.
                if not kept.child.is_running:
                    raise ServiceUnavailable(f"not ready: {kept.child.obituary()}")
            if time.monotonic() > deadline:
                late = waiting[0].child
                raise ServiceUnavailable(
                    f"{late.name} (pid {late.pid}) is not ready after {timeout_seconds:g} s. "
                    f"The end of its log, {late.log}:\n{late.tail()}"
                )
            waiting = [kept for kept in waiting if not kept.is_ready(self.url)]
            time.sleep(POLL_SECONDS)

    def _write_state(self) -> None:
        info = StackInfo(
            url=self.url,
            flower=self.flower,
            pid=os.getpid(),
            pids=self.pids,
            models=[model.partition("=")[0] for model in self.settings.models],
            started=self._started_at,
            started_by=self._started_by,
        )
        write_state(self.home, info)

    # -- look after it -------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while self._watching.is_set() and self.failure is None:
                self._look_after_children()
                time.sleep(POLL_SECONDS)
        except OSError as error:  # no memory or no disk to start a child or to write the state
            self._fail(ServiceError(f"the stack cannot be looked after any more: {error}"))
        if self.failure is not None:
            self._stop_children()

    def _look_after_children(self) -> None:
        if self._redis is not None and not self._redis.is_running:
            self._fail(ServiceUnavailable(f"the stack has lost its Redis: {self._redis.child.obituary()}"))
            return
        for kept in self._kept:
            if kept.given_up or kept.child.is_running:
                continue
            if kept.restart_at is None:
                self._plan_restart(kept)
            elif time.monotonic() >= kept.restart_at:
                kept.restart_at = None
                kept.child = self._start_child(kept.spec)
                self._write_state()
        workers = [kept for kept in self._kept if kept.spec.name != "flower"]
        if workers and all(kept.given_up for kept in workers):
            self._fail(ServiceUnavailable(f"no worker is left: {workers[-1].child.obituary()}"))

    def _plan_restart(self, kept: _Kept) -> None:
        self._guard.forget(kept.child.pid)
        kept.failures = 1 if kept.child.up_seconds > HEALTHY_SECONDS else kept.failures + 1
        delay = restart_delay(kept.failures)
        if delay is None:
            kept.given_up = True
            self._say(f"given up after {kept.failures} ends in a row: {kept.child.obituary()}")
            return
        kept.restart_at = time.monotonic() + delay
        self._say(f"starts again in {delay:g} s: {kept.child.obituary()}")

    def _fail(self, failure: ServiceError) -> None:
        self.failure = failure
        self._say(str(failure))

    # -- stop ----------------------------------------------------------------------------------------

    def _stop_children(self) -> None:
        state_file(self.home).unlink(missing_ok=True)
        orphaned = self._redis is not None and not self._redis.is_running
        flower = [kept for kept in self._kept if kept.spec.name == "flower"]
        workers = [kept for kept in self._kept if kept.spec.name != "flower"]
        for group in (flower, workers):
            for kept in group:
                kept.child.ask_to_stop()
            asked = time.monotonic()
            for kept in group:
                allowed = STOP_SECONDS_WITHOUT_REDIS if orphaned else kept.spec.stop_seconds
                left = asked + allowed - time.monotonic()
                kept.child.wait_or_kill(left, hurry=lambda: self._stop_requests > 1)
                self._guard.forget(kept.child.pid)
        self._kept.clear()
        if self._redis is not None:
            self._redis.stop()
            self._guard.forget(self._redis.child.pid)
            self._redis = None


class _Kept:
    """A spec and the child that runs it now."""

    def __init__(self, spec: ProcessSpec, child: Child) -> None:
        self.spec = spec
        self.child = child
        self.failures = 0
        self.restart_at: float | None = None
        self.given_up = False

    def is_ready(self, url: str) -> bool:
        return self.spec.ready is None or self.spec.ready(url, self.child.pid)
