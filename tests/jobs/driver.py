"""What clients and workers do to a mailbox, in a line each, so that a test reads as a story."""

from __future__ import annotations

import json
import time
from typing import Any

import redis

from lorry_jobs import ops, results
from lorry_jobs.errors import LorryError, OpCancelled
from lorry_jobs.mailbox import Effect, Mailbox, meta_key, queue_name
from lorry_jobs.results import Outcome

TTL = 3600


def envelope(job: str, seq: int, channel: str = "", op: str = "op") -> str:
    headers = {"id": ops.task_id(job, seq), "task": ops.task_name(op), "lorry_channel": channel}
    return json.dumps({"headers": headers, "seq": seq, "job": job})


class Driver:
    def __init__(self, client: redis.Redis) -> None:
        self.redis = client
        self.mailbox = Mailbox(client)

    # ------------------------------------------------------------------------------------------------ clients

    def create(
        self,
        job: str,
        model: str = "m",
        *,
        spec: str = "{}",
        window: int = 4,
        max_ops: int = 100,
        max_bytes: int = 10**6,
        session: str = "session",
    ) -> str:
        return self.mailbox.create(
            job, model, spec, session=session, window=window, max_ops=max_ops, max_bytes=max_bytes
        )

    def submit(
        self,
        job: str,
        seq: int,
        payload: bytes = b"payload",
        *,
        op: str = "op",
        channel: str = "",
        max_total_bytes: int = 2**40,
    ) -> str:
        return self.mailbox.submit(
            job,
            seq,
            envelope=envelope(job, seq, channel, op),
            payload=payload,
            digest=ops.digest("op", payload),
            task=ops.task_id(job, seq),
            channel=channel,
            ttl=TTL,
            max_total_bytes=max_total_bytes,
        )

    def submit_all(self, job: str, last: int, first: int = 0) -> None:
        assert [self.submit(job, seq) for seq in range(first, last + 1)] == ["ok"] * (last + 1 - first)

    def cancel(self, job: str, seq: int, *, poisons: bool = False, channel: str = "") -> bool:
        task = ops.task_id(job, seq)
        meta = results.failure(task, OpCancelled("cancelled before it started", job=job, seq=seq))
        return self.mailbox.cancel(job, seq, task=task, meta=meta, channel=channel, poisons=poisons, ttl=TTL)

    def outcome(self, task: str) -> Outcome | None:
        record = self.redis.get(meta_key(task))
        return None if record is None else results.read(record)  # type: ignore[arg-type]

    def request(
        self, task: str, model: str = "m", payload: bytes = b"prompt", *, op: str = ops.SAMPLE, channel: str = ""
    ) -> str:
        text = json.dumps({"headers": {"id": task, "task": ops.task_name(op)}, "request": task})
        digest = ops.digest(op, payload)
        return self.mailbox.request(
            task, model, envelope=text, payload=payload, digest=digest, channel=channel, max_total_bytes=2**40
        )

    # ------------------------------------------------------------------------------------------------ workers

    def hello(
        self, worker: str, model: str = "m", *, slots: int = 4, seats: int = 4, lease_seconds: float = 600
    ) -> bool:
        answer = self.mailbox.hello(
            worker, model, slots=slots, seats=seats, lease_seconds=lease_seconds, info="{}", model_info="{}"
        )
        return answer == "ok"

    def take(self, job: str, seq: int, worker: str) -> bytes | None:
        taken = self.mailbox.take(job, seq, worker)
        return None if taken is None else taken.payload

    def reap(self, limit: int = 50) -> int:
        return self.mailbox.reap(ttl=TTL, limit=limit)

    def let_lease_end(self, worker: str) -> None:
        """The worker's last renewal was too long ago. (A renewal for no time at all, instead of a long sleep.)"""
        model = self.redis.hget(f"lorry:worker:{worker}", "model").decode()
        assert self.hello(worker, model, lease_seconds=0)

    def epoch(self, job: str) -> str:
        return self.redis.hget(f"lorry:job:{job}", "epoch").decode()

    def owner(self, job: str) -> str:
        return self.mailbox.status(job).owner

    def committed(self, job: str) -> int:
        return self.mailbox.status(job).committed

    def delivered(self, worker: str) -> list[tuple[str, int]]:
        """Take all messages from a worker's queue, oldest first, as Celery does: (job, seq) of each."""
        return [(message["job"], message["seq"]) for message in self._messages(worker)]

    def delivered_requests(self, worker: str) -> list[str]:
        return [message["request"] for message in self._messages(worker)]

    def _messages(self, worker: str) -> list[dict[str, Any]]:
        taken: Any = self.redis.rpop(queue_name(worker), 10_000) or []
        return [json.loads(message) for message in taken]

    def commit(
        self,
        job: str,
        seq: int,
        worker: str,
        *,
        epoch: str | None = None,
        info: dict[str, Any] | None = None,
        error: LorryError | None = None,
        output: bytes = b"",
        channel: str = "",
        incomplete: str = "-",
        effect: Effect = "1",
    ) -> str:
        task = ops.task_id(job, seq)
        beside = b""
        if error is not None:
            record = results.failure(task, error)
        else:
            record, beside = results.success(task, info or {"seq": seq}, output)
        pipe = self.redis.pipeline(transaction=False)
        self.mailbox.commit(
            job,
            seq,
            worker,
            self.epoch(job) if epoch is None else epoch,
            task=task,
            meta=record,
            output=beside,
            ttl=TTL,
            channel=channel,
            incomplete=incomplete,
            effect=effect,
            entry='{"status":"ok"}',
            pipe=pipe,
        )
        return pipe.execute()[0].decode()

    def finish(self, task: str, worker: str, *, channel: str = "") -> str:
        record, beside = results.success(task, {"worker": worker})
        pipe = self.redis.pipeline(transaction=False)
        self.mailbox.finish_request(task, worker, meta=record, output=beside, ttl=TTL, channel=channel, pipe=pipe)
        return pipe.execute()[0].decode()

    def fail(self, job: str, worker: str, error: LorryError) -> bool:
        return self.mailbox.fail(job, worker, self.epoch(job), template=results.failure("", error), ttl=TTL)

    def snapshot(self, job: str, worker: str, seq: int, ref: str, *, epoch: str | None = None) -> str:
        return self.mailbox.snapshot(job, worker, self.epoch(job) if epoch is None else epoch, seq, ref)[0]

    def yield_job(self, job: str, worker: str) -> bool:
        return self.mailbox.yield_job(job, worker, self.epoch(job))

    # -------------------------------------------------------------------------------------------------- sights

    def free_slots(self, worker: str, model: str = "m") -> int | None:
        """None: the worker takes no new jobs."""
        score: Any = self.redis.zscore(f"lorry:workers:slots:{model}", worker)
        return None if score is None else int(score)

    def free_seats(self, worker: str, model: str = "m") -> int | None:
        score: Any = self.redis.zscore(f"lorry:workers:seats:{model}", worker)
        return None if score is None else int(score)

    def queued_bytes(self, job: str) -> int:
        return self.mailbox.status(job).queued_bytes

    def all_keys(self) -> set[str]:
        """All but what belongs to no single job, request or worker: one counter, and two lists that are reaped."""
        shared = {"lorry:bytes", "lorry:closed", "lorry:sessions"}
        return {key.decode() for key in self.redis.keys("*")} - shared


def next_millisecond() -> None:
    """Who waits is ordered by Redis' clock in milliseconds; calls that must differ in it are kept apart."""
    time.sleep(0.003)
