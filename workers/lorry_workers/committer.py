"""Group commit: everything that a cycle finished goes to Redis in one pipeline.

One thread and one queue, so the commits of a job keep their order. A commit is safe to repeat (its second answer
is `dup`), so connection errors are simply tried again.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import NoScriptError, RedisError

from lorry_jobs.checkpoint_index import CheckpointIndex
from lorry_jobs.errors import LorryError, StaleOwner
from lorry_jobs.mailbox import Effect, Mailbox
from lorry_jobs.types import CheckpointMetadata

from .lanes import Delivery, Lane, Lanes, Outcome
from .vital_thread import VitalThread

log = logging.getLogger(__name__)

KEEP, CLEAR = "-", ""


@dataclass
class Commit:
    """An op that ran, ready to be recorded. `incomplete`: KEEP, CLEAR, or the seq whose gradients are missing.

    `effect`: "1" the journal keeps the op, "0" a replay skips it, "drop" a replay drops the gradients here.
    """

    lane: Lane | None  # None: a sampling request
    delivery: Delivery
    record: str
    output: bytes
    outcome: Outcome
    incomplete: str = KEEP
    effect: Effect = "1"
    entry: str = "{}"
    checkpoint: CheckpointMetadata | None = None
    """That this op saved, for the index."""
    ttl: int | None = None
    """How long the result is kept, where it is not for the usual time."""


class Committer:
    def __init__(
        self, mailbox: Mailbox, worker: str, lanes: Lanes, ttl: int, *, on_total_bytes: Callable[[int], None]
    ) -> None:
        self._mailbox, self._worker, self._lanes, self._ttl = mailbox, worker, lanes, ttl
        self._index = CheckpointIndex(mailbox.redis)
        self._on_total_bytes = on_total_bytes
        self._queue: queue.SimpleQueue[list[Commit] | None] = queue.SimpleQueue()
        self._thread = VitalThread(self._run, "lorry-committer")
        self._aborted = False

    def start(self) -> None:
        self._thread.start()

    def put(self, commits: list[Commit]) -> None:
        if commits:
            self._queue.put(commits)

    def finish(self, timeout: float) -> None:
        """Commit what is queued, then stop."""
        self._queue.put(None)
        self._thread.join(timeout)
        self._aborted = True

    def _run(self) -> None:
        while True:
            group = self._queue.get()
            if group is None:
                return
            stop = False
            while not self._queue.empty() and len(group) < 512:
                more = self._queue.get()
                if more is None:
                    stop = True
                    break
                group = group + more
            for commit, answer in zip(group, self._commit(group), strict=True):
                self._settle(commit, answer)
            if stop:
                return

    def _commit(self, group: list[Commit]) -> list[str]:
        while not self._aborted:
            pipe = self._mailbox.redis.pipeline(transaction=False)
            for commit in group:
                self._add(commit, pipe)
            self._mailbox.ask_total_bytes(pipe)
            try:
                *answers, total = pipe.execute()
                self._on_total_bytes(int(total or 0))
                # Beside the commits' answers there are those of the index, which are numbers.
                return [answer.decode() for answer in answers if isinstance(answer, bytes)]
            except NoScriptError:
                self._load_script()
            except RedisError as error:
                log.warning("commit of %d ops waits for Redis: %s", len(group), error)
                time.sleep(0.1)
        return ["stale"] * len(group)

    def _load_script(self) -> None:
        try:
            self._mailbox.load_script()
        except RedisError as error:
            log.warning("commits wait for Redis: %s", error)
            time.sleep(0.1)

    def _add(self, commit: Commit, pipe) -> None:  # type: ignore[no-untyped-def]
        delivery = commit.delivery
        if commit.checkpoint is not None:
            self._index.put(commit.checkpoint, pipe)
        if commit.lane is None:
            self._mailbox.finish_request(
                delivery.task,
                self._worker,
                meta=commit.record,
                output=commit.output,
                ttl=commit.ttl or self._ttl,
                channel=delivery.channel,
                pipe=pipe,
            )
            return
        self._mailbox.commit(
            commit.lane.job,
            delivery.seq,
            self._worker,
            commit.lane.epoch,
            task=delivery.task,
            meta=commit.record,
            output=commit.output,
            ttl=self._ttl,
            channel=delivery.channel,
            incomplete=commit.incomplete,
            effect=commit.effect,
            entry=commit.entry,
            pipe=pipe,
        )

    def _settle(self, commit: Commit, answer: str) -> None:
        lane, delivery = commit.lane, commit.delivery
        if lane is None:
            self._lanes.request_done(delivery.task)
        else:
            self._lanes.committed(lane)
        if delivery.done.done():
            return
        if answer in ("ok", "dup"):
            delivery.done.set_result(commit.outcome)
            return
        error: LorryError = StaleOwner(
            f"the commit was refused ({answer}): the work moved to another worker, which will run it",
            op=delivery.op,
            seq=delivery.seq,
        )
        delivery.done.set_exception(error)
        if lane is not None and self._lanes.get(lane.job) is lane:
            log.warning("job %s left this worker: commit of seq %d was %s", lane.job, delivery.seq, answer)
            self._lanes.drop(lane.job, "the job moved to another worker")
