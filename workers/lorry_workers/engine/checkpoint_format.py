"""What a checkpoint consists of, whatever it is stored on: files, a manifest that vouches for them, a lifetime."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lorry_jobs.checkpoint_paths import CheckpointPath, Kind
from lorry_jobs.errors import ServiceError, UserError
from lorry_jobs.types import CheckpointFile, CheckpointMetadata, LoraConfig, LorryModel

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
LIFETIME = "lifetime.json"


class Manifest(LorryModel):
    """What is in a checkpoint and where it came from. `op_id` is the op that wrote it.

    `folder`: the files are not beside the manifest but in this folder beside it.
    """

    version: int = 1
    job: str
    kind: Kind
    name: str
    op_id: str
    created: datetime
    expires: datetime | None = None
    pinned: bool = False
    base_model: str
    lora: LoraConfig
    step: int
    user_metadata: dict[str, str] = {}
    files: dict[str, CheckpointFile]
    folder: str | None = None

    @property
    def path(self) -> CheckpointPath:
        return CheckpointPath(self.job, self.kind, self.name)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def expired(self) -> bool:
        return self.expires is not None and not self.pinned and self.expires <= datetime.now(UTC)

    @property
    def metadata(self) -> CheckpointMetadata:
        """What the index keeps of it."""
        return CheckpointMetadata(
            path=str(self.path),
            lora_rank=self.lora.rank,
            size=self.size,
            **{
                name: getattr(self, name)
                for name in (
                    "job", "kind", "name", "created", "expires", "pinned", "base_model", "step", "user_metadata",
                    "files", "op_id",
                )
            },
        )  # fmt: skip


class Lifetime(LorryModel):
    """What can change of a checkpoint, kept beside its manifest, which never changes.

    It belongs to one version: beside a newer checkpoint of the same name it means nothing.
    """

    op_id: str
    created: datetime
    expires: datetime | None
    pinned: bool


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


def encode_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    contents = {
        ADAPTER: safetensors.torch.save(checkpoint.adapter, {"format": "pt"}),
        ADAPTER_CONFIG: json_bytes(checkpoint.adapter_config),
    }
    if checkpoint.optimizer is not None:
        contents[OPTIMIZER] = safetensors.torch.save(checkpoint.optimizer, {"format": "pt"})
    if checkpoint.state is not None:
        contents[STATE] = json_bytes(checkpoint.state)
    return contents


def decode_files(path: CheckpointPath, files: Mapping[str, bytes]) -> Checkpoint:
    with service_errors(f"{path} is damaged"):
        return Checkpoint(
            adapter=safetensors.torch.load(files[ADAPTER]),
            adapter_config=json.loads(files[ADAPTER_CONFIG]),
            optimizer=safetensors.torch.load(files[OPTIMIZER]) if OPTIMIZER in files else None,
            state=json.loads(files[STATE]) if STATE in files else None,
        )


def make_manifest(
    path: CheckpointPath,
    contents: Mapping[str, bytes],
    origin: Origin,
    *,
    ttl_seconds: int | None,
    pinned: bool = False,
    folder: str | None = None,
) -> Manifest:
    created = datetime.now(UTC)
    return Manifest(
        job=path.job,
        kind=path.kind,
        name=path.name,
        op_id=origin.op_id,
        created=created,
        expires=created + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None,
        pinned=pinned,
        base_model=origin.base_model,
        lora=origin.lora,
        step=origin.step,
        user_metadata=dict(origin.user_metadata),
        files={
            name: CheckpointFile(size=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in contents.items()
        },
        folder=folder,
    )


def read_manifest(where: str, content: bytes, lifetime: bytes | None) -> Manifest:
    """The manifest with its present lifetime. A lifetime that cannot be read is as good as none."""
    try:
        manifest = Manifest(**json.loads(content))
    except (UserError, TypeError, ValueError) as error:
        raise ServiceError(f"{where} is damaged: {error}") from error
    if lifetime is not None:
        try:
            present = Lifetime(**json.loads(lifetime))
        except (UserError, TypeError, ValueError):
            return manifest
        if (present.op_id, present.created) == (manifest.op_id, manifest.created):
            return manifest.model_copy(update={"expires": present.expires, "pinned": present.pinned})
    return manifest


def check_file(where: str, content: bytes, entry: CheckpointFile) -> bytes:
    """`content`, if it is what the manifest says."""
    if len(content) != entry.size or hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ServiceError(
            f"{where} is damaged: it has {len(content)} bytes and not the sha256 that its manifest has for it "
            f"({entry.size} bytes); restore it or load another checkpoint"
        )
    return content


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode()


@contextmanager
def service_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise ServiceError(f"{what}: {error}") from error
