"""Checkpoints in an object store (s3://, gs://, memory:// and whatever else fsspec knows).

    <url>/<job>/weights/<name>/manifest.json            names the folder of the files, and vouches for them
    <url>/<job>/weights/<name>/<folder>/adapter_model.safetensors, ...
    <url>/<job>/weights/<name>/lifetime.json            once its TTL or pin was changed

An object store cannot rename a folder, but it puts one object as a whole. So the files of each save go into a folder
of their own, and the manifest comes last: until then the old checkpoint is there, from then on the new one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec

from lorry_jobs.checkpoint_paths import KINDS, CheckpointPath, name_of_folder
from lorry_jobs.errors import LorryError, ServiceError, UserError
from lorry_jobs.settings import masked_url

from .checkpoint_format import LIFETIME, MANIFEST, Lifetime, Manifest, Origin, make_manifest, read_manifest
from .store import Store


class ObjectStore(Store[str]):
    """`url` may carry what fsspec understands. Needs the library of its protocol (s3fs, gcsfs, ...)."""

    def __init__(self, url: str) -> None:
        try:
            self.fs, self.root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"LORRY_STORE={masked_url(url)} cannot be opened: {error}") from error
        self.root = self.root.rstrip("/")

    def paths(self) -> Iterator[CheckpointPath]:
        for job in self._folders(self.root):
            for kind in KINDS:
                for name in self._folders(f"{self.root}/{job}/{kind}"):
                    if self._read_if_there(f"{self.root}/{job}/{kind}/{name}/{MANIFEST}") is None:
                        continue
                    try:
                        yield CheckpointPath(name_of_folder(job), kind, name_of_folder(name))
                    except UserError:  # somebody else's folder
                        continue

    def tidy(self, age_seconds: float) -> int:
        removed = 0
        for job in self._folders(self.root):
            for kind in KINDS:
                for name in self._folders(f"{self.root}/{job}/{kind}"):
                    removed += self._tidy(f"{self.root}/{job}/{kind}/{name}", age_seconds)
        return removed

    def _tidy(self, base: str, age_seconds: float) -> int:
        removed = 0
        for folder in self._folders(base):
            started = folder.partition("-")[0]
            if not started.isdecimal() or time.time() - int(started) < age_seconds:
                continue
            content = self._read_if_there(f"{base}/{MANIFEST}")
            if content is None or read_manifest(f"{base}/{MANIFEST}", content, None).folder != folder:
                self._remove_folder(f"{base}/{folder}")
                removed += 1
        return removed

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
        base = self._base(path)
        folder = f"{int(time.time())}-{uuid.uuid4().hex[:12]}"
        pinned = present is not None and present.pinned
        manifest = make_manifest(path, contents, origin, ttl_seconds=ttl_seconds, pinned=pinned, folder=folder)
        with _storage_errors(f"cannot save {path}"):
            try:
                for name, content in contents.items():
                    self._put(f"{base}/{folder}/{name}", content)
                self._put(f"{base}/{MANIFEST}", manifest.model_dump_json(indent=2).encode())
            except Exception:
                self._remove_folder(f"{base}/{folder}")
                raise
        if present is not None and present.folder is not None:
            self._remove_folder(f"{base}/{present.folder}")
        return manifest

    def _write_lifetime(self, place: str, lifetime: Lifetime) -> None:
        base = place.rpartition("/")[0]
        with _storage_errors(f"cannot change {base}"):
            self._put(f"{base}/{LIFETIME}", lifetime.model_dump_json(indent=2).encode())

    def _remove(self, path: CheckpointPath) -> None:
        base = self._base(path)
        with _storage_errors(f"cannot delete {path}"):
            self.fs.rm_file(f"{base}/{MANIFEST}")
            self.fs.invalidate_cache()
            self.fs.rm(base, recursive=True)

    def _put(self, key: str, content: bytes) -> None:
        self.fs.makedirs(key.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(key, content)

    def _remove_folder(self, folder: str) -> None:
        """What cannot be removed now is removed by `tidy`."""
        try:
            self.fs.invalidate_cache()
            self.fs.rm(folder, recursive=True)
        except Exception:  # noqa: BLE001  each storage has errors of its own
            return

    # ------------------------------------------------------------------------------------------------- reading

    def _locate(self, path: CheckpointPath) -> tuple[str, Manifest] | None:
        base = self._base(path)
        with _storage_errors(f"cannot read {path}"):
            content = self._read_if_there(f"{base}/{MANIFEST}")
            if content is None:
                return None
            lifetime = self._read_if_there(f"{base}/{LIFETIME}")
        manifest = read_manifest(f"{base}/{MANIFEST}", content, lifetime)
        return f"{base}/{manifest.folder}", manifest

    def _place(self, path: CheckpointPath, manifest: Manifest) -> str:
        return f"{self._base(path)}/{manifest.folder}"  # a manifest's files never change

    def _read_file(self, place: str, name: str, offset: int = 0, size: int | None = None) -> bytes:
        with _storage_errors(f"cannot read {place}/{name}"):
            end = None if size is None else offset + size
            content: bytes = self.fs.cat_file(f"{place}/{name}", start=offset, end=end)
            return content

    def _read_if_there(self, key: str) -> bytes | None:
        try:
            content: bytes = self.fs.cat_file(key)
        except FileNotFoundError:
            return None
        return content

    def _folders(self, parent: str) -> list[str]:
        with _storage_errors(f"cannot list {parent}"):
            self.fs.invalidate_cache()
            try:
                entries: list[dict[str, Any]] = self.fs.ls(parent, detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"
            )

    def _base(self, path: CheckpointPath) -> str:
        return "/".join((self.root, *path.folders))


@contextmanager
def _storage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except LorryError:
        raise
    except Exception as error:  # each storage has errors of its own
        raise ServiceError(f"{what}: {error}") from error
