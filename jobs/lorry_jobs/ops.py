"""The ops of a job's chain and the sampling request: their Celery task names and how their requests travel."""

from __future__ import annotations

import hashlib
from typing import Final

CREATE_MODEL: Final = "create_model"
FORWARD: Final = "forward"
FORWARD_BACKWARD: Final = "forward_backward"
OPTIM_STEP: Final = "optim_step"
SAVE_STATE: Final = "save_state"
SAVE_WEIGHTS_FOR_SAMPLER: Final = "save_weights_for_sampler"
LOAD_STATE: Final = "load_state"

CHAIN_OPS: Final = (
    CREATE_MODEL,
    FORWARD,
    FORWARD_BACKWARD,
    OPTIM_STEP,
    SAVE_STATE,
    SAVE_WEIGHTS_FOR_SAMPLER,
    LOAD_STATE,
)
"""In a job these run one after the other, in seq order; create_model is seq 0."""

WITHOUT_EFFECT: Final = frozenset({FORWARD, SAVE_STATE, SAVE_WEIGHTS_FOR_SAMPLER})
"""These leave the job's state as it was, so a replay skips them."""

SAMPLE: Final = "sample"
"""Unordered: any worker that serves the base model may take one."""

CHECKPOINT_CHANGE: Final = "checkpoint_change"
CHECKPOINT_DELETE: Final = "checkpoint_delete"
CHECKPOINT_READ: Final = "checkpoint_read"
CHECKPOINT_MERGE: Final = "checkpoint_merge"
CHECKPOINT_REINDEX: Final = "checkpoint_reindex"

CHECKPOINT_OPS: Final = (
    CHECKPOINT_CHANGE,
    CHECKPOINT_DELETE,
    CHECKPOINT_READ,
    CHECKPOINT_MERGE,
    CHECKPOINT_REINDEX,
)
"""Unordered, too: what is done where the store is, beside the engine."""


def task_name(op: str) -> str:
    """What Flower and logs show: `lorry.forward_backward`."""
    return f"lorry.{op}"


def task_id(job: str, seq: int) -> str:
    """The Celery task id of an op. Deterministic, so that submitting again gives the same result."""
    return f"{job}.{seq}"


def digest(op: str, payload: bytes) -> bytes:
    """16 bytes that tell two requests under the same seq apart."""
    return hashlib.sha256(op.encode() + b"\0" + payload).digest()[:16]
