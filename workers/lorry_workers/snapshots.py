"""Snapshots: a job's whole state on disk, so that its journal can be short and another worker can go on.

The clock's thread copies the state; a writer thread puts it into the store and then moves the job's snapshot
pointer in the mailbox, fenced by the epoch. A snapshot that lost that race is just a folder that nothing names.

The pointer has two generations: the last snapshot and the one before, and the journal goes back to that one. A
snapshot is named by its path and the sha256 of its manifest, which names the sha256 of every file: what is loaded
is what was written, or nothing.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.checkpoint_paths import CheckpointPath, folder_name
from lorry_jobs.errors import LorryError, ServiceError
from lorry_jobs.mailbox import Mailbox, Placement
from lorry_jobs.types import CreateModelRequest

from .engine import training_state
from .engine.checkpoints import MANIFEST, Checkpoint, CheckpointStore, Origin
from .engine.engine import Engine
from .lanes import Lane, Lanes
from .settings import WorkerSettings
from .vital_thread import VitalThread

log = logging.getLogger(__name__)

_CHANGING = frozenset({ops.CREATE_MODEL, ops.FORWARD_BACKWARD, ops.OPTIM_STEP, ops.LOAD_STATE})
COST_RATIO = 9.0
"""A job rests this many times as long as its last snapshot took to write, so that at most a tenth of the time goes
into writing snapshots of it. Unless Redis would fill up meanwhile."""
LOOK_SECONDS = 0.02
"""So often, at most, all jobs are looked through for one whose turn it is; those that just ran are always."""
RETRY_SECONDS = 5.0
"""So long after a snapshot that could not be written."""
PRESSED_FROM, PRESSED_MOST, PRESSURE = 0.5, 0.9, 8
"""Once requests fill the first share of what Redis may hold, journals are freed after 1/8 of the usual bytes; from
there the limit falls, and at the second share every job that changed is saved."""
_FOLDER = re.compile(r"(?:\.writing-|\.replaced-)?(?P<seq>\d+)-(?P<epoch>\d+)(?:-[0-9a-f]+)?")


@dataclass
class _Cadence:
    """What happened to a job since its last snapshot was taken."""

    max_bytes: int
    steps: int = 0
    changes: int = 0
    bytes: int = 0
    at_once: bool = False
    taken_at: float = field(default_factory=time.monotonic)
    rest_until: float = 0.0
    retry_at: float = 0.0


@dataclass(frozen=True)
class _Copy:
    """A copy of a job's state after op `seq`, on its way to the disk. `written` gets the seconds, None if it failed."""

    job: str
    epoch: str
    seq: int
    content: Checkpoint
    origin: Origin
    written: Callable[[float | None], None]


class Snapshots:
    def __init__(self, engine: Engine, mailbox: Mailbox, worker: str, settings: WorkerSettings) -> None:
        self.ttl = settings.result_ttl_seconds
        self._max_total = settings.max_total_bytes
        self._pressure = 1.0
        self._look_again_at = 0.0
        self._just_ran: set[str] = set()
        self._engine, self._mailbox, self._worker = engine, mailbox, worker
        self._steps, self._seconds = settings.snapshot_steps, settings.snapshot_seconds
        self._bytes = settings.snapshot_bytes
        self._store = CheckpointStore(settings.store_dir / "snapshots")
        self._cadence: dict[str, _Cadence] = {}
        self._leaving: collections.deque[tuple[Lane, Callable[[], None]]] = collections.deque()
        self._busy: set[str] = set()
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread = VitalThread(self._write_all, "lorry-snapshots")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    def total_is(self, total_bytes: int) -> None:
        """So much do the requests of all jobs weigh in Redis. Any thread may say so."""
        left = (PRESSED_MOST - total_bytes / self._max_total) / (PRESSED_MOST - PRESSED_FROM)
        self._pressure = 1.0 if left > 1.0 else max(0.0, left) / PRESSURE

    # ---------------------------------------------------------------------------------------- the clock's thread

    def ran(self, job: str, op: str, request_bytes: int, *, at_once: bool) -> None:
        """`at_once`: the op read something that may be gone when a replay needs it."""
        cadence = self._cadence.get(job)
        if cadence is not None and op in _CHANGING:
            cadence.steps += op == ops.OPTIM_STEP
            cadence.changes += 1
            cadence.bytes += request_bytes
            cadence.at_once |= at_once
            self._just_ran.add(job)

    def restored(self, placement: Placement, *, changes: int, steps: int, bytes: int) -> None:
        """The job is here now; so much was replayed, and counts as if it had been run here."""
        # Two generations of journal and the queue share what a job may have in Redis.
        limit = min(self._bytes, placement.max_bytes // 4)
        self._cadence[placement.job] = _Cadence(limit, changes=changes, steps=steps, bytes=bytes)

    def forget(self, job: str) -> None:
        self._cadence.pop(job, None)
        self._busy.discard(job)

    def take_due(self, lanes: Lanes) -> None:
        """Copy the state of the jobs whose turn it is. Called between cycles, when every state is whole."""
        self._note_ended()
        while self._leaving:
            lane, then = self._leaving.popleft()
            if self._is_saved(lane):
                then()
            else:
                self._take(lane, lambda then=then: then())
        now = time.monotonic()
        candidates, self._just_ran = self._just_ran, set()
        if now >= self._look_again_at:
            self._look_again_at = now + LOOK_SECONDS
            candidates = set(self._cadence)
        for job in candidates:
            cadence = self._cadence.get(job)
            if cadence is None or job in self._busy or not self._is_due(cadence, now):
                continue
            lane = lanes.get(job)
            if lane is not None and lane.applied is not None and job in self._engine.jobs:
                self._take(lane, lambda: None)

    def _note_ended(self) -> None:
        while not self._ended.empty():
            self._ended.get()()

    def _is_due(self, cadence: _Cadence, now: float) -> bool:
        if not cadence.changes or now < cadence.retry_at:
            return False
        if cadence.at_once or cadence.bytes >= cadence.max_bytes * self._pressure:
            return True
        often_enough = cadence.steps < self._steps and now - cadence.taken_at < self._seconds
        return not often_enough and now >= cadence.rest_until

    def _is_saved(self, lane: Lane) -> bool:
        cadence = self._cadence.get(lane.job)
        unchanged = cadence is None or (not cadence.changes and lane.job not in self._busy)
        return unchanged or lane.job not in self._engine.jobs

    def _take(self, lane: Lane, then: Callable[[], None]) -> None:
        """`then` runs on the writer thread, whether the snapshot could be written or not."""
        assert lane.applied is not None
        job = lane.job
        taken = self._cadence[job]
        fresh = self._cadence[job] = _Cadence(taken.max_bytes)
        self._busy.add(job)
        state = self._engine.state(job)

        def ended(seconds: float | None) -> None:
            self._busy.discard(job)
            now = time.monotonic()
            if seconds is not None:
                fresh.rest_until = now + seconds * COST_RATIO
                return
            fresh.retry_at = now + RETRY_SECONDS
            fresh.steps += taken.steps
            fresh.changes += taken.changes
            fresh.bytes += taken.bytes
            fresh.at_once |= taken.at_once

        def written(seconds: float | None) -> None:
            self._ended.put(lambda: ended(seconds))
            then()

        origin = Origin(f"{job}.{lane.applied}", state.base_model, state.lora, state.step, state.user_metadata)
        self._queue.put(_Copy(job, lane.epoch, lane.applied, training_state.write_state(state), origin, written))

    def load(self, engine: Engine, placement: Placement, ref: str) -> None:
        """Put a job's snapshot into the engine. Raises ServiceError if it is not exactly what was written."""
        path, _, fingerprint = ref.partition("#")
        try:
            if self._fingerprint(CheckpointPath.parse(path)) != fingerprint:
                raise ServiceError(f"the manifest of snapshot {path} is not the one that was written")
            manifest, checkpoint = self._store.load(CheckpointPath.parse(path))
            request = CreateModelRequest.model_validate_json(placement.spec)
            fresh = request.model_copy(update={"lora": manifest.lora, "from_checkpoint": None})
            engine.create_model(placement.job, fresh)
            training_state.read_state(engine.state(placement.job), checkpoint, manifest, optimizer=True)
        except (LorryError, OSError) as error:
            raise ServiceError(str(error)) from error

    # ------------------------------------------------------------------------------------------ leaving this worker

    def save_when_clean(self, lane: Lane, then: Callable[[], None]) -> None:
        """The clock saves the lane between two cycles; then `then` is called."""
        self._leaving.append((lane, then))

    def save_now(self, lane: Lane) -> None:
        """Save and wait until it is written; only when no clock runs any more."""
        self._note_ended()
        if lane.applied is not None and not self._is_saved(lane):
            done = threading.Event()
            self._take(lane, done.set)
            done.wait()

    # --------------------------------------------------------------------------------------------- the writer thread

    def _write_all(self) -> None:
        while True:
            copy = self._queue.get()
            if copy is None:
                return
            started, ok = time.monotonic(), False
            try:
                ok = self._write(copy)
            except (LorryError, RedisError, OSError):
                # The job goes on: its older snapshot and the longer journal still hold everything.
                log.exception("snapshot of job %s after op %d failed; trying again later", copy.job, copy.seq)
            finally:
                copy.written(time.monotonic() - started if ok else None)

    def _write(self, copy: _Copy) -> bool:
        path = CheckpointPath(copy.job, "weights", f"{copy.seq}-{copy.epoch}")
        self._store.save(path, copy.content, copy.origin, overwrite=True)
        ref = f"{path}#{self._fingerprint(path)}"
        answer = "gap"
        for _ in range(100):
            answer, freed, kept = self._mailbox.snapshot(copy.job, self._worker, copy.epoch, copy.seq, ref)
            if answer != "gap":
                break
            time.sleep(0.05)  # its last ops are still on their way to Redis
        if answer == "ok":
            self._tidy(path, copy.epoch, freed, kept)
        else:
            log.info("snapshot %s is not used: the mailbox says %s", path, answer)
            self._remove(path.folders)
        return answer == "ok"

    def _fingerprint(self, path: CheckpointPath) -> str:
        return hashlib.sha256(self._store.root.joinpath(*path.folders, MANIFEST).read_bytes()).hexdigest()

    def _tidy(self, path: CheckpointPath, epoch: str, freed: str, kept: str) -> None:
        """Delete the freed snapshot, and what earlier owners left unfinished when they died.

        Never by the rule "all but mine": if this worker is frozen right here, others may be newer when it thaws.
        """
        job_folder, kind, _ = path.folders
        freed_name, kept_name = (CheckpointPath.parse(r.partition("#")[0]).name if r else "" for r in (freed, kept))
        for folder in list((self._store.root / job_folder / kind).iterdir()):
            found = _FOLDER.fullmatch(folder.name)
            leftover = found is not None and int(found["epoch"]) < int(epoch)
            if folder.name != kept_name and (leftover or folder.name == freed_name):
                shutil.rmtree(folder, ignore_errors=True)

    def remove_jobs(self, jobs: list[str]) -> None:
        """The snapshots of jobs that are no more."""
        for job in jobs:
            shutil.rmtree(self._store.root / folder_name(job), ignore_errors=True)

    def _remove(self, folders: tuple[str, ...]) -> None:
        """A snapshot, and the job's folder if it was the last."""
        folder = self._store.root.joinpath(*folders)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            folder.parent.rmdir()
            folder.parent.parent.rmdir()
