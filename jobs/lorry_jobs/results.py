"""Result records: what a commit writes where Celery's Redis backend would, and how a client reads it.

A record is Celery's own JSON (`status`, `result`, `task_id`, ...), so `AsyncResult(id)` works on it as on any
task. Binary outputs ride along in base64 up to `INLINE_BYTES`; larger ones lie beside it under `output_key`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import LorryError, from_wire

INLINE_BYTES = 48 * 1024


@dataclass(frozen=True)
class Outcome:
    """A finished op as the client sees it. `output` None: there is none, or it is large and must be fetched."""

    task: str
    error: LorryError | None
    info: dict[str, Any]
    output: bytes | None
    output_is_elsewhere: bool


def success(task: str, info: Mapping[str, Any], output: bytes = b"") -> tuple[str, bytes]:
    """-> (the record, the bytes to store beside it; empty if they are inline)."""
    result: dict[str, Any] = dict(info)
    beside = b""
    if len(output) > INLINE_BYTES:
        result["output_bytes"] = len(output)
        beside = output
    elif output:
        result["output"] = base64.b64encode(output).decode()
    return _record(task, "SUCCESS", result), beside


def failure(task: str, error: LorryError) -> str:
    """The record of a failed op. Celery's own reader turns it into the same exception class."""
    return _record(
        task,
        "FAILURE",
        {
            "exc_type": type(error).__name__,
            "exc_module": type(error).__module__,
            "exc_message": [error.message],
            "lorry": error.to_wire(),
        },
    )


def _record(task: str, status: str, result: dict[str, Any]) -> str:
    return json.dumps({"status": status, "result": result, "traceback": None, "children": [], "task_id": task})


def read(record: bytes | str) -> Outcome | None:
    """The outcome in a record; None while the op is not finished."""
    data = json.loads(record)
    result = data.get("result")
    if data["status"] == "SUCCESS":
        info = dict(result or {})
        inline = info.pop("output", None)
        return Outcome(
            task=data["task_id"],
            error=None,
            info=info,
            output=base64.b64decode(inline) if inline is not None else None,
            output_is_elsewhere="output_bytes" in info,
        )
    if data["status"] in ("FAILURE", "REVOKED"):
        wire = (result or {}).get("lorry") or {"code": "service", "message": str(result)}
        return Outcome(data["task_id"], from_wire(wire), {}, None, False)
    return None
