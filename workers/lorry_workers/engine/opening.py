"""The store that LORRY_STORE names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoints import CheckpointStore
from .object_store import ObjectStore
from .store import Store


def open_store(location: str) -> Store[Any]:
    """A folder (or file:// URL) is a `CheckpointStore`, any other URL an `ObjectStore`."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return CheckpointStore(Path(location).expanduser().absolute())
    if scheme in ("file", "local"):
        return CheckpointStore(Path(rest).expanduser().absolute())
    return ObjectStore(location)
