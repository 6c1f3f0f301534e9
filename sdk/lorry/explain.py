"""What a waiting call waits for, in words."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lorry_jobs.mailbox import JobStatus, RequestStatus

from .futures import APIFuture

log = logging.getLogger("lorry")

REPEAT_SECONDS = 30.0
HEALTHY = "is on it"
"""How an explanation ends when nothing is wrong; such waits are logged as INFO only."""


def explain_job(status: JobStatus, seq: int) -> str:
    """Decides only; the status was read before."""
    if status.state == "unknown":
        return "the server does not know this job yet, or any more"
    if status.committed >= seq:
        return "it is done; its result is on the way"
    ahead = seq - status.committed - 1
    place = f"{ahead} ops of its job are ahead of it" if ahead else "it is the next op of its job"
    if status.workers == 0:
        return (
            f"no live worker serves '{status.model}' ({place}); it goes on as soon as one appears: "
            f"lorry worker --model {status.model}"
        )
    if not status.owner:
        queue = f", {status.ahead_unplaced} jobs before it" if status.ahead_unplaced > 0 else ""
        return f"{place}, and its job waits for a free slot on a worker{queue}"
    if not status.owner_alive:
        return f"{place}; worker {status.owner} is gone, and its jobs move when its lease ends"
    eta = (ahead + 1) * status.cost_ms / 1000
    when = f", about {_seconds(eta)}" if status.cost_ms else ""
    return f"{place}{when}; worker {status.owner} {HEALTHY}"


def explain_request(status: RequestStatus) -> str:
    if status.state == "unknown":
        return "it is on its way"
    if status.workers == 0:
        return (
            f"no live worker serves '{status.model}'; it goes on as soon as one appears: "
            f"lorry worker --model {status.model}"
        )
    if status.owner:
        return f"worker {status.owner} {HEALTHY}"
    return f"{max(status.ahead, 0)} requests wait before it for a free seat on a worker"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 90 else f"{value / 60:.0f} min"


class Notices:
    """Says why waits take long: one line per job, when it changes or after a while, never one per future."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, float]] = {}

    def say(self, late: list[APIFuture[Any]], explain: Callable[[APIFuture[Any]], str]) -> None:
        first: dict[str, APIFuture[Any]] = {}
        for future in late:
            group = future.job or f"requests for {future.op}"
            known = first.get(group)
            if known is None or (future.seq or 0) < (known.seq or 0):
                first[group] = future
        now = time.monotonic()
        for group, future in first.items():
            text, when = self._said.get(group, ("", 0.0))
            if text and now - when < _pause(text):
                continue
            fresh = explain(future)
            if _without_figures(fresh) != _without_figures(text) or now - when > REPEAT_SECONDS:
                self._said[group] = (fresh, now)
                seq = f" seq {future.seq}" if future.seq is not None else ""
                level = logging.INFO if fresh.endswith(HEALTHY) else logging.WARNING
                log.log(level, "waiting for %s%s of %s: %s", future.op, seq, group, fresh)
            else:
                self._said[group] = (text, now)
        for group in set(self._said) - set(first):
            del self._said[group]


def _pause(text: str) -> float:
    return 1.0 if text.startswith("no live worker") else 3.0


def _without_figures(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())
