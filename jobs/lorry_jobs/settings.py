"""Settings that every process of Lorry shares. Each process extends `QueueSettings` with its own.

All come from environment variables with the prefix LORRY_ (LORRY_URL, LORRY_LEASE_SECONDS, ...).
"""

from __future__ import annotations

import re

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

MAX_WINDOW = 16
"""How far a job's window grows; mailbox.lua has it, too."""


class QueueSettings(BaseSettings):
    """Where Redis is and how chains behave."""

    model_config = SettingsConfigDict(env_prefix="LORRY_", env_ignore_empty=True, frozen=True, extra="ignore")

    url: SecretStr | None = None
    """`redis://[:password@]host:port/db`."""
    connect_timeout_seconds: float = Field(5.0, gt=0)
    result_ttl_seconds: int = Field(86400, gt=0)
    lease_seconds: float = Field(10.0, gt=0)
    lease_renew_seconds: float = Field(2.0, gt=0)
    window: int = Field(4, ge=2, le=MAX_WINDOW)
    """How many ops of one job may be with a worker at once; up to 16 where an update has more chunks."""
    max_queued_ops: int = Field(4096, ge=1)
    """Per job: more are not accepted until some are committed."""
    max_queued_bytes: int = Field(256 * 2**20, ge=1)
    """Per job: request bytes that are queued, or kept because no snapshot covers them yet."""
    max_total_bytes: int = Field(4 * 2**30, ge=1)
    """The same over all jobs."""
    session_seconds: float = Field(6 * 3600.0, gt=0)
    """The jobs of a client that was not heard of for so long are dropped. Checkpoints stay."""

    @property
    def redis_url(self) -> str:
        if self.url is None:
            raise ValueError("LORRY_URL is not set")
        return self.url.get_secret_value()

    def describe(self) -> str:
        """All settings on one line each, secrets masked: for the log at start."""
        lines = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "url" and value is not None:
                value = masked_url(value.get_secret_value())
            lines.append(f"  {name} = {value}")
        return "\n".join(lines)


def masked_url(url: str) -> str:
    """The URL with every password in it replaced by ***. Up to the last @, should it not be percent-encoded."""
    url = re.sub(r"://([^:@/?#]*):.*@", r"://\1:***@", url)
    return re.sub(r"(?i)(password=)[^&#]*", r"\1***", url)
