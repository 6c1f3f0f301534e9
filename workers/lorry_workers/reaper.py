"""The reaper: deletes checkpoints whose TTL is over, and what broken saves left behind.

Every worker runs one, and one worker at a time does the work. What it deletes it judges by the manifest, which is
the truth, and never by the index. A checkpoint that is pinned or in use stays.
"""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import LorryError, UserError

from .engine.store import Store
from .settings import WorkerSettings

if TYPE_CHECKING:
    from .administration import Administration

log = logging.getLogger(__name__)

WARN_SECONDS = 3600.0
"""So long before its end, a checkpoint's expiry is announced in the log."""
TIDY_EVERY_SECONDS = 3600.0
LEFTOVER_SECONDS = 3600.0
"""A save that has not ended after so long was cut off."""
MERGED_SECONDS = 24 * 3600.0
"""So long a merged model waits to be fetched."""


class Reaper:
    def __init__(self, store: Store[Any], administration: Administration, settings: WorkerSettings) -> None:
        self._store, self._index, self._merged = store, administration.index, administration.merged
        self._every = settings.reap_seconds
        self._warned: set[tuple[str, datetime]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lorry-reaper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: a deletion that is cut off is finished by the next reaper."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                if self._index.take_turn("reap", self._every * 0.9):
                    self.reap()
                if self._index.take_turn("tidy", TIDY_EVERY_SECONDS):
                    self.tidy()
            except (LorryError, RedisError, OSError) as error:
                log.warning("expired checkpoints stay for now: %s", error)
            except Exception:  # whatever it is, it must not end the thread without a word
                log.exception("expired checkpoints stay for now")

    def reap(self) -> list[str]:
        """Delete what has expired, warn of what will; -> the paths that went."""
        gone = []
        for metadata in list(self._index.all()):
            left = metadata.ttl
            if left is None:
                continue
            if left > timedelta(0):
                self._warn(metadata.path, metadata.expires, left)
            elif self._delete(metadata.path):
                gone.append(metadata.path)
        self._index.forget_uses()
        return gone

    def tidy(self) -> None:
        """Leftovers, and expired checkpoints that the index does not know."""
        count = self._store.tidy(LEFTOVER_SECONDS) + self._merged.tidy(MERGED_SECONDS)
        if count:
            log.info("removed %d leftovers of saves and deletions that were cut off", count)
        for path in list(self._store.paths()):
            manifest = self._store.find(path, expired=True)
            if manifest is not None and manifest.expired:
                self._delete(str(path))

    def _delete(self, text: str) -> bool:
        path = CheckpointPath.parse(text)
        manifest = self._store.find(path, expired=True)
        if manifest is None:
            self._index.remove(text)
            return False
        if not manifest.expired:  # the index was behind
            self._index.put(manifest.metadata)
            return False
        if self._index.in_use(text):
            log.info("checkpoint %s expired at %s and is in use: it stays until it is not", text, manifest.expires)
            return False
        try:
            self._store.delete(path, only=manifest)
        except UserError as changed:  # by somebody else, since it was looked at
            log.info("checkpoint %s is not reaped: %s", text, changed)
            return False
        self._index.remove(text)
        log.info("checkpoint %s expired at %s and was deleted", text, manifest.expires)
        return True

    def _warn(self, path: str, expires: datetime | None, left: timedelta) -> None:
        if expires is None or left.total_seconds() > WARN_SECONDS or (path, expires) in self._warned:
            return
        self._warned = {(known, when) for known, when in self._warned if when > datetime.now(UTC)}
        self._warned.add((path, expires))
        log.warning(
            "checkpoint %s expires in %.0f min; to keep it: lorry checkpoints pin '%s'",
            path,
            left.total_seconds() / 60,
            path,
        )
