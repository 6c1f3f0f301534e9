"""Everything of a worker process beside Celery: engine, clock, lanes, committer, lease, snapshots."""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any

from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.errors import LorryError
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.redis_client import connect
from lorry_jobs.types import ModelInfo

from .clock import Clock
from .committer import Committer
from .engine.engine import Engine
from .executor import decode_request
from .lanes import Delivery, Lanes, Outcome
from .lease import Lease
from .settings import WorkerSettings
from .snapshots import Snapshots

log = logging.getLogger(__name__)

FENCED_EXIT_CODE = 17
DRAIN_SECONDS = 20.0


def new_worker_id(name: str) -> str:
    """A name for this incarnation: a fenced one never comes back."""
    return f"{name}-{secrets.token_hex(3)}"


class Runtime:
    """Started by the worker's bootstep once Celery's pool runs; stopped before it ends."""

    def __init__(
        self, worker: str, engine: Engine, model_info: ModelInfo, tokenizer_archive: bytes, settings: WorkerSettings
    ) -> None:
        self.worker, self.settings = worker, settings
        self.mailbox = Mailbox(connect(settings, patient=True, name=f"lorry-{worker}"))
        self.lanes = Lanes()
        self._tokenizer = (model_info.tokenizer_sha256, tokenizer_archive)
        self._committer = Committer(self.mailbox, worker, self.lanes, settings.result_ttl_seconds)
        self._snapshots = Snapshots(engine, self.mailbox, worker, settings)
        self._clock = Clock(
            engine, self.lanes, self._committer, self._snapshots, self.mailbox, worker, self._clock_died
        )
        self._lease = Lease(
            self.mailbox,
            worker,
            model_info.name,
            self.lanes,
            settings,
            info=json.dumps(_about_this_process()),
            model_info=model_info.model_dump_json(),
            on_fenced=self._fenced,
            make_room=self._evict_one,
        )
        self._stopping = threading.Event()

    def start(self) -> None:
        self.mailbox.put_tokenizer(*self._tokenizer)
        self._committer.start()
        self._snapshots.start()
        self._clock.start()
        self._lease.renew()
        self._lease.start()

    def stop(self) -> None:
        """Give everything back in order: finish the cycle, commit, save each job's state, hand it on."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        try:
            self.mailbox.close_doors(self.worker)
            self._clock.stop(DRAIN_SECONDS)
            self._committer.finish(DRAIN_SECONDS)
            for job in self.lanes.jobs():
                self._hand_over(job)
            self._snapshots.stop()
            self._lease.stop()
            self.lanes.drop_requests("the worker is stopping")
            self.mailbox.goodbye(self.worker)
        except RedisError as error:
            log.warning("stopped without handing over (the lease will end by itself): %s", error)
            for job in self.lanes.jobs():
                self.lanes.drop(job, "the worker is stopping")
            self.lanes.drop_requests("the worker is stopping")

    # ----------------------------------------------------------------------------------- Celery's pool threads

    def run_op(self, op: str, job: str, seq: int, channel: str) -> Outcome | None:
        """Wait until the op is committed. None: a duplicate, or the job is not ours (any more)."""
        payload = self.mailbox.take(job, seq, self.worker)
        if payload is None or self._stopping.is_set():
            return None
        delivery = Delivery(task=ops.task_id(job, seq), op=op, request=_decoded(op, payload), channel=channel, seq=seq)
        if not self.lanes.deliver(job, delivery):
            return None
        return _settled(delivery.done)

    def run_request(self, op: str, task: str, channel: str) -> Outcome | None:
        payload = self.mailbox.take_request(task, self.worker)
        if payload is None or self._stopping.is_set():
            return None
        delivery = Delivery(task=task, op=op, request=_decoded(op, payload), channel=channel)
        if not self.lanes.deliver_request(delivery):
            return None
        return _settled(delivery.done)

    # ---------------------------------------------------------------------------------------------- life of jobs

    def _hand_over(self, job: str) -> None:
        lane = self.lanes.get(job)
        if lane is None:
            return
        if lane.applied is not None:
            self._snapshots.save_now(lane)
            self.mailbox.yield_job(job, self.worker, lane.epoch)
        self.lanes.drop(job, "the worker handed the job over")

    def _evict_one(self) -> None:
        """Jobs wait for a slot here: save the one that has been idle for longest and give its slot away.

        It comes back, here or elsewhere, as soon as it has work.
        """
        if len(self.lanes.jobs()) < self.settings.slots:
            return
        lane = self.lanes.find_idle()
        if lane is None:
            return
        log.info("job %s leaves its slot: idle for %.0f s and others wait", lane.job, time.monotonic() - lane.used)
        self.lanes.leave(lane)
        self._snapshots.save_when_clean(lane, then=lambda: self._gave_up(lane))

    def _gave_up(self, lane: Any) -> None:
        self.mailbox.yield_job(lane.job, self.worker, lane.epoch)
        self.lanes.drop(lane.job, "the job left its slot")

    def _fenced(self) -> None:
        # Everything in memory may be superseded. The supervisor starts a new incarnation under a new name.
        log.error("worker %s was declared dead (its lease ran out) and must not go on; exiting", self.worker)
        logging.shutdown()
        os._exit(FENCED_EXIT_CODE)

    def _clock_died(self, error: BaseException) -> None:
        log.critical("worker %s cannot compute any more: %r; exiting", self.worker, error)
        logging.shutdown()
        os._exit(1)


def _decoded(op: str, payload: bytes) -> Any:
    """The typed request, or the error it deserves; the clock raises that in the op's turn."""
    try:
        return decode_request(op, payload)
    except LorryError as error:
        return error


def _settled(done: Future[Outcome]) -> Outcome:
    return done.result()


def _about_this_process() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "version": version("lorry"),
    }


RuntimeFactory = Callable[[], Runtime]
