"""Typed calls of `mailbox.lua`, one method per function there. Each is atomic and safe to repeat."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from redis import Redis
from redis.client import Pipeline

from .names import queue_name

SOURCE = (Path(__file__).parent / "mailbox.lua").read_text()

SubmitAnswer = Literal["ok", "dup", "conflict", "full", "closed", "failed", "nojob"]
HelloAnswer = Literal["ok", "drain", "dead"]
DIGEST_BYTES = 16
"""At the front of every line of the ledger; see `ops.digest`."""
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
    previous_snapshot: int
    previous_ref: str
    """The snapshot before; the journal goes back to it. "" is no snapshot: the journal goes back to op 0."""
    incomplete: int | None
    max_bytes: int
    suspect: int | None = None
    """A worker died with the ops up to this one: each is to be run alone, and announced with `trying`."""


@dataclass(frozen=True)
class Taken:
    """An op's request, and how far its job is: ops that were cancelled are committed without a delivery."""

    payload: bytes
    committed: int
    incomplete: int | None


@dataclass(frozen=True)
class JobStatus:
    """Why a job's next op has not come back yet. `cost_ms` is the mean time of an op at the head of its chain."""

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
        if pipe is not None:
            # Not through the script object: for every pipeline it would ask first whether the server knows the script.
            return pipe.evalsha(self._script.sha, 1, "lorry:jobs", function, *args)
        return self._script(keys=["lorry:jobs"], args=[function, *args])

    def load_script(self) -> None:
        """After a NoScriptError from a pipeline: the server was restarted. (Single calls do this by themselves.)"""
        self.redis.script_load(SOURCE)

    def _text(self, function: str, *args: Any) -> Any:
        answer = self._call(function, *args)
        return answer.decode() if isinstance(answer, bytes) else answer

    # ------------------------------------------------------------------------------------------------ clients

    def create(
        self, job: str, model: str, spec: str, *, session: str, window: int, max_ops: int, max_bytes: int
    ) -> str:
        return str(self._text("create", job, model, spec, window, max_ops, max_bytes, session))

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
        max_total_bytes: int,
    ) -> SubmitAnswer:
        answer: SubmitAnswer = self._text(
            "submit", job, seq, envelope, payload, digest, task, channel, ttl, max_total_bytes
        )
        return answer

    def cancel(self, job: str, seq: int, *, task: str, meta: str, channel: str, poisons: bool, ttl: int) -> bool:
        """True if the op had not been handed to a worker; it is then resolved in its turn, without running."""
        answer = self._text("cancel", job, seq, task, meta, channel, "1" if poisons else "0", ttl)
        return bool(answer == "cancelled")

    def status(self, job: str) -> JobStatus:
        return JobStatus(**json.loads(self._text("status", job)))

    def request(
        self,
        task: str,
        model: str,
        *,
        envelope: bytes | str,
        payload: bytes,
        digest: bytes,
        channel: str,
        max_total_bytes: int,
    ) -> str:
        return str(self._text("request", task, model, envelope, payload, digest, channel, max_total_bytes))

    def request_status(self, task: str) -> RequestStatus:
        return RequestStatus(**json.loads(self._text("request_status", task)))

    def cancel_request(self, task: str, *, meta: str, channel: str, ttl: int) -> bool:
        return bool(self._text("cancel_request", task, meta, channel, ttl) == "cancelled")

    def knows(self, job: str, seqs: list[int]) -> list[bool]:
        """Which of these ops the mailbox has ever accepted."""
        lines: Any = self.redis.hmget(f"lorry:job:{job}:ledger", [str(seq) for seq in seqs])
        return [line is not None for line in lines]

    def knows_request(self, task: str) -> bool:
        return bool(self.redis.exists(f"lorry:request:{task}"))

    def close(self, job: str) -> str:
        return str(self._text("close", job))

    def heartbeat(self, session: str) -> None:
        self._call("heartbeat", session)

    def end_session(self, session: str) -> None:
        self._call("end_session", session)

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
    ) -> HelloAnswer:
        """Register or renew. `drain`: an operator wants it to leave. `dead`: it was fenced and must not go on."""
        answer: HelloAnswer = self._text(
            "hello", worker, model, slots, seats, int(lease_seconds * 1000), info, model_info
        )
        return answer

    def absolve(self, worker: str, held: Iterable[str]) -> None:
        """`worker` was declared dead and lives: the jobs and requests that it held have not killed it."""
        self._call("absolve", worker, *held)

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
            previous_snapshot=int(record["previous_snapshot"]),
            previous_ref=record["previous_ref"],
            incomplete=_number(record["incomplete"]),
            max_bytes=int(record["max_bytes"]),
            suspect=_number(record["suspect"]),
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

    def take(self, job: str, seq: int, worker: str) -> Taken | None:
        """The request, unless the job has moved on or away."""
        found = self._call("take", job, seq, worker)
        return Taken(found[0], int(found[1]), _number(found[2].decode())) if found else None

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
        entry: str,
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
            entry,
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

    def take_request(self, task: str, worker: str) -> tuple[bytes, int] | None:
        """-> (the request's bytes, how many workers died with it), unless another worker has it now."""
        found = self._call("take_request", task, worker)
        return (found[0], int(found[1])) if found else None

    def trying(self, worker: str, what: str) -> None:
        """Announce a suspect (job or request) before it is run; "" when it is done."""
        self._call("trying", worker, what)

    def snapshot(self, job: str, worker: str, epoch: str, seq: int, ref: str) -> tuple[str, str, str]:
        """-> (ok | stale | gap | old, the ref that is not needed any more, the ref that is kept beside `ref`)."""
        answer = [part.decode() for part in self._call("snapshot", job, worker, epoch, seq, ref)]
        return (answer[0], answer[1], answer[2]) if answer[0] == "ok" else (answer[0], "", "")

    def distrust(self, job: str, worker: str, epoch: str, ref: str) -> str:
        """The last snapshot cannot be read: let the one before be the last."""
        return str(self._text("distrust", job, worker, epoch, ref))

    def resend(self, worker: str, jobs: Sequence[tuple[str, str]]) -> set[str]:
        """Deliver again what these jobs (each with its epoch) were handed and have not committed.

        -> those of them that are another worker's now
        """
        stale: set[str] = set()
        for start in range(0, len(jobs), 200):  # no call to Redis may take long
            stale |= _texts(self._call("resend", worker, *itertools.chain(*jobs[start : start + 200])))
        return stale

    def resend_request(self, task: str, worker: str) -> str:
        return str(self._text("resend_request", task, worker))

    def yield_job(self, job: str, worker: str, epoch: str) -> bool:
        return bool(self._text("yield", job, worker, epoch) == "ok")

    def fail(self, job: str, worker: str, epoch: str, *, template: str, ttl: int) -> bool:
        return bool(self._text("fail", job, worker, epoch, template, ttl) == "ok")

    def reap(self, *, ttl: int, limit: int = 50) -> int:
        """Move the jobs of workers whose lease ran out; anyone may call it."""
        return int(self._call("reap", limit, ttl))

    def reap_sessions(self, timeout_seconds: float, *, patience_seconds: float, limit: int = 20) -> list[str]:
        """Drop the jobs of clients that are gone; -> the jobs that went. Anyone may call it.

        A job whose ops wait for a worker of its model is kept for `patience_seconds`.
        """
        milliseconds = int(timeout_seconds * 1000), int(patience_seconds * 1000)
        return sorted(_texts(self._call("reap_sessions", milliseconds[0], limit, milliseconds[1])))

    def closed_jobs(self, age_seconds: float) -> list[str]:
        """Jobs that are gone here for so long, whose snapshots are to be deleted; then `forget_closed`."""
        return sorted(_texts(self._call("closed_jobs", int(age_seconds * 1000))))

    def forget_closed(self, jobs: list[str]) -> None:
        self._call("forget_closed", *jobs)

    def drain(self, worker: str) -> bool:
        """Ask a worker to hand its jobs over and leave. False if there is no such worker."""
        return bool(self._text("drain", worker) == "ok")

    def close_doors(self, worker: str) -> None:
        self._call("close_doors", worker)

    def goodbye(self, worker: str, limit: int = 1000) -> int:
        return int(self._call("goodbye", worker, limit))

    def jobs_of(self, worker: str) -> set[str]:
        return _texts(self.redis.smembers(f"lorry:worker:{worker}:jobs"))

    def requests_of(self, worker: str) -> set[str]:
        return _texts(self.redis.smembers(f"lorry:worker:{worker}:requests"))

    def total_bytes(self) -> int:
        """Request bytes of all jobs and sampling requests together."""
        found: Any = self.redis.get("lorry:bytes")
        return int(found or 0)

    def ask_total_bytes(self, pipe: Pipeline) -> None:
        """The same as part of a pipeline, whose answer it is: bytes, or None for 0."""
        pipe.get("lorry:bytes")

    def unplaced(self, model: str) -> int:
        return int(self.redis.zcard(f"lorry:unplaced:{model}"))

    # ------------------------------------------------------------------------------------------------ looking

    def worker_record(self, worker: str) -> dict[str, str]:
        return self._hash(f"lorry:worker:{worker}")

    def free_places(self, worker: str, model: str) -> tuple[int, int]:
        """-> (free job slots, free seats for requests); 0 where it takes no more."""
        slots: Any = self.redis.zscore(f"lorry:workers:slots:{model}", worker)
        seats: Any = self.redis.zscore(f"lorry:workers:seats:{model}", worker)
        return int(slots or 0), int(seats or 0)

    def queue_length(self, worker: str) -> int:
        return int(self.redis.llen(queue_name(worker)))

    def lease_seconds_left(self, worker: str) -> float:
        end: Any = self.redis.zscore("lorry:workers:alive", worker)
        seconds, micros = self.redis.time()
        return float(end or 0) / 1000 - seconds - micros / 1e6

    def jobs(self, limit: int = 100) -> list[str]:
        """The newest jobs first."""
        return [job.decode() for job in cast("list[bytes]", self.redis.zrevrange("lorry:jobs", 0, limit - 1))]

    def job_record(self, job: str) -> dict[str, str]:
        return self._hash(f"lorry:job:{job}")

    def ledger(self, job: str, seqs: list[int] | None = None) -> dict[int, dict[str, Any]]:
        """seq -> what became of the op: status, op, worker, epoch, attempt, cycle, and times in ms since 1970."""
        key = f"lorry:job:{job}:ledger"
        if seqs is None:
            found = cast("dict[bytes, bytes]", self.redis.hgetall(key))
            lines: dict[int, bytes | None] = {int(seq): line for seq, line in found.items()}
        else:
            values = cast("list[bytes | None]", self.redis.hmget(key, [str(seq) for seq in seqs]))
            lines = dict(zip(seqs, values, strict=True))
        return {seq: json.loads(line[DIGEST_BYTES:]) for seq, line in sorted(lines.items()) if line is not None}

    def _hash(self, key: str) -> dict[str, str]:
        found = cast("dict[bytes, bytes]", self.redis.hgetall(key))
        return {field.decode(): value.decode() for field, value in found.items()}

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

    def put_tokenizer(self, sha256: str, archive: bytes) -> None:
        self.redis.set(f"lorry:tokenizer:{sha256}", archive)

    def get_tokenizer(self, sha256: str) -> bytes | None:
        archive: Any = self.redis.get(f"lorry:tokenizer:{sha256}")
        return archive if archive is None else bytes(archive)


def _number(text: str) -> int | None:
    return int(text) if text else None


def _texts(answer: Any) -> set[str]:
    return {item.decode() for item in answer}
