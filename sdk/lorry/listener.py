"""The listener: one thread and one subscription that resolve every future of this process.

Results are pushed on the process's own channel. A push can be lost while the connection is cut, so after every
(re)subscription, and now and then, the records of all open futures are read: subscribe first, then read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from lorry_jobs import results
from lorry_jobs.errors import ServiceError
from lorry_jobs.mailbox import meta_key, output_key
from lorry_jobs.results import Outcome

from .futures import APIFuture
from .link import Link

log = logging.getLogger("lorry")

TICK_SECONDS = 0.5
SWEEP_SECONDS = 15.0
HEARTBEAT_SECONDS = 10.0
RECONNECT_SECONDS = (0.05, 1.0)


class Listener:
    """`explain(futures)` hears of futures that somebody has waited for; `reconnected()` is called when the
    subscription stands again after it was lost, `heartbeat()` every ten seconds."""

    def __init__(
        self,
        redis: Redis,
        channel: str,
        link: Link,
        *,
        explain: Callable[[list[APIFuture[Any]]], None],
        reconnected: Callable[[], None],
        heartbeat: Callable[[], None],
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._heartbeat_seconds = min(HEARTBEAT_SECONDS, heartbeat_seconds)
        self._redis, self._channel, self._link = redis, channel, link
        self._explain, self._reconnected, self._heartbeat = explain, reconnected, heartbeat
        self._connections = 0
        self._lock = threading.Lock()
        self._open: dict[str, set[APIFuture[Any]]] = {}
        self._delay = RECONNECT_SECONDS[0]
        self._subscribed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorry-listener", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_subscribed(self, timeout: float) -> bool:
        return self._subscribed.wait(timeout)

    def watch(self, future: APIFuture[Any]) -> None:
        with self._lock:
            self._open.setdefault(future.task_id, set()).add(future)

    def forget(self, future: APIFuture[Any]) -> None:
        """Others may watch the same task; they go on."""
        with self._lock:
            watchers = self._open.get(future.task_id, set())
            watchers.discard(future)
            if not watchers:
                self._open.pop(future.task_id, None)

    def resolve(self, outcome: Outcome) -> None:
        """Give an outcome to everyone who watches this task."""
        with self._lock:
            futures = self._open.pop(outcome.task, set())
        for future in futures:
            future._resolve(outcome)

    def outstanding(self) -> list[APIFuture[Any]]:
        with self._lock:
            return [future for futures in self._open.values() for future in futures]

    # ------------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            try:
                self._listen()
            except (RedisError, OSError) as error:
                self._link.lost(error)
                self._subscribed.clear()
                self._tell_waiters()
                time.sleep(self._delay)
                self._delay = min(self._delay * 2, RECONNECT_SECONDS[1])

    def _listen(self) -> None:
        with self._redis.pubsub() as channel:  # type: ignore[no-untyped-call]
            channel.subscribe(self._channel)
            swept = ticked = beat = time.monotonic()
            while True:
                message = channel.get_message(timeout=TICK_SECONDS)
                now = time.monotonic()
                if message is not None and message["type"] == "subscribe":
                    self._subscribed.set()
                    self._delay = RECONNECT_SECONDS[0]
                    self._link.works()
                    self._sweep()
                    swept = now
                    self._connections += 1
                    if self._connections > 1:
                        self._reconnected()
                elif message is not None and message["type"] == "message":
                    self._take([message["data"]])
                if now - ticked > TICK_SECONDS:
                    ticked = now
                    self._tell_waiters()
                if now - beat > self._heartbeat_seconds:
                    beat = now
                    self._heartbeat()
                if now - swept > SWEEP_SECONDS:
                    swept = now
                    self._sweep()

    def _sweep(self) -> None:
        with self._lock:
            tasks = list(self._open)
        for start in range(0, len(tasks), 500):
            records: list[bytes | None] = self._redis.mget(  # type: ignore[assignment]
                [meta_key(task) for task in tasks[start : start + 500]]
            )
            self._take(record for record in records if record is not None)

    def _take(self, records: Iterable[bytes]) -> None:
        for record in records:
            outcome = results.read(record)
            if outcome is None:
                continue
            if outcome.output_is_elsewhere:
                outcome = self._fetch(outcome)
            self.resolve(outcome)

    def _fetch(self, outcome: Outcome) -> Outcome:
        with self._lock:
            if outcome.task not in self._open:
                return outcome  # somebody else's copy of a result that we have
        output: Any = self._redis.get(output_key(outcome.task))
        if output is None:
            gone = ServiceError(f"the output of {outcome.task} expired on the server before it was read")
            return Outcome(outcome.task, gone, {}, None, False)
        return Outcome(outcome.task, None, outcome.info, output, False)

    def _tell_waiters(self) -> None:
        waiting = [future for future in self.outstanding() if future._waited_seconds is not None]
        if not waiting:
            return
        error = self._link.error()
        if error is not None:
            for future in waiting:
                future._interrupt(error)
            return
        self._explain(waiting)
