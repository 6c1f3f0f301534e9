"""Finding checkpoints in the index, and having the server change, delete, read or merge them.

What is known of a checkpoint comes from the index in Redis. Its files lie where the workers are; whatever needs them
is a request to a worker.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from lorry_jobs import ops
from lorry_jobs.checkpoint_index import CheckpointIndex
from lorry_jobs.checkpoint_paths import KINDS, SCHEMES, CheckpointPath, Kind, check_name
from lorry_jobs.errors import CheckpointNotFound, ServiceError, ServiceUnavailable, UserError
from lorry_jobs.mailbox import meta_key, output_key
from lorry_jobs.results import Outcome
from lorry_jobs.tensors import LorryModel
from lorry_jobs.types import (
    ChangeCheckpointRequest,
    CheckpointFile,
    CheckpointMetadata,
    DeleteCheckpointRequest,
    MergeCheckpointRequest,
    MergedModel,
    ReadCheckpointRequest,
    ReindexRequest,
    ReindexResponse,
)

if TYPE_CHECKING:
    from .process import ClientProcess

log = logging.getLogger("lorry")
T = TypeVar("T")

PART_BYTES = 4 * 2**20
"""Of a file, in one request."""
SOON = timedelta(hours=1)
MANIFEST = "manifest.json"
ARCHIVES = {".tar": "w", ".tgz": "w:gz", ".tar.gz": "w:gz"}


class Checkpoints:
    """`session`: bare names are looked up among its jobs first, and before that in `job`, if there is one."""

    def __init__(self, process: ClientProcess, session: str, job: str | None = None) -> None:
        self._process, self._session, self.job = process, session, job
        self._index = CheckpointIndex(process.redis)

    # -------------------------------------------------------------------------------------------------- finding

    def find(self, text: str, kinds: Iterable[Kind] | None = None) -> CheckpointMetadata:
        """The checkpoint that a path of any scheme or a bare name means.

        `kinds`: which kinds will do, the best one first. Without it every kind is as good, and a name that is there
        in two kinds is ambiguous.
        """
        wanted = tuple(kinds) if kinds is not None else KINDS
        found = self._candidates(text, wanted)
        if not found:
            raise CheckpointNotFound(
                f"the server knows no checkpoint {text!r}"
                + (f" of kind {' or '.join(wanted)}" if kinds is not None else "")
                + "; `lorry checkpoints list` shows those it knows"
            )
        for scope in (lambda job: job == self.job, lambda job: job.startswith(f"{self._session}:"), lambda job: True):
            near = [each for each in found if scope(each.job)]
            if near:
                break
        jobs = {each.job for each in near}
        if len(jobs) > 1 or (kinds is None and len(near) > 1):
            what = f"{len(jobs)} jobs have one" if len(jobs) > 1 else "it is there in two kinds"
            raise UserError(f"{text!r} is ambiguous: {what}. Give one path: {', '.join(sorted(e.path for e in near))}")
        return min(near, key=lambda each: wanted.index(each.kind))

    def _candidates(self, text: str, kinds: tuple[Kind, ...]) -> list[CheckpointMetadata]:
        if not isinstance(text, str):
            raise UserError(f"a checkpoint is named by a string, not by a {type(text).__name__}")
        scheme, separator, rest = text.partition("://")
        if not separator:
            name = check_name(text)
            return self._alive(lambda: list(self._index.all(name=name)), kinds)
        if scheme in SCHEMES and rest.count("/") == 1:  # <job>/<name>, whichever kind there is
            paths = [CheckpointPath.parse(text, kind=kind) for kind in kinds]
        else:
            paths = [CheckpointPath.parse(text)]
            kinds = KINDS  # it says which one it means
        return self._alive(lambda: [m for path in paths if (m := self._index.get(str(path)))], kinds)

    def _alive(self, read: Callable[[], list[CheckpointMetadata]], kinds: tuple[Kind, ...]) -> list[CheckpointMetadata]:
        return [each for each in self._process.call(read) if each.kind in kinds and not each.expired]

    def to_use(self, text: str, kinds: Iterable[Kind]) -> CheckpointMetadata:
        """`find`, with a warning if there is little time left."""
        found = self.find(text, kinds)
        if found.ttl is not None and found.ttl < SOON:
            log.warning(
                "checkpoint %s expires in %.0f min; pin_checkpoint or set_checkpoint_ttl keeps it",
                found.path,
                found.ttl.total_seconds() / 60,
            )
        return found

    def listed(self, job: str | None = None, kind: Kind | None = None) -> list[CheckpointMetadata]:
        if kind is not None and kind not in KINDS:
            raise UserError(f"a checkpoint's kind is one of {', '.join(KINDS)}, not {kind!r}")
        found = self._alive(lambda: list(self._index.all(job=job)), KINDS if kind is None else (kind,))
        return sorted(found, key=lambda each: (each.created, each.path))

    # ------------------------------------------------------------------------------------------------- changing

    def set_ttl(self, text: str, ttl_hours: float | None, ttl_seconds: float | None) -> CheckpointMetadata:
        if ttl_hours is not None and ttl_seconds is not None:
            raise UserError("give ttl_hours or ttl_seconds, not both")
        seconds = ttl_hours * 3600 if ttl_hours is not None else ttl_seconds
        if seconds is not None and not 1 <= seconds <= 100 * 365 * 86400:
            raise UserError(f"a TTL is between one second and a hundred years, or None for no end; got {seconds} s")
        found = self.find(text)
        ttl = round(seconds) if seconds is not None else None
        return self._change(found, ChangeCheckpointRequest(path=found.path, set_ttl=True, ttl_seconds=ttl))

    def pin(self, text: str, pinned: bool) -> CheckpointMetadata:
        found = self.find(text)
        return self._change(found, ChangeCheckpointRequest(path=found.path, pinned=pinned))

    def _change(self, found: CheckpointMetadata, request: ChangeCheckpointRequest) -> CheckpointMetadata:
        return self._ask(ops.CHECKPOINT_CHANGE, request, _metadata, found.base_model)

    def delete(self, text: str) -> CheckpointMetadata:
        found = self.find(text)
        return self._ask(ops.CHECKPOINT_DELETE, DeleteCheckpointRequest(path=found.path), _metadata, found.base_model)

    def keep_last(self, count: int, job: str, kind: Kind | None) -> list[CheckpointMetadata]:
        if count < 1:
            raise UserError(f"at least the last one is kept, so keep_last must be 1 or more, got {count}")
        deleted = []
        for each in KINDS if kind is None else (kind,):
            unpinned = [found for found in self.listed(job, each) if not found.pinned]
            for found in unpinned[: max(0, len(unpinned) - count)]:
                try:
                    deleted.append(self.delete(found.path))
                except CheckpointNotFound:  # it expired meanwhile
                    continue
        return deleted

    def reindex(self) -> ReindexResponse:
        def response(outcome: Outcome) -> ReindexResponse:
            return ReindexResponse(**_fields(ReindexResponse, outcome))

        return self._ask(ops.CHECKPOINT_REINDEX, ReindexRequest(), response, None)

    # ------------------------------------------------------------------------------------------------- fetching

    def download(self, text: str, target: str | Path | None) -> Path:
        """Into a folder, or into an archive if `target` ends like one."""
        found = self.find(text)
        target = Path(target if target is not None else found.name)
        mode = next((mode for ending, mode in ARCHIVES.items() if target.name.endswith(ending)), None)
        with _new(target) as place:
            folder = place if mode is None else place.with_name(place.name + ".files")
            try:
                self.fetch_files(found, folder)
                if mode is not None:
                    with tarfile.open(place, mode) as archive:  # type: ignore[call-overload]
                        archive.add(folder, arcname=target.name.removesuffix(".gz").rpartition(".")[0])
            finally:
                if mode is not None:
                    shutil.rmtree(folder, ignore_errors=True)
        return target

    def export(self, text: str, target: str | Path | None, merged: bool) -> Path:
        """The adapter as a folder for peft, or merged into its base model as one for transformers."""
        found = self.find(text)
        target = Path(target if target is not None else found.name)
        with _new(target) as folder:
            if merged:
                self._fetch_merged(found, folder)
            else:
                self.fetch_files(found, folder, only=("adapter_model.safetensors", "adapter_config.json"))
        return target

    def fetch_files(self, found: CheckpointMetadata, folder: Path, only: tuple[str, ...] | None = None) -> None:
        """Its files, each checked against its sha256, and without `only` its manifest, too."""
        missing = [name for name in only or () if name not in found.files]
        if missing or not found.files:
            raise ServiceError(
                f"the index names no {' and no '.join(missing) or 'file'} of {found.path}; nothing was written. "
                "`lorry checkpoints reindex` makes the index anew from the store"
            )
        files = {name: entry for name, entry in found.files.items() if only is None or name in only}
        self._fetch_all(found, folder, files, None)
        if only is None:
            request = ReadCheckpointRequest(path=found.path, file=MANIFEST, size=PART_BYTES, op_id=found.op_id)
            (folder / MANIFEST).write_bytes(self._part(request, found.base_model))

    def _fetch_merged(self, found: CheckpointMetadata, folder: Path) -> None:
        def model(outcome: Outcome) -> MergedModel:
            return MergedModel(**_fields(MergedModel, outcome))

        request = MergeCheckpointRequest(path=found.path)
        merged = self._ask(ops.CHECKPOINT_MERGE, request, model, found.base_model, only_there=True)
        self._fetch_all(found, folder, merged.files, merged.id)

    def _fetch_all(
        self, found: CheckpointMetadata, folder: Path, files: dict[str, CheckpointFile], merged: str | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, entry in files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise ServiceError(f"{found.path} lists a file outside of its folder: {name!r}; nothing was written")
            target = folder.joinpath(*path.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            digest, offset = hashlib.sha256(), 0
            with target.open("xb") as stream:
                while offset < entry.size:
                    request = ReadCheckpointRequest(
                        path=found.path, file=name, offset=offset, size=PART_BYTES, op_id=found.op_id, merged=merged
                    )
                    part = self._part(request, found.base_model)
                    if not part:
                        break
                    stream.write(part)
                    digest.update(part)
                    offset += len(part)
            if offset != entry.size or digest.hexdigest() != entry.sha256:
                raise ServiceError(
                    f"{name} of {found.path} is damaged: {offset} bytes of {entry.size} came, and their sha256 is not "
                    "the manifest's. Nothing was kept; try again, or restore the checkpoint"
                )

    def _part(self, request: ReadCheckpointRequest, base_model: str) -> bytes:
        return self._ask(ops.CHECKPOINT_READ, request, lambda outcome: outcome.output or b"", base_model, forget=True)

    # --------------------------------------------------------------------------------------------------- asking

    def _ask(
        self,
        op: str,
        request: LorryModel,
        decode: Callable[[Outcome], T],
        base_model: str | None,
        *,
        only_there: bool = False,
        forget: bool = False,
    ) -> T:
        """One request to a worker, waited for. Any worker sees the store; `only_there`: one of this model is needed."""
        model = base_model if only_there and base_model is not None else self._served_model(base_model)
        future = self._process.submit_request(model, op, request.model_dump_json().encode(), decode)
        answer = future.result()
        if forget:  # it is large, and nobody reads it again
            task = future.task_id
            self._process.call(lambda: self._process.redis.delete(meta_key(task), output_key(task)))
        return answer

    def _served_model(self, preferred: str | None) -> str:
        def read() -> str | None:
            mailbox = self._process.mailbox
            known = sorted(mailbox.models(), key=lambda name: (name != preferred, name))
            return next((name for name in known if mailbox.live_workers(name)), known[0] if known else preferred)

        model = self._process.call(read)
        if model is None:
            raise ServiceUnavailable("no worker was ever started here, and only a worker sees the store: lorry worker")
        return model


@contextmanager
def _new(target: Path) -> Iterator[Path]:
    """A place to write `target` to: it appears when it is whole, and nothing is ever overwritten."""
    if target.exists():
        raise UserError(f"{target} exists already; choose another target")
    target.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{target.name[:50]}-", dir=target.parent))
    try:
        yield room / target.name
        (room / target.name).rename(target)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _metadata(outcome: Outcome) -> CheckpointMetadata:
    return CheckpointMetadata(**_fields(CheckpointMetadata, outcome))


def _fields(model: type[LorryModel], outcome: Outcome) -> dict[str, object]:
    return {name: value for name, value in outcome.info.items() if name in model.model_fields}
