"""Checkpoints on a local disk: whole or not there.

    <store>/<job>/weights/<name>/            manifest.json   sizes, sha256, created, base model, ...
                                             adapter_model.safetensors, adapter_config.json   (peft's own)
                                             optimizer.safetensors, state.json
                                             lifetime.json   once its TTL or pin was changed
    <store>/<job>/sampler_weights/<name>/    the same without optimizer and state

A checkpoint is written to a hidden folder, every file is flushed to the disk, the manifest last, and the
folder is renamed. To replace one, the old folder first becomes `.replaced-<name>`: readers use that one
until the new folder is there, so at every moment, and after a crash at any moment, there is one to read.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from lorry_jobs.checkpoint_paths import KINDS, CheckpointPath, name_of_folder
from lorry_jobs.errors import CheckpointExists, UserError

from .checkpoint_format import (
    ADAPTER,
    LIFETIME,
    MANIFEST,
    OPTIMIZER,
    Checkpoint,
    Lifetime,
    Manifest,
    Origin,
    make_manifest,
    read_manifest,
    service_errors,
)
from .store import Store

__all__ = ["ADAPTER", "MANIFEST", "OPTIMIZER", "Checkpoint", "CheckpointStore", "Manifest", "Origin"]

_WRITING, _REPLACED, _DELETED = ".writing-", ".replaced-", ".deleted-"


class CheckpointStore(Store[Path]):
    """`root` may be on a file system that all workers share. It is made at the first save."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self) -> Iterator[CheckpointPath]:
        for job in _folders(self.root):
            for kind in KINDS:
                names = {folder.name.removeprefix(_REPLACED) for folder in _folders(self.root / job.name / kind)}
                for name in sorted(name for name in names if not name.startswith(".")):
                    try:
                        yield CheckpointPath(name_of_folder(job.name), kind, name_of_folder(name))
                    except UserError:  # somebody else's folder
                        continue

    def tidy(self, age_seconds: float) -> int:
        removed = 0
        for job in _folders(self.root):
            for kind in KINDS:
                for folder in _folders(self.root / job.name / kind):
                    removed += self._tidy(folder, age_seconds)
        return removed

    def _tidy(self, folder: Path, age_seconds: float) -> bool:
        with service_errors(f"cannot tidy {folder}"):
            # A rename changes the ctime and nothing else.
            if not folder.name.startswith(".") or time.time() - folder.stat().st_ctime < age_seconds:
                return False
            current = folder.with_name(folder.name.removeprefix(_REPLACED))
            if folder.name.startswith(_REPLACED) and not current.exists() and (folder / MANIFEST).exists():
                folder.rename(current)  # the replacement never came
                return False
            if not folder.name.startswith((_WRITING, _REPLACED, _DELETED)):
                return False
            shutil.rmtree(folder, ignore_errors=True)
            return True

    # ------------------------------------------------------------------------------------------------- writing

    def _write(
        self,
        path: CheckpointPath,
        contents: Mapping[str, bytes],
        origin: Origin,
        ttl_seconds: int | None,
        present: Manifest | None,
        overwrite: bool,
    ) -> Manifest:
        folder = self._folder(path)
        writing = folder.parent / f"{_WRITING}{folder.name[:100]}-{uuid.uuid4().hex[:12]}"
        pinned = present is not None and present.pinned
        expired = present is not None and present.expired
        with service_errors(f"cannot save {path}"):
            try:
                writing.mkdir(parents=True)
                for name, content in contents.items():
                    _write_file(writing / name, content)
                manifest = make_manifest(path, contents, origin, ttl_seconds=ttl_seconds, pinned=pinned)
                _write_file(writing / MANIFEST, manifest.model_dump_json(indent=2, exclude_none=True).encode())
                _flush_folder(writing)
                self._publish(writing, folder, path, replace=overwrite or expired)
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)
                raise
        return manifest

    def _publish(self, writing: Path, folder: Path, path: CheckpointPath, *, replace: bool) -> None:
        replaced = _replaced(folder)
        replacing = replace and folder.exists()
        if replacing:
            shutil.rmtree(replaced, ignore_errors=True)
            folder.rename(replaced)
        try:
            writing.rename(folder)
        except OSError as error:
            if replacing:
                replaced.rename(folder)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise CheckpointExists(f"{path} was saved by another op meanwhile") from error
            raise
        _flush_folder(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _write_lifetime(self, place: Path, lifetime: Lifetime) -> None:
        with service_errors(f"cannot change {place}"):
            new = place / f".{LIFETIME}-{uuid.uuid4().hex[:12]}"
            _write_file(new, lifetime.model_dump_json(indent=2).encode())
            new.replace(place / LIFETIME)
            _flush_folder(place)

    def _remove(self, path: CheckpointPath) -> None:
        folder = self._folder(path)
        with service_errors(f"cannot delete {path}"):
            for place in (_replaced(folder), folder):  # in this order: the replaced one must not come back
                gone = folder.parent / f"{_DELETED}{folder.name[:100]}-{uuid.uuid4().hex[:12]}"
                try:
                    place.rename(gone)
                except FileNotFoundError:
                    continue
                shutil.rmtree(gone, ignore_errors=True)
            _flush_folder(folder.parent)

    # ------------------------------------------------------------------------------------------------- reading

    def _locate(self, path: CheckpointPath) -> tuple[Path, Manifest] | None:
        folder = self._folder(path)
        for place in (folder, _replaced(folder), folder):  # again: it may have been replaced in between
            with service_errors(f"cannot read {path}"):
                content = _read_if_there(place / MANIFEST)
                if content is None:
                    continue
                lifetime = _read_if_there(place / LIFETIME)
            return place, read_manifest(str(place / MANIFEST), content, lifetime)
        return None

    def _read_file(self, place: Path, name: str, offset: int = 0, size: int | None = None) -> bytes:
        file = place / name
        with service_errors(f"cannot read {file}"), file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(-1 if size is None else size)

    def _folder(self, path: CheckpointPath) -> Path:
        return self.root.joinpath(*path.folders)


def _replaced(folder: Path) -> Path:
    return folder.parent / f"{_REPLACED}{folder.name}"


def _folders(parent: Path) -> list[Path]:
    with service_errors(f"cannot list {parent}"):
        try:
            return sorted(entry for entry in parent.iterdir() if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []


def _read_if_there(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _write_file(file: Path, content: bytes) -> None:
    with file.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
