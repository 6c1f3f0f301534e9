"""What came of an op, made ready to be committed: the client's record, the ledger's line, what a replay will do."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from lorry_jobs import ops, results
from lorry_jobs.errors import LorryError, ServiceError
from lorry_jobs.mailbox import Effect

from .committer import Commit
from .executor import Reply
from .lanes import Delivery, Outcome
from .training import OpRun

log = logging.getLogger(__name__)


def as_commit(run: OpRun, worker: str, cycle: int) -> Commit:
    """The commit of an op that ran."""
    delivery, result = run.delivery, run.result
    assert result is not None
    milliseconds = round(run.milliseconds, 3)
    where = {"cycle": cycle, "worker": worker, "attempt": 1 + delivery.suspect}
    entry = {
        "status": "ok",
        "op": delivery.op,
        **where,
        "epoch": run.lane.epoch,
        "started": run.started_ms,
        "milliseconds": milliseconds,
    }
    if isinstance(result, Exception):
        entry["status"] = "failed"
        commit = failure(delivery, as_failure(result, run.job, delivery))
    else:
        if result.version is not None:
            entry["version"] = result.version
        timing = {"milliseconds": milliseconds, "started_ms": run.started_ms}
        commit = success(delivery, replace(result, info={**result.info, **where, **timing}))
    return replace(commit, lane=run.lane, incomplete=run.incomplete, effect=_effect(run), entry=json.dumps(entry))


def success(delivery: Delivery, reply: Reply) -> Commit:
    record, output = results.success(delivery.task, reply.info, reply.output)
    return Commit(None, delivery, record, output, Outcome(reply.summary), checkpoint=reply.checkpoint)


def failure(delivery: Delivery, error: LorryError) -> Commit:
    return Commit(None, delivery, results.failure(delivery.task, error), b"", Outcome({}, error))


def as_failure(error: Exception, job: str | None, delivery: Delivery) -> LorryError:
    """The error with job, op and seq filled in; a bug in the worker is logged and becomes a ServiceError."""
    if not isinstance(error, LorryError):
        log.error("%s %s", delivery.op, delivery.task, exc_info=error)
        error = ServiceError(f"the worker failed with {type(error).__name__}: {error}; its log has the details")
    error.job = error.job or job
    error.op = error.op or delivery.op
    if error.seq is None and delivery.seq >= 0:
        error.seq = delivery.seq
    return error


def _effect(run: OpRun) -> Effect:
    if isinstance(run.result, Exception):
        # These two leave no gradients when they fail; any other failed op has no effect.
        return "drop" if run.delivery.op in (ops.OPTIM_STEP, ops.FORWARD_BACKWARD) else "0"
    return "0" if run.delivery.op in ops.WITHOUT_EFFECT else "1"
