"""Redis connections as every Lorry process makes them."""

from __future__ import annotations

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from redis.retry import Retry

from .settings import QueueSettings


def connect(settings: QueueSettings, *, patient: bool = False, name: str = "lorry") -> Redis:
    """A thread-safe client that returns bytes.

    `patient`: retry for about a minute through a Redis restart; used by workers, whose calls are all safe to
    repeat. Without it a call fails within the connect timeout, and the caller decides.
    """
    return Redis.from_url(
        settings.redis_url,
        socket_connect_timeout=settings.connect_timeout_seconds,
        socket_timeout=30,
        socket_keepalive=True,
        health_check_interval=10,
        client_name=name,
        retry=Retry(ExponentialBackoff(cap=2, base=0.05), 40 if patient else 1),
        retry_on_error=[ConnectionError, TimeoutError, BusyLoadingError],
    )
