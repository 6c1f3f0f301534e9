"""The index of checkpoints in Redis: what a client can know of the store without seeing it.

    lorry:checkpoints          HASH  path -> `CheckpointMetadata` as JSON
    lorry:checkpoints:in_use   ZSET  path -> until when (ms since 1970) its files are being read
    lorry:checkpoints:lock:*   set by the worker whose turn it is to reap

The manifests in the store are the truth; a worker can rebuild the index from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from redis import Redis
from redis.client import Pipeline

from .types import CheckpointMetadata

_INDEX = "lorry:checkpoints"
_IN_USE = "lorry:checkpoints:in_use"
_LOCK = "lorry:checkpoints:lock:"


class CheckpointIndex:
    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    def put(self, metadata: CheckpointMetadata, pipe: Pipeline | None = None) -> None:
        """At once, or as part of a pipeline, whose answer is a number."""
        (pipe if pipe is not None else self.redis).hset(_INDEX, metadata.path, metadata.model_dump_json())

    def get(self, path: str) -> CheckpointMetadata | None:
        found: Any = self.redis.hget(_INDEX, path)
        return None if found is None else _read(found)

    def remove(self, path: str) -> None:
        self.redis.hdel(_INDEX, path)

    def paths(self) -> set[str]:
        found: Any = self.redis.hkeys(_INDEX)
        return {path.decode() for path in found}

    def all(self, *, job: str | None = None, name: str | None = None) -> Iterator[CheckpointMetadata]:
        """Every checkpoint, in no order, or those of one job or of one name."""
        pattern = f"lorry://{_literal(job) if job else '*'}/*/{_literal(name) if name else '*'}"
        for _, value in self.redis.hscan_iter(_INDEX, match=pattern, count=1000):
            metadata = _read(value)
            if metadata is not None and name in (None, metadata.name) and job in (None, metadata.job):
                yield metadata

    # ------------------------------------------------------------------------------------------- for the reaper

    def use(self, path: str, seconds: float) -> None:
        """Its files are being read, for so long at most: the reaper leaves them alone."""
        self.redis.zadd(_IN_USE, {path: self._now() + int(seconds * 1000)}, gt=True)

    def in_use(self, path: str) -> bool:
        until: Any = self.redis.zscore(_IN_USE, path)
        return until is not None and float(until) > self._now()

    def forget_uses(self) -> None:
        """Drop the notes of uses that are over."""
        self.redis.zremrangebyscore(_IN_USE, "-inf", self._now())

    def take_turn(self, task: str, seconds: float) -> bool:
        """True for one worker of all in so many seconds."""
        return bool(self.redis.set(_LOCK + task, "1", nx=True, px=int(seconds * 1000)))

    def _now(self) -> int:
        seconds, micros = self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000


def _literal(text: str) -> str:
    """`text` with everything escaped that means something in a glob."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)


def _read(value: bytes) -> CheckpointMetadata | None:
    try:
        return CheckpointMetadata.model_validate_json(value)
    except ValidationError:  # written by an older version: `lorry checkpoints reindex` writes it anew
        return None
