"""A store of checkpoints: what every kind of storage has in common.

A checkpoint is there when its manifest is there, and the manifest comes last. What differs is how a storage makes
many files appear at once: a local disk renames a folder (`checkpoints`), an object store writes the manifest, which
names the folder of the files (`object_store`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import CheckpointExists, CheckpointNotFound, ServiceError, UserError

from .checkpoint_format import (
    MANIFEST,
    Checkpoint,
    Lifetime,
    Manifest,
    Origin,
    check_file,
    decode_files,
    encode_files,
)

Place = TypeVar("Place")

MAX_TRIES = 3
"""So often a version must fail to be read before it counts as damaged."""


class Store(ABC, Generic[Place]):
    """`Place` is where the files of one checkpoint lie. All methods raise ServiceError if the storage fails."""

    def save(
        self,
        path: CheckpointPath,
        checkpoint: Checkpoint,
        origin: Origin,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
    ) -> Manifest:
        """Write `checkpoint`, visible only when it is whole.

        If the op `origin.op_id` wrote it before, that checkpoint is the answer. Any other one that is there
        (and has not expired) raises `CheckpointExists` unless `overwrite`. A pinned name stays pinned.
        """
        located = self._locate(path)
        present = located[1] if located is not None else None
        if present is not None and not present.expired:
            if present.op_id == origin.op_id:
                return present
            if not overwrite:
                raise CheckpointExists(f"{path} exists already; choose another name or save with overwrite=True")
        contents = encode_files(checkpoint)
        return self._write(path, contents, origin, ttl_seconds, present, overwrite)

    def find(self, path: CheckpointPath, *, expired: bool = False) -> Manifest | None:
        """The manifest of `path`, or None if there is no checkpoint or it has expired (unless `expired`)."""
        found = self._locate(path)
        return None if found is None or (found[1].expired and not expired) else found[1]

    def manifest(self, path: CheckpointPath) -> Manifest:
        found = self._locate(path)
        if found is None:
            raise CheckpointNotFound(f"there is no checkpoint {path}")
        if found[1].expired:
            raise CheckpointNotFound(f"{path} expired at {found[1].expires}")
        return found[1]

    def load(self, path: CheckpointPath) -> tuple[Manifest, Checkpoint]:
        """The content of `path`, each file checked against its sha256."""
        tries = 0
        while True:
            manifest = self.manifest(path)
            try:
                return manifest, decode_files(path, self._read_all(path, manifest))
            except ServiceError:
                # Is it being replaced right now? Then the new one is read instead.
                latest = self.find(path)
                tries = tries + 1 if latest is not None and _version(latest) == _version(manifest) else 0
                if latest is None or tries == MAX_TRIES:
                    raise
                time.sleep(0.02)

    def read_part(self, path: CheckpointPath, file: str, offset: int, size: int, op_id: str | None = None) -> bytes:
        """A part of one file, unchecked; "manifest.json" is one. `op_id`: which version of the checkpoint is meant."""
        manifest = self.manifest(path)
        if op_id is not None and manifest.op_id != op_id:
            raise UserError(f"{path} was replaced while it was read; read it again from the start")
        if file == MANIFEST:
            return manifest.model_dump_json(indent=2).encode()[offset : offset + size]
        if file not in manifest.files:
            raise UserError(f"{path} has no file {file!r}; it has {', '.join(manifest.files)}")
        place = self._place(path, manifest)
        return self._read_file(place, file, offset, size)

    def change(
        self,
        path: CheckpointPath,
        *,
        set_ttl: bool = False,
        ttl_seconds: int | None = None,
        pinned: bool | None = None,
    ) -> Manifest:
        """With `set_ttl`: let it expire so many seconds from now, or never (None). `pinned` None: as it is."""
        manifest = self.manifest(path)
        expires, pin = manifest.expires, manifest.pinned if pinned is None else pinned
        if set_ttl:
            expires = datetime.now(UTC) + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None
        lifetime = Lifetime(op_id=manifest.op_id, created=manifest.created, expires=expires, pinned=pin)
        self._write_lifetime(self._place(path, manifest), lifetime)
        return manifest.model_copy(update={"expires": expires, "pinned": pin})

    def delete(self, path: CheckpointPath, *, only: Manifest | None = None) -> Manifest:
        """Refused for a pinned one, and for another version than `only`. The name is free afterwards."""
        manifest = self.find(path, expired=True)
        if manifest is None:
            raise CheckpointNotFound(f"there is no checkpoint {path}")
        if only is not None and (_version(manifest), manifest.expires) != (_version(only), only.expires):
            raise UserError(f"{path} was saved anew or changed meanwhile; it stays")
        if manifest.pinned:
            raise UserError(f"{path} is pinned; unpin it to delete it")
        self._remove(path)
        return manifest

    @abstractmethod
    def paths(self) -> Iterator[CheckpointPath]:
        """Every checkpoint in the store, expired ones too."""

    @abstractmethod
    def tidy(self, age_seconds: float) -> int:
        """Remove what saves and deletions left behind when they were cut off, so long ago; -> how many."""

    # ------------------------------------------------------------------------------------------- of each storage

    @abstractmethod
    def _locate(self, path: CheckpointPath) -> tuple[Place, Manifest] | None: ...

    @abstractmethod
    def _write(
        self,
        path: CheckpointPath,
        contents: Mapping[str, bytes],
        origin: Origin,
        ttl_seconds: int | None,
        present: Manifest | None,
        overwrite: bool,
    ) -> Manifest: ...

    @abstractmethod
    def _write_lifetime(self, place: Place, lifetime: Lifetime) -> None: ...

    @abstractmethod
    def _read_file(self, place: Place, name: str, offset: int = 0, size: int | None = None) -> bytes: ...

    @abstractmethod
    def _remove(self, path: CheckpointPath) -> None: ...

    def _place(self, path: CheckpointPath, manifest: Manifest) -> Place:
        found = self._locate(path)
        if found is None:
            raise ServiceError(f"{path} was deleted meanwhile")
        return found[0]

    def _read_all(self, path: CheckpointPath, manifest: Manifest) -> dict[str, bytes]:
        place = self._place(path, manifest)
        return {
            name: check_file(f"{place}/{name}", self._read_file(place, name), entry)
            for name, entry in manifest.files.items()
        }


def _version(manifest: Manifest) -> tuple[str, datetime]:
    return manifest.op_id, manifest.created
