"""Everything of a worker process beside Celery: engine, clock, lanes, committer, lease, snapshots."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.errors import LorryError
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.redis_client import connect
from lorry_jobs.types import ModelInfo

from .administration import Administration
from .clock import Clock
from .committer import Committer
from .engine.engine import Engine
from .executor import decode_request, token_count
from .lanes import Delivery, Lane, Lanes, Outcome
from .lease import Lease, Reactions
from .reaper import Reaper
from .settings import WorkerSettings
from .snapshots import Snapshots

log = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
HAND_OVER_SECONDS = 10.0
"""After SIGTERM, so long may jobs be handed on while the others go on; then everything stops."""


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
        self._snapshots = Snapshots(engine, self.mailbox, worker, settings)
        self._committer = Committer(
            self.mailbox, worker, self.lanes, settings.result_ttl_seconds, on_total_bytes=self._snapshots.total_is
        )
        self._clock = Clock(
            engine,
            self.lanes,
            self._committer,
            self._snapshots,
            self.mailbox,
            worker,
            max_tokens=settings.max_tokens_per_cycle,
        )
        self._lease = Lease(
            self.mailbox,
            worker,
            model_info.name,
            self.lanes,
            settings,
            model_info=model_info.model_dump_json(),
            describe=self._describe,
            busy_seconds=self._clock.busy_seconds,
            reactions=Reactions(
                fenced=self._fenced,
                drain=self._drain,
                make_room=self._make_room,
                deaf=self._deaf,
                stuck=self._stuck,
                jobs_gone=self._snapshots.remove_jobs,
            ),
        )
        self._administration = Administration(engine, self.mailbox.redis, settings)
        self._reaper = Reaper(engine.store, self._administration, settings)
        self._process = _about_this_process()
        self._draining = False
        self._stopping = threading.Event()

    def start(self) -> None:
        self.mailbox.put_tokenizer(*self._tokenizer)
        self._committer.start()
        self._snapshots.start()
        self._clock.start()
        self._lease.renew()
        self._lease.start()
        self._reaper.start()

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
            self._reaper.stop()
            self._lease.stop()
            self.lanes.close("the worker is stopping")
            self.mailbox.goodbye(self.worker)
        except RedisError as error:
            log.warning("stopped without handing over (the lease will end by itself): %s", error)
        finally:
            self.lanes.close("the worker is stopping")

    # ----------------------------------------------------------------------------------- Celery's pool threads

    def run_op(self, op: str, job: str, seq: int, channel: str) -> Outcome | None:
        """Wait until the op is committed. None: a duplicate, or the job is not ours (any more)."""
        self._lease.deliveries += 1
        taken = self.mailbox.take(job, seq, self.worker)
        if taken is None or self._stopping.is_set():
            return None
        self.lanes.pass_cancelled(job, taken.committed, taken.incomplete)
        request = _decoded(op, taken.payload)
        delivery = Delivery(
            task=ops.task_id(job, seq),
            op=op,
            request=request,
            channel=channel,
            seq=seq,
            request_bytes=len(taken.payload),
            tokens=token_count(request),
        )
        if not self.lanes.deliver(job, delivery):
            return None
        return delivery.done.result()

    def run_request(self, op: str, task: str, channel: str) -> Outcome | None:
        self._lease.deliveries += 1
        taken = self.mailbox.take_request(task, self.worker)
        if taken is None or self._stopping.is_set():
            return None
        payload, deaths = taken
        delivery = Delivery(task=task, op=op, request=_decoded(op, payload), channel=channel, suspect=deaths > 0)
        # Work on the store needs no engine: it is done on this thread, and the clock leaves it alone.
        delivery.running = op in ops.CHECKPOINT_OPS
        if not self.lanes.deliver_request(delivery):
            return None
        if delivery.running:
            self._committer.put([self._administration.run(delivery)])
        return delivery.done.result()

    # ---------------------------------------------------------------------------------------------- life of jobs

    def _hand_over(self, job: str) -> None:
        lane = self.lanes.get(job)
        if lane is None:
            return
        if lane.applied is not None:
            self._snapshots.save_now(lane)
            self.mailbox.yield_job(job, self.worker, lane.epoch)
        self.lanes.drop(job, "the worker handed the job over")

    def _make_room(self, waiting: int) -> None:
        """So many jobs wait for a slot: give them those of jobs that have been idle for longest.

        These come back, here or elsewhere, as soon as they have work.
        """
        held = len(self.lanes.jobs())
        if self._draining or held < self.settings.slots:
            return
        wanted = waiting - self.lanes.leaving()
        if wanted <= 0:
            return
        for lane in self.lanes.to_evict(wanted, self.settings.slot_idle_seconds, self.settings.slot_seconds):
            idle = time.monotonic() - lane.used
            log.info("job %s leaves its slot: it ran its last op %.1f s ago, and others wait", lane.job, idle)
            self._save_and_yield(lane)

    def _save_and_yield(self, lane: Lane, then: Callable[[], None] = lambda: None) -> None:
        """While the clock runs: save the job between two cycles, then hand it on."""

        def saved() -> None:
            try:
                self.mailbox.yield_job(lane.job, self.worker, lane.epoch)
            except RedisError as error:
                log.warning("job %s could not be handed on: %s", lane.job, error)
            self.lanes.drop(lane.job, "the job left this worker")
            then()

        self.lanes.leave(lane)
        self._snapshots.save_when_clean(lane, saved)
        self.lanes.wake()

    def _drain(self) -> None:
        """An operator wants this worker to leave: as if it had been sent SIGTERM."""
        if not self._draining:
            log.info("worker %s was asked to leave", self.worker)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_sigterm(self, then: Callable[[], None]) -> None:
        """Hand the jobs on one by one while the others go on; then `then`. At a second call, only that."""
        if self._draining:
            then()
            return
        self._draining = True
        threading.Thread(target=self._leave, args=(then,), name="lorry-leave", daemon=True).start()

    def _leave(self, then: Callable[[], None]) -> None:
        deadline = time.monotonic() + HAND_OVER_SECONDS
        try:
            self.mailbox.close_doors(self.worker)
            lanes = self.lanes.staying()
            for number, lane in enumerate(lanes):
                gone = threading.Event()
                self._save_and_yield(lane, gone.set)
                if not gone.wait(max(0.0, deadline - time.monotonic())):
                    break
                log.info("job %s was handed on, %d are left", lane.job, len(lanes) - number - 1)
        except RedisError as error:
            log.warning("could not hand the jobs on: %s", error)
        finally:
            then()

    def _fenced(self) -> None:
        try:
            self.mailbox.absolve(self.worker, [*self.lanes.jobs(), *self.lanes.requests()])
        except RedisError as error:
            log.warning("could not say that this worker lives: %s", error)
        _start_anew(f"worker {self.worker} was declared dead: its lease ran out")

    def _deaf(self, seconds: float) -> None:
        try:
            # Its jobs need not wait for the end of a lease that it cannot use.
            self.mailbox.goodbye(self.worker)
        except RedisError as error:
            log.warning("could not hand the jobs on: %s", error)
        _start_anew(f"worker {self.worker} has heard nothing for {seconds:.0f} s")

    def _stuck(self, seconds: float) -> None:
        # Where every thread stands: all that anyone will ever know of what hangs.
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # Celery has replaced sys.stderr
        # Without a goodbye: for the mailbox this is a death, so that an op that hangs every worker is found out.
        _start_anew(f"worker {self.worker} has been in one cycle for {seconds:.0f} s")

    def _describe(self) -> str:
        """What `lorry workers` shows, as JSON."""
        load = {
            "cycle": self._clock.cycle,
            "jobs": len(self.lanes.jobs()),
            "requests": len(self.lanes.requests()),
            "recent": self._clock.recent.summary(),
        }
        return json.dumps({**self._process, **load})


def _start_anew(reason: str) -> None:
    """Become a new incarnation under a new name: what this one has in memory may be superseded."""
    log.error("%s; starting anew", reason)
    logging.shutdown()
    # The same program in the same process: whoever supervises it by its pid sees no end of it.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _decoded(op: str, payload: bytes) -> Any:
    """The typed request, or the error it deserves; the clock raises that in the op's turn."""
    try:
        return decode_request(op, payload)
    except LorryError as error:
        return error


def _about_this_process() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "version": version("lorry"),
    }
