"""Every error that Lorry raises on purpose, as one tree.

    LorryError
    ├── UserError                  the request is wrong; the same request will fail again
    │   ├── UnknownModel           no worker has ever served this base model
    │   ├── SequenceConflict       this seq was used before, with other bytes
    │   ├── AccumulationIncomplete a forward_backward of this accumulation failed, so the step was not taken
    │   ├── OpCancelled            the op was cancelled before it started
    │   └── CheckpointNotFound / CheckpointExists
    ├── ServiceError               the request is fine; the service could not do it
    │   ├── ServiceUnavailable     Redis does not answer
    │   ├── Backpressure           too much is queued already; wait and submit again
    │   ├── JobClosed / JobFailed / JobNotFound
    │   ├── StateRolledBack        the job's state could not be rebuilt exactly, and is not rebuilt otherwise
    │   ├── StaleOwner             (workers) this worker no longer owns the job
    │   └── WorkerCrashed
    ├── WaitTimeout                the wait ended, the op did not: it goes on, and waiting again works
    └── ForkedClient               a client made before fork() was used after it

A message says what happened, to which job and op, and what to do next. Errors cross the wire as data
(`to_wire`, `from_wire`), never as pickles.
"""

from __future__ import annotations

from typing import Any


class LorryError(Exception):
    """Base of all errors. `job`, `op` and `seq` are None where they do not apply."""

    code = "lorry"

    def __init__(
        self,
        message: str = "",
        *,
        job: str | None = None,
        op: str | None = None,
        seq: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.job = job
        self.op = op
        self.seq = seq

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                f"op {self.op}" if self.op else "",
                f"seq {self.seq}" if self.seq is not None else "",
                f"job {self.job}" if self.job else "",
            )
            if part
        )
        return f"{self.message} [{where}]" if where else self.message

    def to_wire(self) -> dict[str, Any]:
        """A JSON object from which `from_wire` makes the same error again."""
        return {
            "code": self.code,
            "message": self.message,
            "job": self.job,
            "op": self.op,
            "seq": self.seq,
        }


class UserError(LorryError, ValueError):
    code = "user"


class UnknownModel(UserError):
    code = "unknown_model"


class SequenceConflict(UserError):
    code = "sequence_conflict"


class AccumulationIncomplete(UserError):
    code = "accumulation_incomplete"


class OpCancelled(UserError):
    code = "cancelled"


class CheckpointNotFound(UserError):
    code = "checkpoint_not_found"


class CheckpointExists(UserError):
    code = "checkpoint_exists"


class ServiceError(LorryError, RuntimeError):
    code = "service"


class ServiceUnavailable(ServiceError, ConnectionError):
    code = "unavailable"


class Backpressure(ServiceError):
    code = "backpressure"


class JobNotFound(ServiceError):
    code = "job_not_found"


class JobClosed(ServiceError):
    code = "job_closed"


class JobFailed(ServiceError):
    code = "job_failed"


class StateRolledBack(JobFailed):
    """`from_seq`: the last op that was committed. `to_seq`: the last whose state is still whole, -1 if none is."""

    code = "state_rolled_back"
    from_seq: int = -1
    to_seq: int = -1

    @classmethod
    def between(cls, from_seq: int, to_seq: int, reason: str, *, job: str) -> StateRolledBack:
        error = cls(
            f"the job's state after op {from_seq} cannot be rebuilt: {reason}. Whole is only "
            f"{f'the state after op {to_seq}' if to_seq >= 0 else 'nothing'}, and that is never used silently. "
            "Create a new client from a checkpoint",
            job=job,
        )
        error.from_seq, error.to_seq = from_seq, to_seq
        return error

    def to_wire(self) -> dict[str, Any]:
        return {**super().to_wire(), "from_seq": self.from_seq, "to_seq": self.to_seq}


class StaleOwner(ServiceError):
    code = "stale_owner"


class WorkerCrashed(ServiceError):
    code = "worker_crashed"


class WaitTimeout(LorryError, TimeoutError):
    code = "wait_timeout"


class ForkedClient(LorryError, RuntimeError):
    code = "forked"


def _tree(cls: type[LorryError]) -> list[type[LorryError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in _tree(child))]


def from_wire(data: dict[str, Any]) -> LorryError:
    """The error that `to_wire` described; an unknown code becomes a plain `ServiceError`."""
    by_code = {cls.code: cls for cls in _tree(LorryError)}
    cls = by_code.get(str(data.get("code")), ServiceError)
    error = cls(
        str(data.get("message", "")),
        job=data.get("job"),
        op=data.get("op"),
        seq=data.get("seq"),
    )
    if isinstance(error, StateRolledBack):
        error.from_seq, error.to_seq = int(data.get("from_seq", -1)), int(data.get("to_seq", -1))
    return error
