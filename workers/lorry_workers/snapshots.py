"""Snapshots: a job's whole state on disk, so that its journal can be short and another worker can go on.

The clock's thread copies the state; a writer thread puts it into the store and then moves the job's snapshot
pointer in the mailbox, fenced by the epoch. A snapshot that lost that race is just a folder that nothing names.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import LorryError, StateRolledBack
from lorry_jobs.mailbox import Mailbox, Placement
from lorry_jobs.types import CreateModelRequest

from .engine import training_state
from .engine.checkpoints import Checkpoint, CheckpointStore, Origin
from .engine.engine import Engine
from .lanes import Lane, Lanes
from .settings import WorkerSettings

log = logging.getLogger(__name__)

_CHANGING = frozenset({ops.CREATE_MODEL, ops.FORWARD_BACKWARD, ops.OPTIM_STEP, ops.LOAD_STATE})


@dataclass
class _Cadence:
    """What happened to a job since its last snapshot was taken."""

    steps: int = 0
    changes: int = 0
    taken_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Job:
    """A copy of a job's state after op `seq`, on its way to the disk."""

    job: str
    epoch: str
    seq: int
    content: Checkpoint
    origin: Origin
    written: Callable[[bool], None]


class Snapshots:
    def __init__(self, engine: Engine, mailbox: Mailbox, worker: str, settings: WorkerSettings) -> None:
        self.ttl = settings.result_ttl_seconds
        self._engine, self._mailbox, self._worker = engine, mailbox, worker
        self._steps, self._seconds = settings.snapshot_steps, settings.snapshot_seconds
        self._store = CheckpointStore(settings.store_dir / "snapshots")
        self._cadence: dict[str, _Cadence] = {}
        self._leaving: list[tuple[Lane, Callable[[], None]]] = []
        self._busy: set[str] = set()
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._write_all, name="lorry-snapshots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    # ---------------------------------------------------------------------------------------- the clock's thread

    def ran(self, job: str, op: str) -> None:
        cadence = self._cadence.setdefault(job, _Cadence())
        cadence.steps += op == ops.OPTIM_STEP
        cadence.changes += op in _CHANGING

    def restored(self, placement: Placement) -> None:
        replayed = placement.committed - placement.snapshot
        self._cadence[placement.job] = _Cadence(changes=replayed)

    def forget(self, job: str) -> None:
        self._cadence.pop(job, None)
        self._busy.discard(job)

    def take_due(self, lanes: Lanes) -> None:
        """Copy the state of the jobs whose turn it is. Called between cycles, when every state is whole."""
        leaving, self._leaving = self._leaving, []
        for lane, then in leaving:
            self._take(lane, lambda ok, then=then: then())
        now = time.monotonic()
        for job, cadence in list(self._cadence.items()):
            due = cadence.steps >= self._steps or (cadence.changes and now - cadence.taken_at >= self._seconds)
            lane = lanes.get(job) if due and job not in self._busy else None
            if lane is not None and lane.applied is not None and job in self._engine.jobs:
                self._take(lane, lambda ok: None)

    def _take(self, lane: Lane, then: Callable[[bool], None]) -> None:
        assert lane.applied is not None
        job = lane.job
        cadence = self._cadence[job] = _Cadence()
        if job not in self._engine.jobs:  # create_model failed: there is nothing to save
            then(True)
            return
        self._busy.add(job)
        state = self._engine.state(job)

        def written(ok: bool) -> None:
            self._busy.discard(job)
            if not ok:
                cadence.changes += 1  # not saved: due again after the usual time
            then(ok)

        origin = Origin(f"{job}.{lane.applied}", state.base_model, state.lora, state.step, state.user_metadata)
        self._queue.put(_Job(job, lane.epoch, lane.applied, training_state.write_state(state), origin, written))

    def load(self, engine: Engine, placement: Placement) -> None:
        """Put a job's snapshot into the engine. Raises StateRolledBack if it is damaged or gone."""
        path = CheckpointPath.parse(placement.snapshot_ref)
        try:
            manifest, checkpoint = self._store.load(path)
            request = CreateModelRequest.model_validate_json(placement.spec)
            fresh = request.model_copy(update={"lora": manifest.lora, "from_checkpoint": None})
            engine.create_model(placement.job, fresh)
            training_state.read_state(engine.state(placement.job), checkpoint, manifest, optimizer=True)
        except LorryError as error:
            raise StateRolledBack(
                f"the snapshot after op {placement.snapshot} cannot be used ({error.message}), and the journal before "
                "it is gone. Create a new client from a checkpoint",
                job=placement.job,
            ) from error

    # ------------------------------------------------------------------------------------------ leaving this worker

    def save_when_clean(self, lane: Lane, then: Callable[[], None]) -> None:
        """The clock saves the lane between two cycles; `then` runs (on the writer thread) once that is on disk."""
        self._leaving.append((lane, then))

    def save_now(self, lane: Lane) -> None:
        """Save in the background and return; only when no clock runs any more. `stop` waits for it."""
        cadence = self._cadence.get(lane.job)
        if cadence is None or not cadence.changes or lane.applied is None:
            return
        done = threading.Event()
        self._take(lane, lambda ok: done.set())
        done.wait()

    # --------------------------------------------------------------------------------------------- the writer thread

    def _write_all(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            ok = False
            try:
                ok = self._write(item)
            except (LorryError, RedisError, OSError):
                # The job goes on: its older snapshot and the longer journal still hold everything.
                log.exception("snapshot of job %s after op %d failed; trying again later", item.job, item.seq)
            finally:
                item.written(ok)

    def _write(self, item: _Job) -> bool:
        path = CheckpointPath(item.job, "weights", f"{item.seq}-{item.epoch}")
        self._store.save(path, item.content, item.origin, overwrite=True)
        answer = self._mailbox.snapshot(item.job, self._worker, item.epoch, item.seq, str(path))
        for _ in range(100):  # its last ops may still be on their way to Redis
            if answer != "gap":
                break
            time.sleep(0.05)
            answer = self._mailbox.snapshot(item.job, self._worker, item.epoch, item.seq, str(path))
        if answer == "ok":
            self._remove_others(path)
        else:
            log.warning("snapshot %s is not used: the mailbox says %s", path, answer)
            self._remove(path.folders)
        return answer == "ok"

    def _remove_others(self, kept: CheckpointPath) -> None:
        job_folder, kind, name = kept.folders
        for folder in (self._store.root / job_folder / kind).iterdir():
            if folder.name != name:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove(self, folders: tuple[str, ...]) -> None:
        shutil.rmtree(self._store.root.joinpath(*folders), ignore_errors=True)
