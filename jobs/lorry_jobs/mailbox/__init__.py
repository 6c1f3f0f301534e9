"""The mailbox: the one place that knows the keys of a job's chain in Redis."""

from .mailbox import DROP_GRADIENTS, SKIP, Effect, JobStatus, Mailbox, Placement, RequestStatus, Taken
from .names import meta_key, output_key, queue_name, result_channel

__all__ = [
    "DROP_GRADIENTS",
    "SKIP",
    "Effect",
    "JobStatus",
    "Mailbox",
    "Placement",
    "RequestStatus",
    "Taken",
    "meta_key",
    "output_key",
    "queue_name",
    "result_channel",
]
