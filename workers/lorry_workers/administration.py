"""What is done to checkpoints where the store is: change, delete, read, merge, reindex.

These requests run on Celery's pool threads beside the clock. They touch files, Redis and frozen base weights, and
never the engine's jobs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.checkpoint_index import CheckpointIndex
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import CheckpointNotFound, ServiceError, UserError
from lorry_jobs.types import (
    ChangeCheckpointRequest,
    DeleteCheckpointRequest,
    MergeCheckpointRequest,
    MergedModel,
    ReadCheckpointRequest,
    ReindexRequest,
    ReindexResponse,
)

from .committer import Commit
from .engine.engine import Engine
from .executor import Reply
from .lanes import Delivery
from .merge import MergedModels
from .recording import as_failure, failure, success
from .settings import WorkerSettings

log = logging.getLogger(__name__)

USE_SECONDS = 60.0
"""After it was read or sampled from, an expired checkpoint is not deleted for so long."""
PART_TTL_SECONDS = 120
"""Parts of files are large and read at once: they do not stay in Redis for a day, as other results do."""

Found = tuple[dict[str, Any], bytes]


class Administration:
    def __init__(self, engine: Engine, redis: Redis, settings: WorkerSettings) -> None:
        self.index = CheckpointIndex(redis)
        self.merged = MergedModels(engine, settings.store_dir / "merged")
        self._store = engine.store
        self._changing = threading.Lock()
        self._executors: dict[str, Callable[[Any], Found]] = {
            ops.CHECKPOINT_CHANGE: self._change,
            ops.CHECKPOINT_DELETE: self._delete,
            ops.CHECKPOINT_READ: self._read,
            ops.CHECKPOINT_MERGE: self._merge,
            ops.CHECKPOINT_REINDEX: self._reindex,
        }
        engine.on_use = self._note_use

    def run(self, delivery: Delivery) -> Commit:
        """The request's result, ready to be recorded."""
        try:
            if isinstance(delivery.request, Exception):  # its bytes could not be read
                raise delivery.request
            info, output = self._executors[delivery.op](delivery.request)
        except Exception as error:  # noqa: BLE001 (its client is told, and as_failure logs it)
            return failure(delivery, as_failure(error, None, delivery))
        ttl = PART_TTL_SECONDS if delivery.op == ops.CHECKPOINT_READ else None
        return replace(success(delivery, Reply(info, output, _summary(info))), ttl=ttl)

    def _change(self, request: ChangeCheckpointRequest) -> Found:
        path = CheckpointPath.parse(request.path)
        with self._changing:
            manifest = self._store.change(
                path, set_ttl=request.set_ttl, ttl_seconds=request.ttl_seconds, pinned=request.pinned
            )
        self.index.put(manifest.metadata)
        return manifest.metadata.model_dump(mode="json"), b""

    def _delete(self, request: DeleteCheckpointRequest) -> Found:
        path = CheckpointPath.parse(request.path)
        try:
            manifest = self._store.delete(path)
        except CheckpointNotFound:
            self.index.remove(str(path))
            raise
        self.index.remove(str(path))
        log.info("checkpoint %s was deleted on request", path)
        return manifest.metadata.model_dump(mode="json"), b""

    def _read(self, request: ReadCheckpointRequest) -> Found:
        if request.merged is not None:
            part = self.merged.read_part(request.merged, request.file, request.offset, request.size)
            return {}, part
        path = CheckpointPath.parse(request.path)
        self._note_use(path)
        return {}, self._store.read_part(path, request.file, request.offset, request.size, request.op_id)

    def _merge(self, request: MergeCheckpointRequest) -> Found:
        path = CheckpointPath.parse(request.path)
        self._note_use(path)
        merged: MergedModel = self.merged.make(path)
        return merged.model_dump(mode="json"), b""

    def _reindex(self, request: ReindexRequest) -> Found:
        before, found, unreadable = self.index.paths(), set[str](), list[str]()
        added = []
        for path in self._store.paths():
            try:
                manifest = self._store.find(path)
            except ServiceError as error:
                unreadable.append(str(error))
                found.add(str(path))
                continue
            if manifest is None:  # expired
                continue
            text = str(path)
            found.add(text)
            self.index.put(manifest.metadata)
            if text not in before:
                added.append(text)
        removed = []
        for text in sorted(before - found):
            if self._is_gone(text):  # it may have been saved since the store was read
                self.index.remove(text)
                removed.append(text)
        response = ReindexResponse(
            checkpoints=len(found) - len(unreadable), added=added, removed=removed, unreadable=unreadable
        )
        return response.model_dump(mode="json"), b""

    def _is_gone(self, text: str) -> bool:
        try:
            return self._store.find(CheckpointPath.parse(text)) is None
        except (UserError, ServiceError):
            return False

    def _note_use(self, path: CheckpointPath) -> None:
        try:
            self.index.use(str(path), USE_SECONDS)
        except RedisError as error:
            log.warning("could not note that %s is in use: %s", path, error)


def _summary(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in ("path", "checkpoints") if name in info}
