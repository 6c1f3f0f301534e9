"""Settings of a client process, from LORRY_* variables."""

from __future__ import annotations

from pydantic import Field

from lorry_jobs.settings import QueueSettings


class ClientSettings(QueueSettings):
    notice_after_seconds: float = Field(3.0, gt=0)
    """A wait that takes longer than this says what it waits for, and again whenever that changes."""
    outbox_limit: int = Field(4096, ge=1)
    """`await op_async(...)` waits while more ops than this are not accepted by the server yet."""
    exit_flush_seconds: float = Field(10.0, ge=0)
    """At exit, so long are ops that nobody waited for given to reach the server."""
