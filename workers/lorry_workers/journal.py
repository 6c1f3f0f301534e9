"""Rebuild a job's exact state: a snapshot, then the ops committed since, run again without a result."""

from __future__ import annotations

import json
import logging

from redis.exceptions import RedisError

from lorry_jobs import ops
from lorry_jobs.errors import ServiceError, StateRolledBack
from lorry_jobs.mailbox import DROP_GRADIENTS, SKIP, Mailbox, Placement

from .engine.engine import Engine
from .executor import checkpoint_version, decode_request, execute
from .lanes import Delivery
from .snapshots import Snapshots

log = logging.getLogger(__name__)

PAGE = 64
"""How many ops of a journal are held in memory at a time."""


def restore(engine: Engine, mailbox: Mailbox, worker: str, placement: Placement, snapshots: Snapshots) -> None:
    """Load the last snapshot that is whole and replay the journal since.

    Raises StateRolledBack if a part of that is gone: never a silent step back.
    """
    job = placement.job
    seq, ref = _load(engine, placement, snapshots)
    steps, weight = _replay(engine, mailbox, placement, seq)
    snapshots.restored(placement, changes=placement.committed - seq, steps=steps, bytes=weight)
    if ref != placement.snapshot_ref:
        # From now on the older one counts as the last, and the journal since it is kept.
        mailbox.distrust(job, worker, placement.epoch, placement.snapshot_ref)
    if placement.committed > seq:
        log.info("job %s: replayed ops %d to %d", job, seq + 1, placement.committed)


def _load(engine: Engine, placement: Placement, snapshots: Snapshots) -> tuple[int, str]:
    """-> (the op after which the engine's state is now, the snapshot it is from); (-1, ""): from nothing."""
    job, problems = placement.job, []
    last = (placement.snapshot, placement.snapshot_ref)
    before = (placement.previous_snapshot, placement.previous_ref)
    for seq, ref in [last] if before == last else [last, before]:
        engine.drop_job(job)
        if not ref:
            return seq, ref
        try:
            snapshots.load(engine, placement, ref)
        except ServiceError as error:
            log.error("job %s: the snapshot after op %d cannot be used: %s", job, seq, error)
            problems.append(f"the snapshot after op {seq} cannot be used ({error.message})")
        else:
            if problems:
                log.error(
                    "job %s: the snapshot after op %d and the %d ops since are used instead; nothing is lost",
                    job,
                    seq,
                    placement.committed - seq,
                )
            return seq, ref
    engine.drop_job(job)
    raise StateRolledBack.between(placement.committed, -1, "; ".join(problems), job=job)


def _replay(engine: Engine, mailbox: Mailbox, placement: Placement, loaded: int) -> tuple[int, int]:
    """-> (how many optimizer steps, how many bytes of requests)"""
    job, last, steps, weight = placement.job, placement.committed, 0, 0
    for first in range(loaded + 1, last + 1, PAGE):
        for seq, envelope, payload in mailbox.journal(job, first, min(first + PAGE - 1, last)):
            if envelope == SKIP:
                continue
            if envelope == DROP_GRADIENTS:
                if job in engine.jobs:
                    engine.drop_gradients(job)
                continue
            try:
                if envelope is None or payload is None:
                    raise ServiceError("the journal has a hole there")
                op = _run_again(engine, mailbox, job, seq, envelope, payload)
                steps += op == ops.OPTIM_STEP
                weight += len(payload)
            except RedisError:
                raise
            except Exception as error:
                reason = f"op {seq} cannot be run again ({error})"
                raise StateRolledBack.between(last, seq - 1, reason, job=job) from error
    return steps, weight


def _run_again(engine: Engine, mailbox: Mailbox, job: str, seq: int, envelope: bytes, payload: bytes) -> str:
    headers = json.loads(envelope)["headers"]
    op = headers["task"].removeprefix("lorry.")
    request = decode_request(op, payload)
    version = checkpoint_version(engine, job, request)
    if version is not None:
        then = mailbox.ledger(job, [seq]).get(seq, {}).get("version", version)
        if then != version:
            raise ServiceError("the checkpoint that it read has been replaced since")
    execute(engine, job, Delivery(task=headers["id"], op=op, request=request, channel="", seq=seq), cycle=0)
    return op
