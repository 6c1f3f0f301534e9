"""What all clients of one process share, per server: connections, outbox, listener."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from lorry_jobs import ops, results, transport
from lorry_jobs.celery_app import QUEUE, create_app
from lorry_jobs.errors import ForkedClient, LorryError, OpCancelled
from lorry_jobs.mailbox import Mailbox, result_channel
from lorry_jobs.redis_client import connect
from lorry_jobs.results import Outcome

from .explain import Notices, explain_job, explain_request
from .futures import APIFuture
from .link import Link
from .listener import Listener
from .outbox import Letter, Outbox
from .settings import ClientSettings

log = logging.getLogger("lorry")
T = TypeVar("T")

_POISONING = frozenset({ops.FORWARD_BACKWARD})
"""Cancelling one of these leaves the accumulation incomplete."""

_processes: dict[str, ClientProcess] = {}
_lock = threading.Lock()


def get_process(settings: ClientSettings) -> ClientProcess:
    """The one ClientProcess of this process for this server. Raises ServiceUnavailable if it does not answer."""
    with _lock:
        process = _processes.get(settings.redis_url)
        if process is None or process.pid != os.getpid():
            process = ClientProcess(settings)
            _processes[settings.redis_url] = process
        return process


class ClientProcess:
    def __init__(self, settings: ClientSettings) -> None:
        self.settings, self.pid = settings, os.getpid()
        self.client_id = secrets.token_hex(6)
        self.channel = result_channel(self.client_id)
        self.redis = connect(settings, name=f"lorry-client-{self.client_id}")
        self.mailbox = Mailbox(self.redis)
        self.app = create_app(settings, client_name=f"lorry-client-{self.client_id}")
        self.link = Link(settings.redis_url, settings.connect_timeout_seconds)
        try:
            _ping(settings)
        except (RedisError, OSError) as error:
            raise self.link.unreachable(error) from None
        self._notices = Notices()
        self._outbox = Outbox(self.link, settings.outbox_limit)
        self._letters: dict[str, tuple[str, Letter, APIFuture[Any]]] = {}
        self._sessions: set[str] = set()
        self._listener = Listener(
            self.redis,
            self.channel,
            self.link,
            explain=self._explain_waits,
            reconnected=self._post_again,
            heartbeat=self._heartbeat,
            heartbeat_seconds=settings.session_seconds / 4,
        )
        self._outbox.start()
        self._listener.start()
        self._listener.wait_subscribed(settings.connect_timeout_seconds)
        atexit.register(self._at_exit)

    # ---------------------------------------------------------------------------------------------- submitting

    def submit_op(
        self,
        job: str,
        seq: int,
        op: str,
        payload: bytes,
        decode: Callable[[Outcome], T],
        *,
        before: Callable[[], None] | None = None,
    ) -> APIFuture[T]:
        """Post one op of a job's chain. The caller keeps the order: seqs of a job are posted one after another."""
        task = ops.task_id(job, seq)
        headers = {transport.JOB: job, transport.SEQ: seq}
        args = (job, seq)
        return self._post(job, task, op, args, headers, payload, decode, job=job, seq=seq, before=before)

    def submit_request(self, model: str, op: str, payload: bytes, decode: Callable[[Outcome], T]) -> APIFuture[T]:
        """Post one unordered request."""
        task = f"{op}-{self.client_id}-{secrets.token_hex(6)}"
        return self._post(f"requests for {model}", task, op, (model,), {transport.MODEL: model}, payload, decode)

    def _post(
        self,
        lane: str,
        task: str,
        op: str,
        args: tuple[Any, ...],
        headers: dict[str, Any],
        payload: bytes,
        decode: Callable[[Outcome], T],
        *,
        job: str | None = None,
        seq: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> APIFuture[T]:
        self.check_fork()
        future: APIFuture[T] = APIFuture(self, task, op, decode, job=job, seq=seq)
        self._listener.watch(future)
        headers = {
            **headers,
            transport.CHANNEL: self.channel,
            transport.PAYLOAD: payload,
            transport.DIGEST: ops.digest(op, payload),
            transport.TTL: self.settings.result_ttl_seconds,
            transport.MAX_TOTAL: self.settings.max_total_bytes,
        }

        def send() -> None:
            if before is not None:
                before()
            self.app.send_task(
                ops.task_name(op),
                args=args,
                task_id=task,
                queue=QUEUE,
                headers=headers,
                argsrepr=repr(args),
                declare=(),  # the mailbox is the queue: there is nothing to declare
                ignore_result=True,
            )

        def refuse(error: LorryError) -> None:
            self._listener.forget(future)
            future._resolve(Outcome(task, error, {}, None, False))

        letter = Letter(send, refuse)
        self._letters[task] = (lane, letter, future)
        future._when_done(lambda: self._letters.pop(task, None))
        self._outbox.post(lane, letter)
        return future

    def watch(self, future: APIFuture[Any]) -> None:
        """Resolve `future`, too, when the result of its task comes."""
        self._listener.watch(future)

    def resolve(self, outcome: Outcome) -> None:
        """Give this outcome to whoever waits for its task: for what was found out here and not by a worker."""
        self._listener.resolve(outcome)

    def _post_again(self) -> None:
        """After a reconnect: a server that restarted may have lost the last ops that it accepted (see the
        append-only file's `everysec`). Those it does not know are sent again; that is safe, and in their order."""
        by_job: dict[str, list[tuple[str, Letter, APIFuture[Any]]]] = {}
        for lane, letter, future in list(self._letters.values()):
            if future.job is not None:
                by_job.setdefault(future.job, []).append((lane, letter, future))
            elif not self.mailbox.knows_request(future.task_id):
                self._outbox.post(lane, letter)
        for job, entries in by_job.items():
            entries.sort(key=lambda entry: entry[2].seq or 0)
            known = self.mailbox.knows(job, [future.seq or 0 for _, _, future in entries])
            for (lane, letter, _), accepted in zip(entries, known, strict=True):
                if not accepted:
                    self._outbox.post(lane, letter)

    # ------------------------------------------------------------------------------------------------- sessions

    def open_session(self, session: str) -> None:
        self._sessions.add(session)

    def end_session(self, session: str) -> None:
        self._sessions.discard(session)
        self._outbox.flush(self.settings.exit_flush_seconds)
        self.call(lambda: self.mailbox.end_session(session))

    def _heartbeat(self) -> None:
        for session in list(self._sessions):
            self.mailbox.heartbeat(session)

    async def admission(self) -> None:
        """Wait while the outbox is full. Never depends on anyone awaiting a result."""
        self.check_fork()
        while self._outbox.is_full:
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------------------------------------------- asking

    def call(self, function: Callable[[], T]) -> T:
        """A direct question to the server, with its connection errors turned into ServiceUnavailable."""
        self.check_fork()
        try:
            return function()
        except (RedisError, OSError) as error:
            raise self.link.unreachable(error) from None

    def cancel(self, future: APIFuture[Any]) -> bool:
        error = OpCancelled("cancelled before it started", job=future.job, op=future.op, seq=future.seq)
        record = results.failure(future.task_id, error)
        ttl = self.settings.result_ttl_seconds
        self._outbox.flush(self.settings.connect_timeout_seconds)
        if future.job is None or future.seq is None:
            return self.call(
                lambda: self.mailbox.cancel_request(future.task_id, meta=record, channel=self.channel, ttl=ttl)
            )
        job, seq = future.job, future.seq
        return self.call(
            lambda: self.mailbox.cancel(
                job,
                seq,
                task=future.task_id,
                meta=record,
                channel=self.channel,
                poisons=future.op in _POISONING,
                ttl=ttl,
            )
        )

    def explain(self, future: APIFuture[Any]) -> str:
        """Why `future` has no result yet, in words."""
        error = self.link.error()
        if error is not None:
            return str(error)
        try:
            if future.job is None or future.seq is None:
                return explain_request(self.mailbox.request_status(future.task_id))
            return explain_job(self.mailbox.status(future.job), future.seq)
        except (RedisError, OSError) as problem:
            return str(self.link.unreachable(problem))

    def _explain_waits(self, waiting: list[APIFuture[Any]]) -> None:
        late = [f for f in waiting if (f._waited_seconds or 0.0) > self.settings.notice_after_seconds]
        self._notices.say(late, self.explain)

    def check_fork(self) -> None:
        if os.getpid() != self.pid:
            raise ForkedClient(
                f"this client was made in process {self.pid} and is used in its fork {os.getpid()}, where its "
                "connections and threads do not exist; create a new ServiceClient in the new process"
            )

    def _at_exit(self) -> None:
        if os.getpid() != self.pid:
            return
        started = time.monotonic()
        left = self._outbox.flush(self.settings.exit_flush_seconds)
        if left:
            log.error(
                "%d submitted ops did not reach the server within %.0f s and are lost", left, time.monotonic() - started
            )


def _ping(settings: ClientSettings) -> None:
    """One try on a connection of its own: a server that takes connections and never answers is away, too."""
    patience = settings.connect_timeout_seconds
    with Redis.from_url(
        settings.redis_url, socket_connect_timeout=patience, socket_timeout=patience, retry=Retry(NoBackoff(), 0)
    ) as redis:
        redis.ping()
