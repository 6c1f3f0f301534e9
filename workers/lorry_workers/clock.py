"""The clock: the one thread that owns the engine. Each tick is one cycle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait

from redis.exceptions import RedisError

from lorry_jobs import results, wire
from lorry_jobs.errors import LorryError, ServiceError
from lorry_jobs.mailbox import Mailbox

from .committer import Commit, Committer
from .cycle import BATCHES, CycleStats, RecentCycles
from .engine.engine import Engine
from .executor import Reply
from .journal import restore
from .lanes import Delivery, Lane, Lanes
from .recording import as_commit, as_failure, failure, success
from .snapshots import Snapshots
from .training import OpRun, run_others, step, train
from .vital_thread import VitalThread

log = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.5
REQUESTS_PER_CYCLE = 4
PATIENCE = 0.05
MAX_PATIENCE_SECONDS = 0.25


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
        *,
        max_tokens: int,
    ) -> None:
        """`max_tokens`: of all jobs, in a cycle."""
        self.cycle = 0
        self.recent = RecentCycles()
        self._engine, self._lanes, self._committer = engine, lanes, committer
        self._snapshots, self._mailbox, self._worker = snapshots, mailbox, worker
        self._max_tokens = max_tokens
        self._announced = ""
        self._company: list[str] = []
        self._patience = 0.0
        self._tick_started: float | None = None
        self._noted = time.monotonic()
        self._idle = 0.0  # seconds since then without work
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
            waiting = time.monotonic()
            self._lanes.wait_for_work(IDLE_WAIT_SECONDS)
            self._lanes.wait_for_company(self._company, self._patience)
            self._tick_started = time.monotonic()
            self._idle += self._tick_started - waiting
            self.tick()
            self._tick_started = None

    def tick(self) -> None:
        self._forget_dropped()
        self._adopt()
        runs = self._lanes.take_runs(self._max_tokens)
        timed = self._train(runs) if runs else (0.0, 0.0)
        self._sample()
        self._snapshots.take_due(self._lanes)
        if runs:
            self._note(runs, *timed)

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

    def _train(self, runs: list[tuple[Lane, list[Delivery]]]) -> tuple[float, float]:
        """One cycle: the batches of all jobs, then their steps, then what goes alone; committed as a group.

        -> seconds of the batches and of the steps.
        """
        self.cycle += 1
        ran = [OpRun(lane, delivery) for lane, run in runs for delivery in run]
        suspect = ran[0].job if ran[0].delivery.suspect else ""  # which is alone in its cycle
        self._announce(suspect)
        started = time.monotonic()
        train(self._engine, ran, self.cycle)
        trained = time.monotonic()
        self._expect(ran, trained - started)
        step(self._engine, ran, self.cycle)
        stepped = time.monotonic()
        run_others(self._engine, ran, self.cycle)
        commits = [self._record(run) for run in ran if self._lanes.applied(run.lane, run.delivery)]
        self._committer.put(commits)
        if suspect:  # until it is committed, nothing else may run that could be taken for it
            wait([commit.delivery.done for commit in commits])
        return trained - started, stepped - trained

    def _expect(self, ran: Sequence[OpRun], seconds: float) -> None:
        """The jobs whose batches shared a cycle will soon have their next ones, which should share one, too: if one
        job starts without the others, these wait for its whole cycle. So the next cycle waits for them first, for a
        small part of what this one took."""
        jobs = list(dict.fromkeys(run.job for run in ran if run.delivery.op in BATCHES))
        if jobs:
            self._company, self._patience = jobs, min(seconds * PATIENCE, MAX_PATIENCE_SECONDS)

    def _record(self, run: OpRun) -> Commit:
        if isinstance(run.result, Reply):
            delivery, version = run.delivery, run.result.version
            self._snapshots.ran(run.job, delivery.op, delivery.request_bytes, at_once=version is not None)
        return as_commit(run, self._worker, self.cycle)

    def _note(self, runs: list[tuple[Lane, list[Delivery]]], train: float, step: float) -> None:
        ended = time.monotonic()
        self.recent.add(
            CycleStats(
                cycle=self.cycle,
                jobs=len(runs),
                ops=sum(len(run) for _, run in runs),
                tokens=sum(delivery.tokens for _, run in runs for delivery in run),
                train=train,
                step=step,
                other=ended - self._noted - self._idle - train - step,
                idle=self._idle,
            )
        )
        self._noted, self._idle = ended, 0.0

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

    def _sample(self) -> None:
        for delivery in self._lanes.take_requests(REQUESTS_PER_CYCLE):
            self._announce(delivery.task if delivery.suspect else "")
            try:
                if isinstance(delivery.request, Exception):  # its bytes could not be read
                    raise delivery.request
                response = self._engine.sample(delivery.request)
            except Exception as error:  # noqa: BLE001 (its client is told, and as_failure logs it)
                commit = failure(delivery, as_failure(error, None, delivery))
            else:
                info = {"texts": [sequence.text for sequence in response.sequences]}
                summary = {"sequences": len(response.sequences)}
                commit = success(delivery, Reply(info, wire.encode_sample_response(response), summary))
            self._committer.put([commit])
            if delivery.suspect:
                wait([delivery.done])
