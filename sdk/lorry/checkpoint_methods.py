"""What can be done with saved checkpoints, on a `ServiceClient` and on a `TrainingClient` alike.

A checkpoint is named by a path of any scheme (lorry://<job>/weights/<name>, tinker://, mint://, ...) or by its bare
name. A bare name is looked up in the client's own job, then among the jobs of its session, then everywhere; if
several jobs have one, the error lists them. Each call waits for its result; awaiting an `_async` twin gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lorry_jobs.checkpoint_paths import Kind
from lorry_jobs.errors import UserError
from lorry_jobs.types import CheckpointMetadata, ReindexResponse

from .background import in_background
from .checkpoints import Checkpoints
from .futures import Submission
from .process import ClientProcess
from .publish import PublishedCheckpoint, publish
from .settled import settle

T = TypeVar("T")


class CheckpointMethods:
    _process: ClientProcess
    _checkpoints: Checkpoints

    def list_checkpoints(self, job: str | None = None, kind: Kind | None = None) -> list[CheckpointMetadata]:
        """The checkpoints of one job (a training client's own by default) or of all, the oldest first.

        `kind`: "weights" (training states) or "sampler_weights". Expired ones are left out.
        """
        return self._checkpoints.listed(job or self._checkpoints.job, kind)

    def list_checkpoints_async(
        self, job: str | None = None, kind: Kind | None = None
    ) -> Submission[list[CheckpointMetadata]]:
        return self._later("list_checkpoints", lambda: self.list_checkpoints(job, kind))

    def get_checkpoint_metadata(self, name: str) -> CheckpointMetadata:
        """Size in bytes, creation time, time to live, base model, rank, step. Raises CheckpointNotFound."""
        return settle(self._checkpoints.find(name))

    def get_checkpoint_metadata_async(self, name: str) -> Submission[CheckpointMetadata]:
        return self._later("get_checkpoint_metadata", lambda: self._checkpoints.find(name))

    def set_checkpoint_ttl(
        self, name: str, ttl_hours: float | None = None, ttl_seconds: float | None = None
    ) -> CheckpointMetadata:
        """Let a checkpoint expire so long from now; with neither, it stays for ever. Returns its new metadata."""
        return settle(self._checkpoints.set_ttl(name, ttl_hours, ttl_seconds))

    def set_checkpoint_ttl_async(
        self, name: str, ttl_hours: float | None = None, ttl_seconds: float | None = None
    ) -> Submission[CheckpointMetadata]:
        return self._later("set_checkpoint_ttl", lambda: self._checkpoints.set_ttl(name, ttl_hours, ttl_seconds))

    def pin_checkpoint(self, name: str) -> CheckpointMetadata:
        """A pinned checkpoint neither expires nor can be deleted or pruned, until it is unpinned."""
        return settle(self._checkpoints.pin(name, True))

    def pin_checkpoint_async(self, name: str) -> Submission[CheckpointMetadata]:
        return self._later("pin_checkpoint", lambda: self._checkpoints.pin(name, True))

    def unpin_checkpoint(self, name: str) -> CheckpointMetadata:
        """Undo `pin_checkpoint`. A TTL that it had counts again."""
        return settle(self._checkpoints.pin(name, False))

    def unpin_checkpoint_async(self, name: str) -> Submission[CheckpointMetadata]:
        return self._later("unpin_checkpoint", lambda: self._checkpoints.pin(name, False))

    def delete_checkpoint(self, name: str) -> CheckpointMetadata:
        """Delete a checkpoint now; -> what it was. A pinned one raises UserError."""
        return settle(self._checkpoints.delete(name))

    def delete_checkpoint_async(self, name: str) -> Submission[CheckpointMetadata]:
        return self._later("delete_checkpoint", lambda: self._checkpoints.delete(name))

    def prune_checkpoints(
        self, keep_last: int, job: str | None = None, kind: Kind | None = None
    ) -> list[CheckpointMetadata]:
        """Delete all but the newest `keep_last` of each kind of one job; -> those that went. Pinned ones stay, and
        do not count. On a `ServiceClient` the job must be named."""
        return self._checkpoints.keep_last(keep_last, self._job(job), kind)

    def prune_checkpoints_async(
        self, keep_last: int, job: str | None = None, kind: Kind | None = None
    ) -> Submission[list[CheckpointMetadata]]:
        return self._later("prune_checkpoints", lambda: self.prune_checkpoints(keep_last, job, kind))

    def download_checkpoint(self, name: str, target: str | Path | None = None) -> Path:
        """Fetch a checkpoint's files, checked against their sha256, into a new folder (default: its name here).

        A `target` that ends with .tar, .tar.gz or .tgz becomes an archive.
        """
        return self._checkpoints.download(name, target)

    def download_checkpoint_async(self, name: str, target: str | Path | None = None) -> Submission[Path]:
        return self._later("download_checkpoint", lambda: self._checkpoints.download(name, target))

    def export_checkpoint(self, name: str, target: str | Path | None = None, merged: bool = False) -> Path:
        """A new folder that other programs load: the adapter for peft and vLLM, or with `merged` the whole model
        with the adapter's weights added, for plain transformers. Merging needs a live worker of the base model."""
        return self._checkpoints.export(name, target, merged)

    def export_checkpoint_async(
        self, name: str, target: str | Path | None = None, merged: bool = False
    ) -> Submission[Path]:
        return self._later("export_checkpoint", lambda: self._checkpoints.export(name, target, merged))

    def publish_checkpoint(
        self, name: str, hub_id: str, private: bool = False, token: str | None = None
    ) -> PublishedCheckpoint:
        """Upload the adapter, with a model card, to the Hugging Face Hub as `hub_id` ("user/repository").

        Runs in this process, so the token (argument, HF_TOKEN, or `hf auth login`) stays here. A missing or wrong
        token or an unreachable hub is an error before anything is read or made.
        """
        return settle(publish(self._checkpoints, name, hub_id, private=private, token=token))

    def publish_checkpoint_async(
        self, name: str, hub_id: str, private: bool = False, token: str | None = None
    ) -> Submission[PublishedCheckpoint]:
        return self._later(
            "publish_checkpoint", lambda: publish(self._checkpoints, name, hub_id, private=private, token=token)
        )

    def reindex_checkpoints(self) -> ReindexResponse:
        """Rebuild the index in Redis from the store: after Redis lost its data, or files were moved by hand."""
        return settle(self._checkpoints.reindex())

    def reindex_checkpoints_async(self) -> Submission[ReindexResponse]:
        return self._later("reindex_checkpoints", self._checkpoints.reindex)

    def _job(self, job: str | None) -> str:
        found = job or self._checkpoints.job
        if found is None:
            raise UserError("name the job whose checkpoints are meant: job=training_client.model_id")
        return found

    def _later(self, op: str, function: Callable[[], T]) -> Submission[T]:
        return in_background(self._process, op, function)
