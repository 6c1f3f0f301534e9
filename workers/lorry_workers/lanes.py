"""What this process knows about the jobs it holds: one lane per job, with the ops that have been delivered.

Celery's pool threads put deliveries in, the clock takes them out. Everything here is guarded by one condition.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from lorry_jobs.errors import StaleOwner

from .cycle import ReadyOp, plan_cycle


@dataclass(frozen=True)
class Outcome:
    """What the pool thread that delivered an op is told once the op is committed."""

    summary: dict[str, Any]
    error: Exception | None = None


@dataclass
class Delivery:
    """One op or sampling request as it came from Celery. `request` is decoded already."""

    task: str
    op: str
    request: Any
    channel: str
    seq: int = -1
    request_bytes: int = 0
    tokens: int = 0
    """Of its batch, if it has one."""
    suspect: bool = False
    """A worker died with it: it is run alone, and announced before."""
    running: bool = False
    """Of a sampling request: the clock has it. It stays until it is committed, so that a duplicate is known as one."""
    done: Future[Outcome] = field(default_factory=Future)


@dataclass
class Lane:
    """A job here. `applied` is the last op that the engine ran; None until the job's state is loaded."""

    job: str
    epoch: str = ""
    applied: int | None = None
    incomplete: int | None = None
    suspect: int = -1
    """A worker died with the ops up to this one."""
    waiting: dict[int, Delivery] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)
    adopted_at: float = field(default_factory=time.monotonic)
    in_flight: int = 0
    """Ops that ran and are being committed."""
    leaving: bool = False

    @property
    def next_seq(self) -> int:
        return -1 if self.applied is None else self.applied + 1

    @property
    def ready(self) -> bool:
        return self.applied is not None and not self.leaving and self.next_seq in self.waiting

    def ready_ops(self) -> list[Delivery]:
        """Those that are here without a gap, the next one first."""
        ready = []
        while (delivery := self.waiting.get(self.next_seq + len(ready))) is not None:
            ready.append(delivery)
        return ready

    @property
    def idle(self) -> bool:
        return self.applied is not None and not self.waiting and not self.in_flight


class Lanes:
    """All lanes and requests of this worker."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._lanes: dict[str, Lane] = {}
        self._astir: dict[str, Lane] = {}
        """Lanes with something to run or to load, in the order of their turns. Of very many lanes most are idle, and
        no cycle may cost what it costs to look at them all."""
        self._requests: dict[str, Delivery] = {}
        self._dropped: list[str] = []
        self._woken = False
        self._closed = False

    # -------------------------------------------------------------------------------------- pool threads put in

    def deliver(self, job: str, delivery: Delivery) -> bool:
        """False for a duplicate (the op is here already, or done), and when the worker is stopping."""
        with self.changed:
            if self._closed:
                return False
            lane = self._lanes.setdefault(job, Lane(job))
            known = delivery.seq in lane.waiting or (lane.applied is not None and delivery.seq <= lane.applied)
            if known:
                return False
            lane.waiting[delivery.seq] = delivery
            self._astir.setdefault(job, lane)
            if self._is_next(lane):
                self.changed.notify_all()
            return True

    def deliver_request(self, delivery: Delivery) -> bool:
        with self.changed:
            if self._closed or delivery.task in self._requests:
                return False
            self._requests[delivery.task] = delivery
            self.changed.notify_all()
            return True

    def pass_cancelled(self, job: str, committed: int, incomplete: int | None) -> None:
        """The mailbox is at `committed`. Where that is beyond what ran here, the ops between were cancelled."""
        with self.changed:
            lane = self._lanes.get(job)
            if lane is not None and lane.applied is not None and committed > lane.applied:
                lane.applied, lane.incomplete = committed, incomplete
                self.changed.notify_all()

    # ---------------------------------------------------------------------------------------- the clock takes out

    def wait_for_work(self, timeout: float) -> None:
        with self.changed:
            self.changed.wait_for(self._has_work, timeout)
            self._woken = False

    def wait_for_company(self, jobs: Iterable[str], timeout: float) -> None:
        """Where some job has something to run, wait until `jobs` have, too; those that are no longer here do not
        count. At most `timeout` seconds."""
        with self.changed:
            if any(lane.ready for lane in self._astir.values()):
                self.changed.wait_for(lambda: not self._missing(jobs), timeout)

    def _missing(self, jobs: Iterable[str]) -> bool:
        lanes = (self._lanes.get(job) for job in jobs)
        return not self._closed and any(lane is not None and not lane.leaving and not lane.ready for lane in lanes)

    def wake(self) -> None:
        """There is something for the clock to do that no lane shows."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def _has_work(self) -> bool:
        return (
            self._woken
            or any(not delivery.running for delivery in self._requests.values())
            or bool(self._dropped)
            or any(self._is_next(lane) for lane in self._astir.values())
        )

    @staticmethod
    def _is_next(lane: Lane) -> bool:
        """Is there something that the clock can do for it now?"""
        return lane.ready or (lane.applied is None and not lane.leaving)

    def to_adopt(self) -> list[Lane]:
        with self.changed:
            return [lane for lane in self._astir.values() if lane.applied is None and not lane.leaving]

    def adopted(
        self, lane: Lane, *, epoch: str, applied: int, incomplete: int | None, suspect: int | None = None
    ) -> None:
        with self.changed:
            lane.epoch, lane.applied, lane.incomplete = epoch, applied, incomplete
            lane.suspect = -1 if suspect is None else suspect
            lane.used = lane.adopted_at = time.monotonic()
            for seq in [seq for seq in lane.waiting if seq <= applied]:
                lane.waiting.pop(seq).done.set_exception(StaleOwner("the op is committed already", job=lane.job))
            self._rest(lane)

    def take_runs(self, max_tokens: int) -> list[tuple[Lane, list[Delivery]]]:
        """For every job the ops that enter this cycle (`plan_cycle` decides); they count as in flight from here on.

        A suspect enters a cycle of its own.
        """
        with self.changed:
            ready = [lane for lane in self._astir.values() if lane.ready]
            suspects = [lane for lane in ready if lane.next_seq <= lane.suspect][:1]
            if suspects:
                suspects[0].waiting[suspects[0].next_seq].suspect = True
                runs = [(lane, lane.ready_ops()[:1]) for lane in suspects]
            else:
                queues = [lane.ready_ops() for lane in ready]
                counts = plan_cycle(
                    [[ReadyOp(delivery.op, delivery.tokens) for delivery in queue] for queue in queues],
                    max_tokens=max_tokens,
                )
                runs = [
                    (lane, queue[:count]) for lane, queue, count in zip(ready, queues, counts, strict=True) if count
                ]
            for lane, run in runs:
                lane.in_flight += len(run)
                lane.used = time.monotonic()
                # Round robin: a job that just ran goes behind the others.
                self._astir[lane.job] = self._astir.pop(lane.job)
            return runs

    def applied(self, lane: Lane, delivery: Delivery) -> bool:
        """The engine ran this op. False if the job left meanwhile, and the result means nothing."""
        with self.changed:
            if self._lanes.get(lane.job) is not lane:
                return False
            lane.applied = delivery.seq
            lane.waiting.pop(delivery.seq, None)
            self._rest(lane)
            return True

    def _rest(self, lane: Lane) -> None:
        """Nothing is left to run or to load: the clock need not look at it."""
        if lane.applied is not None and not lane.waiting:
            self._astir.pop(lane.job, None)

    def committed(self, lane: Lane) -> None:
        with self.changed:
            lane.in_flight -= 1
            self.changed.notify_all()

    def take_requests(self, limit: int) -> list[Delivery]:
        with self.changed:
            ready = [delivery for delivery in self._requests.values() if not delivery.running]
            suspects = [delivery for delivery in ready if delivery.suspect]
            taken = suspects[:1] or ready[:limit]
            for delivery in taken:
                delivery.running = True
            return taken

    def request_done(self, task: str) -> None:
        with self.changed:
            self._requests.pop(task, None)

    def take_dropped(self) -> list[str]:
        with self.changed:
            dropped, self._dropped = self._dropped, []
            return [job for job in dropped if job not in self._lanes]

    # --------------------------------------------------------------------------------------------- the lease looks

    def ensure(self, job: str) -> None:
        """A job was given to this worker, though none of its ops has arrived yet."""
        with self.changed:
            if job not in self._lanes:
                self._lanes[job] = self._astir[job] = Lane(job)
                self.changed.notify_all()

    def head_missing(self) -> list[tuple[str, str]]:
        """(job, epoch) of lanes that could go on if their next op were here."""
        with self.changed:
            return [
                (lane.job, lane.epoch)
                for lane in self._lanes.values()
                if lane.applied is not None and not lane.leaving and not lane.in_flight and not lane.ready
            ]

    def jobs(self) -> list[str]:
        with self.changed:
            return list(self._lanes)

    def requests(self) -> set[str]:
        with self.changed:
            return set(self._requests)

    def to_evict(self, count: int, idle_seconds: float, slot_seconds: float) -> list[Lane]:
        """Whose slots go to jobs that wait: those of lanes without work, by last use; or else that of the lane
        that has had its slot for longest. The arguments say how long each must have been so."""
        now = time.monotonic()
        with self.changed:
            lanes = [lane for lane in self._lanes.values() if lane.applied is not None and not lane.leaving]
            idle = [lane for lane in lanes if lane.idle and now - lane.used >= idle_seconds]
            if idle:
                return sorted(idle, key=lambda lane: lane.used)[:count]
            held = [lane for lane in lanes if now - lane.adopted_at >= slot_seconds]
            return sorted(held, key=lambda lane: lane.adopted_at)[:1]

    def leaving(self) -> int:
        with self.changed:
            return sum(lane.leaving for lane in self._lanes.values())

    def staying(self) -> list[Lane]:
        """Lanes whose state is here and that are not on their way out; the longest unused first."""
        with self.changed:
            lanes = [lane for lane in self._lanes.values() if lane.applied is not None and not lane.leaving]
            return sorted(lanes, key=lambda lane: lane.used)

    def get(self, job: str) -> Lane | None:
        with self.changed:
            return self._lanes.get(job)

    def leave(self, lane: Lane) -> None:
        """Run no more ops of this job; once its state is saved, `drop` it."""
        with self.changed:
            lane.leaving = True

    def drop(self, job: str, reason: str) -> None:
        """Forget a job: it lives elsewhere now. Whoever waits for one of its ops here is told that it moved."""
        with self.changed:
            lane = self._lanes.pop(job, None)
            if lane is None:
                return
            self._astir.pop(job, None)
            self._dropped.append(job)
            for delivery in lane.waiting.values():
                delivery.done.set_exception(StaleOwner(reason, job=job, op=delivery.op, seq=delivery.seq))
            lane.waiting.clear()
            self.changed.notify_all()

    def close(self, reason: str) -> None:
        """Drop everything and take in no more: from here on, nobody would ever answer the thread that delivers."""
        with self.changed:
            self._closed = True
            for job in list(self._lanes):
                self.drop(job, reason)
            for delivery in self._requests.values():
                if not delivery.done.done():
                    delivery.done.set_exception(StaleOwner(reason, op=delivery.op))
            self._requests.clear()
