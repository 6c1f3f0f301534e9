"""Names in Redis that others than the mailbox must know: queues, channels and result records."""

from __future__ import annotations


def queue_name(worker: str) -> str:
    """The Celery queue that only this worker consumes."""
    return f"lorry:queue:{worker}"


def result_channel(client: str) -> str:
    """The pub/sub channel on which one client process hears of all its results."""
    return f"lorry:results:{client}"


def output_key(task: str) -> str:
    """Where the bytes of a large result lie."""
    return f"lorry:output:{task}"


def meta_key(task: str) -> str:
    """Celery's own result record."""
    return f"celery-task-meta-{task}"
