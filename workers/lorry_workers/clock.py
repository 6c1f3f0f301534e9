"""The clock: the one thread that owns the engine. Each tick is one cycle."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import wait

from redis.exceptions import RedisError

from lorry_jobs import ops, results, wire
from lorry_jobs.errors import AccumulationIncomplete, LorryError, ServiceError
from lorry_jobs.mailbox import Mailbox

from .committer import CLEAR, KEEP, Commit, Committer
from .engine.engine import Engine
from .executor import execute
from .journal import restore
from .lanes import Delivery, Lane, Lanes, Outcome
from .snapshots import Snapshots
from .vital_thread import VitalThread

log = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.5
REQUESTS_PER_CYCLE = 4


class Clock:
    """Collect what is ready from all jobs, run it, hand it to the committer; then the next cycle."""

    def __init__(
        self,
        engine: Engine,
        lanes: Lanes,
        committer: Committer,
        snapshots: Snapshots,
        mailbox: Mailbox,
        worker: str,
    ) -> None:
        self.cycle = 0
        self._engine, self._lanes, self._committer = engine, lanes, committer
        self._snapshots, self._mailbox, self._worker = snapshots, mailbox, worker
        self._announced = ""
        self._tick_started: float | None = None
        self._stop = threading.Event()
        self._thread = VitalThread(self._run, "lorry-clock")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Finish the running cycle and start no other. True if it ended in time."""
        self._stop.set()
        with self._lanes.changed:
            self._lanes.changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def busy_seconds(self) -> float:
        """For how long the running cycle has been going on; 0 between cycles. For other threads."""
        started = self._tick_started
        return 0.0 if started is None else time.monotonic() - started

    def _run(self) -> None:
        while not self._stop.is_set():
            self._lanes.wait_for_work(IDLE_WAIT_SECONDS)
            self._tick_started = time.monotonic()
            self.tick()
            self._tick_started = None

    def tick(self) -> None:
        self._forget_dropped()
        self._adopt()
        self._train()
        self._sample()
        self._snapshots.take_due(self._lanes)

    def _forget_dropped(self) -> None:
        for job in self._lanes.take_dropped():
            self._engine.drop_job(job)
            self._snapshots.forget(job)

    def _adopt(self) -> None:
        """Load the state of jobs that were given to this worker: snapshot, then the journal since."""
        for lane in self._lanes.to_adopt():
            try:
                placement = self._mailbox.adopt(lane.job, self._worker)
                if placement is None:
                    self._lanes.drop(lane.job, "the job moved to another worker")
                    continue
                self._announce(f"restore {lane.job}" if placement.suspect is not None else "")
                restore(self._engine, self._mailbox, self._worker, placement, self._snapshots)
                self._announce("")
            except RedisError as error:
                log.warning("job %s waits to be loaded: Redis does not answer: %s", lane.job, error)
                return
            except Exception as error:
                log.exception("job %s cannot be restored", lane.job)
                failure = error if isinstance(error, LorryError) else ServiceError(f"cannot restore the job: {error!r}")
                self._mailbox.fail(
                    lane.job,
                    self._worker,
                    placement.epoch,
                    template=results.failure("", failure),
                    ttl=self._snapshots.ttl,
                )
                self._lanes.drop(lane.job, "the job failed")
                continue
            self._lanes.adopted(
                lane,
                epoch=placement.epoch,
                applied=placement.committed,
                incomplete=placement.incomplete,
                suspect=placement.suspect,
            )

    def _train(self) -> None:
        runs = self._lanes.take_runs()
        if not runs:
            return
        self.cycle += 1
        commits: list[Commit] = []
        for lane, run in runs:
            for delivery in run:
                self._announce(lane.job if delivery.suspect else "")
                commit = self._run_op(lane, delivery)
                if self._lanes.applied(lane, delivery):
                    commits.append(commit)
        self._committer.put(commits)
        for commit in commits:
            if commit.delivery.suspect:  # until it is committed, nothing else may run that could be taken for it
                wait([commit.delivery.done])

    def _announce(self, what: str) -> None:
        """Say which suspect is run next ('': none), so that if this worker dies of it, it is known what it died of."""
        if what == self._announced and not what:
            return
        if what:
            log.warning("%s is run alone: a worker died with it", what)
        try:
            self._mailbox.trying(self._worker, what)
            self._announced = what
        except RedisError as error:
            log.warning("could not announce '%s': %s", what, error)

    def _run_op(self, lane: Lane, delivery: Delivery) -> Commit:
        started, started_ms = time.perf_counter(), int(time.time() * 1000)
        incomplete, effect, checkpoint, version = KEEP, "1", None, None
        try:
            if delivery.op == ops.OPTIM_STEP and lane.incomplete is not None:
                failed, lane.incomplete = lane.incomplete, None
                self._drop_gradients(lane.job)
                incomplete, effect = CLEAR, "drop"
                raise AccumulationIncomplete(
                    f"the forward_backward with seq {failed} failed or was cancelled, so this step would use "
                    "only a part of its gradients; they were dropped and no step was taken. Submit the "
                    "forward_backward again, then optim_step",
                    job=lane.job,
                    op=delivery.op,
                    seq=delivery.seq,
                )
            reply = execute(self._engine, lane.job, delivery, self.cycle)
        except Exception as error:
            if not isinstance(error, LorryError):
                log.exception("%s seq %d of job %s", delivery.op, delivery.seq, lane.job)
            failure = _located(error, lane.job, delivery)
            if delivery.op == ops.FORWARD_BACKWARD:
                self._drop_gradients(lane.job)
                if lane.incomplete is None:
                    lane.incomplete = delivery.seq
                    incomplete = str(delivery.seq)
            if effect == "1":
                # These two leave no gradients when they fail; any other failed op has no effect.
                effect = "drop" if delivery.op in (ops.OPTIM_STEP, ops.FORWARD_BACKWARD) else "0"
            record, output = results.failure(delivery.task, failure), b""
            outcome = Outcome({}, failure)
        else:
            if delivery.op == ops.LOAD_STATE:
                lane.incomplete, incomplete = None, CLEAR
            if delivery.op in ops.WITHOUT_EFFECT:
                effect = "0"
            milliseconds = (time.perf_counter() - started) * 1000
            info = {
                **reply.info,
                "cycle": self.cycle,
                "milliseconds": round(milliseconds, 3),
                "started_ms": started_ms,
                "worker": self._worker,
                "attempt": 1 + delivery.suspect,
            }
            record, output = results.success(delivery.task, info, reply.output)
            outcome = Outcome(reply.summary)
            version, checkpoint = reply.version, reply.checkpoint
            self._snapshots.ran(lane.job, delivery.op, delivery.request_bytes, at_once=version is not None)
        entry = {
            "status": "failed" if outcome.error else "ok",
            "op": delivery.op,
            "worker": self._worker,
            "epoch": lane.epoch,
            "attempt": 1 + delivery.suspect,
            "cycle": self.cycle,
            "started": started_ms,
            "milliseconds": round((time.perf_counter() - started) * 1000, 3),
            **({"version": version} if version is not None else {}),
        }
        return Commit(
            lane,
            delivery,
            record,
            output,
            outcome,
            incomplete=incomplete,
            effect=effect,  # type: ignore[arg-type]
            entry=json.dumps(entry),
            checkpoint=checkpoint,
        )

    def _drop_gradients(self, job: str) -> None:
        if job in self._engine.jobs:  # it is not if its create_model failed
            self._engine.drop_gradients(job)

    def _sample(self) -> None:
        for delivery in self._lanes.take_requests(REQUESTS_PER_CYCLE):
            self._announce(delivery.task if delivery.suspect else "")
            try:
                if isinstance(delivery.request, Exception):  # its bytes could not be read
                    raise delivery.request
                response = self._engine.sample(delivery.request)
            except Exception as error:
                if not isinstance(error, LorryError):
                    log.exception("%s %s", delivery.op, delivery.task)
                failure = _located(error, None, delivery)
                record, output = results.failure(delivery.task, failure), b""
                outcome = Outcome({}, failure)
            else:
                info = {"texts": [sequence.text for sequence in response.sequences]}
                record, output = results.success(delivery.task, info, wire.encode_sample_response(response))
                outcome = Outcome({"sequences": len(response.sequences)})
            self._committer.put([Commit(None, delivery, record, output, outcome)])
            if delivery.suspect:
                wait([delivery.done])


def _located(error: Exception, job: str | None, delivery: Delivery) -> LorryError:
    """The error with job, op and seq filled in; a bug in the worker becomes a ServiceError that names it."""
    if not isinstance(error, LorryError):
        error = ServiceError(f"the worker failed with {type(error).__name__}: {error}; its log has the details")
    error.job = error.job or job
    error.op = error.op or delivery.op
    if error.seq is None and delivery.seq >= 0:
        error.seq = delivery.seq
    return error
