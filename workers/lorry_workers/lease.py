"""The lease: proof that this worker is alive, and repair of what the network lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from lorry_jobs.mailbox import Mailbox

from .lanes import Lanes
from .settings import WorkerSettings

log = logging.getLogger(__name__)


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
        info: str,
        model_info: str,
        on_fenced: Callable[[], None],
        make_room: Callable[[], None],
    ) -> None:
        self._mailbox, self._worker, self._model = mailbox, worker, model
        self._lanes, self._settings = lanes, settings
        self._info, self._model_info = info, model_info
        self._on_fenced, self._make_room = on_fenced, make_room
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorry-lease", daemon=True)
        self.last_renewed = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(self._settings.lease_renew_seconds * 2)

    def renew(self) -> bool:
        return self._mailbox.hello(
            self._worker,
            self._model,
            slots=self._settings.slots,
            seats=self._settings.seats,
            lease_seconds=self._settings.lease_seconds,
            info=self._info,
            model_info=self._model_info,
        )

    def _run(self) -> None:
        while not self._stop.wait(self._settings.lease_renew_seconds):
            try:
                if not self.renew():
                    self._on_fenced()
                    return
                self._mailbox.reap()
                self._repair()
                if self._mailbox.unplaced(self._model):
                    self._make_room()
            except RedisError as error:
                log.warning("lease of %s: Redis does not answer: %s", self._worker, error)

    def _repair(self) -> None:
        here = self._lanes.jobs()  # before the question: a job placed in between must not look lost
        owned = self._mailbox.jobs_of(self._worker)
        for job in here:
            if job not in owned:
                self._lanes.drop(job, "the job was closed or moved to another worker")
        for job in owned:
            self._lanes.ensure(job)
        for job, epoch in self._lanes.head_missing():
            if self._mailbox.resend(job, self._worker, epoch) == "stale":
                self._lanes.drop(job, "the job moved to another worker")
        for task in self._mailbox.requests_of(self._worker) - self._lanes.requests():
            self._mailbox.resend_request(task, self._worker)
