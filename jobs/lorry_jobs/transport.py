"""kombu's Redis transport, with one difference: an op of a job goes to the mailbox instead of a list.

A message whose headers name a job (or a sampling request) is handed to `mailbox.lua` in one call, which checks,
stores and releases it. All other messages (events, remote control, ordinary tasks) go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps

from .errors import Backpressure, JobClosed, JobFailed, JobNotFound, LorryError, SequenceConflict
from .mailbox import Mailbox

JOB: Final = "lorry_job"
SEQ: Final = "lorry_seq"
MODEL: Final = "lorry_model"
CHANNEL: Final = "lorry_channel"
PAYLOAD: Final = "lorry_payload"
DIGEST: Final = "lorry_digest"
TTL: Final = "lorry_ttl"
MAX_TOTAL: Final = "lorry_max_total"


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    # Messages are deliveries and the mailbox is the truth: at shutdown or reconnect there is nothing to put back.
    do_restore = False

    _mailbox: Mailbox | None = None
    _client: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """kombu makes a new client object for every event that it publishes, which takes as long as all the rest."""
        if client is None:
            if self._client is None:
                self._client = self._create_client()
            client = self._client
        yield client

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        headers = message["headers"]
        if JOB not in headers and MODEL not in headers:
            super()._put(queue, message, **kwargs)
            return
        # The request's bytes travel beside the message, not in it. A copy: a retry sends the same dict again.
        headers = dict(headers)
        payload, digest = headers.pop(PAYLOAD), headers.pop(DIGEST)
        ttl, max_total = headers.pop(TTL), headers.pop(MAX_TOTAL)
        envelope = dumps({**message, "headers": headers})
        if self._mailbox is None:
            # `self.pool` belongs to this channel, so the script is loaded once per connection pool.
            self._mailbox = Mailbox(self._create_client())
        if JOB in headers:
            answer: str = self._mailbox.submit(
                headers[JOB],
                headers[SEQ],
                envelope=envelope,
                payload=payload,
                digest=digest,
                task=headers["id"],
                channel=headers[CHANNEL],
                ttl=ttl,
                max_total_bytes=max_total,
            )
        else:
            answer = self._mailbox.request(
                headers["id"],
                headers[MODEL],
                envelope=envelope,
                payload=payload,
                digest=digest,
                channel=headers[CHANNEL],
                max_total_bytes=max_total,
            )
        error = _refusal(answer, headers)
        if error is not None:
            raise error


class Transport(kombu_redis.Transport):  # type: ignore[misc]
    Channel = Channel


def _refusal(answer: str, headers: dict[str, Any]) -> LorryError | None:
    if answer in ("ok", "dup", "failed"):  # "failed": the op is resolved already, with the job's own error
        return None
    where: dict[str, Any] = {
        "job": headers.get(JOB),
        "op": headers["task"].removeprefix("lorry."),
        "seq": headers.get(SEQ),
    }
    if answer == "conflict":
        return SequenceConflict(
            "this seq was submitted before with another request, and an op is never replaced; "
            "give the new request the next seq",
            **where,
        )
    if answer == "full":
        return Backpressure("the server holds as much for now as its bounds allow", **where)
    if answer == "closed":
        return JobClosed("the job is closed; create a new training client", **where)
    if answer == "nojob":
        return JobNotFound(
            "the server does not know this job: it was closed, or its Redis lost its data; "
            "create a new training client from the last checkpoint",
            **where,
        )
    return JobFailed(f"the mailbox answered {answer!r}", **where)
