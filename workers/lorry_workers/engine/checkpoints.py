"""Checkpoints on a local disk: whole or not there.

    <store>/<job>/weights/<name>/            manifest.json   sizes, sha256, created, base model, ...
                                             adapter_model.safetensors, adapter_config.json   (peft's own)
                                             optimizer.safetensors, state.json
    <store>/<job>/sampler_weights/<name>/    the same without the last line

A checkpoint is written to a hidden folder, every file is flushed to the disk, the manifest last, and the
folder is renamed. To replace one, the old folder first becomes `.replaced-<name>`: readers use that one
until the new folder is there, so at every moment, and after a crash at any moment, there is one to read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lorry_jobs.checkpoint_paths import CheckpointPath, Kind
from lorry_jobs.errors import CheckpointExists, CheckpointNotFound, ServiceError, UserError
from lorry_jobs.types import LoraConfig, LorryModel

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"


class FileEntry(LorryModel):
    size: int
    sha256: str


class Manifest(LorryModel):
    """What is in a checkpoint and where it came from. `op_id` is the op that wrote it."""

    version: int = 1
    job: str
    kind: Kind
    name: str
    op_id: str
    created: datetime
    expires: datetime | None = None
    base_model: str
    lora: LoraConfig
    step: int
    user_metadata: dict[str, str] = {}
    files: dict[str, FileEntry]

    @property
    def path(self) -> CheckpointPath:
        return CheckpointPath(self.job, self.kind, self.name)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= datetime.now(UTC)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's content. `optimizer` and `state` are there for kind "weights" only."""

    adapter: dict[str, Tensor]
    adapter_config: dict[str, Any]
    optimizer: dict[str, Tensor] | None = None
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Origin:
    """What a manifest says beside the files."""

    op_id: str
    base_model: str
    lora: LoraConfig
    step: int
    user_metadata: Mapping[str, str]


class CheckpointStore:
    def __init__(self, root: Path) -> None:
        self.root = root

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
        (and has not expired) raises `CheckpointExists` unless `overwrite`.
        """
        located = self._locate(path)
        expired = located is not None and located[1].expired
        if located is not None and not expired:
            present = located[1]
            if present.op_id == origin.op_id:
                return present
            if not overwrite:
                raise CheckpointExists(f"{path} exists already; choose another name or save with overwrite=True")
        folder = self._folder(path)
        writing = folder.parent / f".writing-{folder.name[:100]}-{uuid.uuid4().hex[:12]}"
        with _service_errors(f"cannot save {path}"):
            try:
                writing.mkdir(parents=True)
                manifest = self._write(writing, path, checkpoint, origin, ttl_seconds)
                self._publish(writing, folder, path, replace=overwrite or expired)
            except BaseException:
                shutil.rmtree(writing, ignore_errors=True)
                raise
        return manifest

    def find(self, path: CheckpointPath) -> Manifest | None:
        """The manifest of `path`, or None if there is no checkpoint or it has expired."""
        found = self._locate(path)
        return None if found is None or found[1].expired else found[1]

    def manifest(self, path: CheckpointPath) -> Manifest:
        found = self._locate(path)
        if found is None:
            raise CheckpointNotFound(f"there is no checkpoint {path}")
        if found[1].expired:
            raise CheckpointNotFound(f"{path} expired at {found[1].expires}")
        return found[1]

    def load(self, path: CheckpointPath) -> tuple[Manifest, Checkpoint]:
        """The content of `path`, each file checked against its sha256."""
        while True:
            manifest = self.manifest(path)
            try:
                return manifest, self._read(path, manifest)
            except ServiceError:
                # Replaced while it was read? Then the new one is read instead.
                latest = self.find(path)
                if latest is None or latest.op_id == manifest.op_id:
                    raise

    def _read(self, path: CheckpointPath, manifest: Manifest) -> Checkpoint:
        found = self._locate(path)
        folder = found[0] if found is not None else self._folder(path)
        files = {name: _read_verified(folder, name, entry) for name, entry in manifest.files.items()}
        with _service_errors(f"{path} is damaged"):
            return Checkpoint(
                adapter=safetensors.torch.load(files[ADAPTER]),
                adapter_config=json.loads(files[ADAPTER_CONFIG]),
                optimizer=safetensors.torch.load(files[OPTIMIZER]) if OPTIMIZER in files else None,
                state=json.loads(files[STATE]) if STATE in files else None,
            )

    def _write(
        self,
        writing: Path,
        path: CheckpointPath,
        checkpoint: Checkpoint,
        origin: Origin,
        ttl_seconds: int | None,
    ) -> Manifest:
        contents = {
            ADAPTER: safetensors.torch.save(checkpoint.adapter, {"format": "pt"}),
            ADAPTER_CONFIG: _json_bytes(checkpoint.adapter_config),
        }
        if checkpoint.optimizer is not None:
            contents[OPTIMIZER] = safetensors.torch.save(checkpoint.optimizer, {"format": "pt"})
        if checkpoint.state is not None:
            contents[STATE] = _json_bytes(checkpoint.state)
        for name, content in contents.items():
            _write_file(writing / name, content)
        created = datetime.now(UTC)
        manifest = Manifest(
            job=path.job,
            kind=path.kind,
            name=path.name,
            op_id=origin.op_id,
            created=created,
            expires=created + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None,
            base_model=origin.base_model,
            lora=origin.lora,
            step=origin.step,
            user_metadata=dict(origin.user_metadata),
            files={
                name: FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())
                for name, content in contents.items()
            },
        )
        _write_file(writing / MANIFEST, manifest.model_dump_json(indent=2).encode())
        _flush_folder(writing)
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

    def _locate(self, path: CheckpointPath) -> tuple[Path, Manifest] | None:
        folder = self._folder(path)
        for place in (folder, _replaced(folder), folder):  # again: it may have been replaced in between
            with _service_errors(f"cannot read {path}"):
                try:
                    content = (place / MANIFEST).read_bytes()
                except (FileNotFoundError, NotADirectoryError):
                    continue
                return place, _read_manifest(place, content)
        return None

    def _folder(self, path: CheckpointPath) -> Path:
        return self.root.joinpath(*path.folders)


def _replaced(folder: Path) -> Path:
    return folder.parent / f".replaced-{folder.name}"


def _read_manifest(place: Path, content: bytes) -> Manifest:
    try:
        return Manifest(**json.loads(content))
    except (UserError, TypeError) as error:
        raise ServiceError(f"{place / MANIFEST} is damaged: {error}") from error


def _read_verified(folder: Path, name: str, entry: FileEntry) -> bytes:
    file = folder / name
    with _service_errors(f"cannot read {file}"):
        content = file.read_bytes()
    if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ServiceError(
            f"{file} is damaged: it has {len(content)} bytes and not the sha256 that its manifest has for it "
            f"({entry.size} bytes); restore it or load another checkpoint"
        )
    return content


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


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


@contextmanager
def _service_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ServiceError(f"{what}: {error}") from error
