"""The lease: proof that this worker is alive, and repair of what the network lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import RedisError

from lorry_jobs.mailbox import Mailbox

from .lanes import Lanes
from .settings import WorkerSettings
from .vital_thread import VitalThread

log = logging.getLogger(__name__)

SESSIONS_EVERY_SECONDS = 10.0


@dataclass(frozen=True)
class Reactions:
    """What the runtime does about what the lease finds. All are called on the lease's thread."""

    fenced: Callable[[], None]
    drain: Callable[[], None]
    make_room: Callable[[int], None]
    deaf: Callable[[float], None]
    stuck: Callable[[float], None]
    jobs_gone: Callable[[list[str]], None]


class Lease:
    """Renews the lease, reaps workers whose lease ran out, and asks again for ops that should have arrived."""

    def __init__(
        self,
        mailbox: Mailbox,
        worker: str,
        model: str,
        lanes: Lanes,
        settings: WorkerSettings,
        *,
        model_info: str,
        describe: Callable[[], str],
        busy_seconds: Callable[[], float],
        reactions: Reactions,
    ) -> None:
        self._mailbox, self._worker, self._model = mailbox, worker, model
        self._lanes, self._settings = lanes, settings
        self._model_info, self._describe, self._reactions = model_info, describe, reactions
        self._busy_seconds = busy_seconds
        self._ears = Ears(settings.deaf_seconds)
        self._sessions_every = min(SESSIONS_EVERY_SECONDS, settings.session_seconds / 2)
        self._sessions_checked = time.monotonic()
        self._reap_from = 0.0
        self.deliveries = 0
        """How often Celery handed something in, duplicates included: proof that the worker hears."""
        self._stop = threading.Event()
        self._thread = VitalThread(self._run, "lorry-lease")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(self._settings.lease_renew_seconds * 2)

    def renew(self) -> str:
        return self._mailbox.hello(
            self._worker,
            self._model,
            slots=self._settings.slots,
            seats=self._settings.seats,
            lease_seconds=self._settings.lease_seconds,
            info=self._describe(),
            model_info=self._model_info,
        )

    def _run(self) -> None:
        while not self._stop.wait(self._settings.lease_renew_seconds):
            try:
                self._tick()
            except RedisError as error:
                self._give_others_time()
                log.warning("lease of %s: Redis does not answer: %s", self._worker, error)

    def _tick(self) -> None:
        asked = time.monotonic()
        answer = self.renew()
        if time.monotonic() - asked > max(1.0, self._settings.lease_renew_seconds):
            self._give_others_time()
        if answer == "dead":
            self._reactions.fenced()
            return
        if answer == "drain":
            self._reactions.drain()
        if time.monotonic() >= self._reap_from:
            self._mailbox.reap(ttl=self._settings.result_ttl_seconds)
        queued = self._mailbox.queue_length(self._worker)
        self._repair(messages_lost=queued == 0)
        unplaced = self._mailbox.unplaced(self._model)
        if unplaced:
            self._reactions.make_room(unplaced)
        self._reap_sessions()
        silence = self._ears.silence(queued, self.deliveries)
        if silence is not None:
            self._reactions.deaf(silence)
        busy = self._busy_seconds()
        if busy > self._settings.stuck_seconds:
            self._reactions.stuck(busy)

    def _give_others_time(self) -> None:
        """Redis was away, and so no lease could be renewed: that is no sign of death."""
        self._reap_from = time.monotonic() + self._settings.lease_seconds

    def _repair(self, *, messages_lost: bool) -> None:
        """Compare what is here with what should be. Ops that are not here though nothing is under way were lost."""
        here = self._lanes.jobs()  # before the question: a job placed in between must not look lost
        owned = self._mailbox.jobs_of(self._worker)
        for job in here:
            if job not in owned:
                self._lanes.drop(job, "the job was closed or moved to another worker")
        for job in owned:
            self._lanes.ensure(job)
        if not messages_lost:
            return
        for job in self._mailbox.resend(self._worker, self._lanes.head_missing()):
            self._lanes.drop(job, "the job moved to another worker")
        held = self._lanes.requests()
        for task in self._mailbox.requests_of(self._worker) - held:
            self._mailbox.resend_request(task, self._worker)

    def _reap_sessions(self) -> None:
        now = time.monotonic()
        if now - self._sessions_checked >= self._sessions_every:
            self._sessions_checked = now
            settings = self._settings
            gone = self._mailbox.reap_sessions(settings.session_seconds, patience_seconds=settings.result_ttl_seconds)
            if gone:
                log.info("the clients of %d jobs are gone; dropped %s", len(gone), ", ".join(gone))
            closed = self._mailbox.closed_jobs(2 * self._settings.lease_renew_seconds)
            if closed:
                self._reactions.jobs_gone(closed)
                self._mailbox.forget_closed(closed)


class Ears:
    """Does the worker still hear? A consumer can stay connected and take nothing; then messages pile up."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._heard = -1
        self._since = time.monotonic()

    def silence(self, queued: int, deliveries: int) -> float | None:
        """Seconds for which messages have been waiting and none was taken, once that is too long."""
        now = time.monotonic()
        if queued == 0 or deliveries != self._heard:
            self._heard, self._since = deliveries, now
            return None
        return now - self._since if now - self._since > self._patience else None
