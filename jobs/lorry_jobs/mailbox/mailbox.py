"""Typed calls of `mailbox.lua`, one method per function there. Each is atomic and safe to repeat."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redis import Redis
from redis.client import Pipeline

SOURCE = (Path(__file__).parent / "mailbox.lua").read_text()

SubmitAnswer = Literal["ok", "dup", "conflict", "full", "closed", "failed", "nojob"]
CommitAnswer = Literal["ok", "dup", "stale", "gap"]
Effect = Literal["1", "0", "drop"]
"""What a replay does with a committed op: run it, skip it, or drop the accumulated gradients there."""

SKIP, DROP_GRADIENTS = b"-", b"!"
"""What stands in the journal instead of an envelope for the last two."""


@dataclass(frozen=True)
class Placement:
    """A job as its owner finds it: which ops are committed, and from where to rebuild the state before them."""

    job: str
    model: str
    spec: str
    epoch: str
    committed: int
    snapshot: int
    snapshot_ref: str
    incomplete: int | None


@dataclass(frozen=True)
class JobStatus:
    """Why a job's next op has not come back yet. `cost_ms` is the mean time of its ops."""

    state: str
    model: str = ""
    owner: str = ""
    owner_alive: bool = False
    committed: int = -1
    released: int = -1
    cost_ms: float = 0.0
    queued_bytes: int = 0
    workers: int = 0
    ahead_unplaced: int = -1


@dataclass(frozen=True)
class RequestStatus:
    state: str
    model: str = ""
    owner: str = ""
    workers: int = 0
    ahead: int = -1


class Mailbox:
    """`redis` must not decode responses: payloads and outputs are bytes."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self._script = redis.register_script(SOURCE)

    def _call(self, function: str, *args: Any, pipe: Pipeline | None = None) -> Any:
        return self._script(keys=["lorry:jobs"], args=[function, *args], client=pipe)

    def _text(self, function: str, *args: Any) -> Any:
        answer = self._call(function, *args)
        return answer.decode() if isinstance(answer, bytes) else answer

    # ------------------------------------------------------------------------------------------------ clients

    def create(self, job: str, model: str, spec: str, *, window: int, max_ops: int, max_bytes: int) -> str:
        return str(self._text("create", job, model, spec, window, max_ops, max_bytes))

    def submit(
        self,
        job: str,
        seq: int,
        *,
        envelope: bytes | str,
        payload: bytes,
        digest: bytes,
        task: str,
        channel: str,
        ttl: int,
    ) -> SubmitAnswer:
        answer: SubmitAnswer = self._text("submit", job, seq, envelope, payload, digest, task, channel, ttl)
        return answer

    def cancel(self, job: str, seq: int, *, task: str, meta: str, channel: str, poisons: bool, ttl: int) -> bool:
        """True if the op had not been handed to a worker; it is then resolved in its turn, without running."""
        answer = self._text("cancel", job, seq, task, meta, channel, "1" if poisons else "0", ttl)
        return bool(answer == "cancelled")

    def status(self, job: str) -> JobStatus:
        return JobStatus(**json.loads(self._text("status", job)))

    def request(
        self, task: str, model: str, *, envelope: bytes | str, payload: bytes, digest: bytes, channel: str
    ) -> str:
        return str(self._text("request", task, model, envelope, payload, digest, channel))

    def request_status(self, task: str) -> RequestStatus:
        return RequestStatus(**json.loads(self._text("request_status", task)))

    def cancel_request(self, task: str, *, meta: str, channel: str, ttl: int) -> bool:
        return bool(self._text("cancel_request", task, meta, channel, ttl) == "cancelled")

    def close(self, job: str) -> str:
        return str(self._text("close", job))

    # ------------------------------------------------------------------------------------------------ workers

    def hello(
        self,
        worker: str,
        model: str,
        *,
        slots: int,
        seats: int,
        lease_seconds: float,
        info: str,
        model_info: str,
    ) -> bool:
        """Register or renew; False if this incarnation was fenced and must not go on."""
        answer = self._text("hello", worker, model, slots, seats, int(lease_seconds * 1000), info, model_info)
        return bool(answer == "ok")

    def adopt(self, job: str, worker: str) -> Placement | None:
        """The job's record if `worker` owns it now."""
        flat = self._call("adopt", job, worker)
        if not flat:
            return None
        record = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
        return Placement(
            job=job,
            model=record["model"],
            spec=record["spec"],
            epoch=record["epoch"],
            committed=int(record["committed"]),
            snapshot=int(record["snapshot"]),
            snapshot_ref=record["snapshot_ref"],
            incomplete=int(record["incomplete"]) if record["incomplete"] else None,
        )

    def journal(self, job: str, first: int, last: int) -> list[tuple[int, bytes | None, bytes | None]]:
        """(seq, envelope, payload) of the committed ops first..last; the envelope may be SKIP or DROP_GRADIENTS."""
        if first > last:
            return []
        seqs = [str(seq) for seq in range(first, last + 1)]
        pipe = self.redis.pipeline(transaction=False)
        pipe.hmget(f"lorry:job:{job}:ops", seqs)
        pipe.hmget(f"lorry:job:{job}:payloads", seqs)
        envelopes, payloads = pipe.execute()
        return list(zip(range(first, last + 1), envelopes, payloads, strict=True))

    def take(self, job: str, seq: int, worker: str) -> bytes | None:
        """The request's bytes, unless the job has moved on or away."""
        payload: bytes | None = self._call("take", job, seq, worker)
        return payload

    def commit(
        self,
        job: str,
        seq: int,
        worker: str,
        epoch: str,
        *,
        task: str,
        meta: str,
        output: bytes,
        ttl: int,
        channel: str,
        incomplete: str,
        effect: Effect,
        cost_ms: float,
        pipe: Pipeline,
    ) -> None:
        """Queue a commit on `pipe`; its answer (ok, dup, stale or gap) comes from `pipe.execute()`."""
        self._call(
            "commit",
            job,
            seq,
            worker,
            epoch,
            task,
            meta,
            output,
            ttl,
            channel,
            incomplete,
            effect,
            int(cost_ms),
            pipe=pipe,
        )

    def finish_request(
        self,
        task: str,
        worker: str,
        *,
        meta: str,
        output: bytes,
        ttl: int,
        channel: str,
        pipe: Pipeline,
    ) -> None:
        self._call("finish_request", task, worker, meta, output, ttl, channel, pipe=pipe)

    def take_request(self, task: str, worker: str) -> bytes | None:
        payload: bytes | None = self._call("take_request", task, worker)
        return payload

    def snapshot(self, job: str, worker: str, epoch: str, seq: int, ref: str) -> str:
        return str(self._text("snapshot", job, worker, epoch, seq, ref))

    def resend(self, job: str, worker: str, epoch: str) -> str:
        return str(self._text("resend", job, worker, epoch))

    def resend_request(self, task: str, worker: str) -> str:
        return str(self._text("resend_request", task, worker))

    def yield_job(self, job: str, worker: str, epoch: str) -> bool:
        return bool(self._text("yield", job, worker, epoch) == "ok")

    def fail(self, job: str, worker: str, epoch: str, *, template: str, ttl: int) -> bool:
        return bool(self._text("fail", job, worker, epoch, template, ttl) == "ok")

    def reap(self, limit: int = 50) -> int:
        """Move the jobs of workers whose lease ran out; anyone may call it."""
        return int(self._call("reap", limit))

    def close_doors(self, worker: str) -> None:
        self._call("close_doors", worker)

    def goodbye(self, worker: str, limit: int = 1000) -> int:
        return int(self._call("goodbye", worker, limit))

    def jobs_of(self, worker: str) -> set[str]:
        return _texts(self.redis.smembers(f"lorry:worker:{worker}:jobs"))

    def requests_of(self, worker: str) -> set[str]:
        return _texts(self.redis.smembers(f"lorry:worker:{worker}:requests"))

    def unplaced(self, model: str) -> int:
        return int(self.redis.zcard(f"lorry:unplaced:{model}"))

    # ------------------------------------------------------------------------------------------------- models

    def models(self) -> dict[str, str]:
        """Every base model that a worker ever served here -> its `ModelInfo` as JSON."""
        found: dict[bytes, bytes] = self.redis.hgetall("lorry:models")  # type: ignore[assignment]
        return {name.decode(): info.decode() for name, info in found.items()}

    def live_workers(self, model: str | None = None) -> list[str]:
        """Workers whose lease has not ended, for one base model or for all."""
        seconds, micros = self.redis.time()
        now = seconds * 1000 + micros // 1000
        alive = sorted(_texts(self.redis.zrangebyscore("lorry:workers:alive", f"({now}", "+inf")))
        if model is None:
            return alive
        pipe = self.redis.pipeline(transaction=False)
        for worker in alive:
            pipe.hget(f"lorry:worker:{worker}", "model")
        return [w for w, m in zip(alive, pipe.execute(), strict=True) if m and m.decode() == model]

    def put_checkpoint(self, path: str, info: str) -> None:
        """Index a checkpoint: what it is of, so that a client can use it without seeing the store."""
        self.redis.hset("lorry:checkpoints", path, info)

    def get_checkpoint(self, path: str) -> str | None:
        info: Any = self.redis.hget("lorry:checkpoints", path)
        return info if info is None else info.decode()

    def put_tokenizer(self, sha256: str, archive: bytes) -> None:
        self.redis.set(f"lorry:tokenizer:{sha256}", archive)

    def get_tokenizer(self, sha256: str) -> bytes | None:
        archive: Any = self.redis.get(f"lorry:tokenizer:{sha256}")
        return archive if archive is None else bytes(archive)


def _texts(answer: Any) -> set[str]:
    return {item.decode() for item in answer}
