"""Rebuild a job's exact state: the last snapshot, then the ops committed since, run again without a result."""

from __future__ import annotations

import json
import logging

from lorry_jobs.errors import StateRolledBack
from lorry_jobs.mailbox import DROP_GRADIENTS, SKIP, Mailbox, Placement

from .engine.engine import Engine
from .executor import decode_request, execute
from .lanes import Delivery
from .snapshots import Snapshots

log = logging.getLogger(__name__)


def restore(engine: Engine, mailbox: Mailbox, placement: Placement, snapshots: Snapshots) -> None:
    """Load the snapshot and replay the journal, up to the last committed op.

    Raises StateRolledBack if a part of it is gone: never a silent step back.
    """
    job = placement.job
    if placement.snapshot_ref:
        snapshots.load(engine, placement)
    entries = mailbox.journal(job, placement.snapshot + 1, placement.committed)
    for seq, envelope, payload in entries:
        if envelope == SKIP:
            continue
        if envelope == DROP_GRADIENTS:
            engine.drop_gradients(job)
            continue
        if envelope is None or payload is None:
            raise StateRolledBack(
                f"the journal of ops {placement.snapshot + 1} to {placement.committed} has a hole at {seq}; the last "
                f"whole state is the one after op {placement.snapshot}. Create a new client from a checkpoint",
                job=job,
                seq=seq,
            )
        op, task = _op_of(envelope)
        delivery = Delivery(task=task, op=op, request=decode_request(op, payload), channel="", seq=seq)
        execute(engine, job, delivery, cycle=0)
    if entries:
        log.info("job %s: replayed %d ops up to seq %d", job, len(entries), placement.committed)


def _op_of(envelope: bytes) -> tuple[str, str]:
    headers = json.loads(envelope)["headers"]
    return headers["task"].removeprefix("lorry."), headers["id"]
