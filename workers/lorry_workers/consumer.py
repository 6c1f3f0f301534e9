"""Celery's consumer, with events sent in groups."""

from __future__ import annotations

import time
from typing import Any

from celery.worker.consumer import Consumer

FLUSH_SECONDS = 0.1


class PatientConsumer(Consumer):  # type: ignore[misc]
    """Task events (what Flower shows) go out every tenth of a second, or when 24 are there.

    Celery sends them at each turn of its loop. With three events for an op, that was a third of a busy worker's time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flush_asked_at = 0.0

    def on_send_event_buffered(self) -> None:
        """Called on any thread; the timer belongs to the loop's."""
        now = time.monotonic()
        # If a reconnect has cleared the timer, the flush that was asked for never comes: ask again.
        if self.hub and now - self._flush_asked_at > 10 * FLUSH_SECONDS:
            self._flush_asked_at = now
            self.hub.call_soon(self._flush_later)

    def _flush_later(self) -> None:
        self.hub.call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_asked_at = 0.0
        self._flush_events()

    def shutdown(self) -> None:
        self._flush_events()  # the last ops: Flower would show them as running for ever
        super().shutdown()
