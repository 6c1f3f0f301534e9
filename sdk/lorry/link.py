"""Is the server there? Shared by the outbox and the listener; whoever talks to it says how that went."""

from __future__ import annotations

import logging
import threading
import time

from lorry_jobs.errors import ServiceUnavailable
from lorry_jobs.settings import masked_url

log = logging.getLogger("lorry")


class Link:
    def __init__(self, url: str, patience_seconds: float) -> None:
        self._where = masked_url(url)
        self._patience = patience_seconds
        self._lock = threading.Lock()
        self._down_since: float | None = None
        self._reason = ""

    def lost(self, error: BaseException) -> None:
        with self._lock:
            self._reason = str(error) or type(error).__name__
            if self._down_since is None:
                self._down_since = time.monotonic()

    def works(self) -> None:
        with self._lock:
            if self._down_since is not None and self._said_so:
                log.warning("Redis at %s answers again after %.0f s", self._where, self._down_for)
            self._down_since = None

    @property
    def _down_for(self) -> float:
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    @property
    def _said_so(self) -> bool:
        return self._down_for > self._patience

    def error(self) -> ServiceUnavailable | None:
        """What to tell a waiter, once the server has been away for longer than the connect timeout."""
        with self._lock:
            if self._down_since is None or not self._said_so:
                return None
            return ServiceUnavailable(
                f"Redis at {self._where} has not answered for {self._down_for:.0f} s ({self._reason}). Ops that were "
                "submitted are kept and sent when it is back; wait for the same future again, or start the server"
            )

    def unreachable(self, error: BaseException) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"Redis at {self._where} cannot be reached ({error}). Is the server running? "
            "`lorry up` starts a local one; LORRY_URL says where another one is"
        )
