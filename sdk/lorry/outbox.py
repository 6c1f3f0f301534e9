"""The outbox: ops on their way to the server, sent by one thread, in call order per job."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from lorry_jobs.errors import Backpressure, LorryError, ServiceError

from .link import Link

log = logging.getLogger("lorry")

FULL_RETRY_SECONDS = 0.2
DOWN_RETRY_SECONDS = (0.05, 1.0)


@dataclass
class Letter:
    """One op to send. `send` raises Backpressure, a connection error, or a LorryError that refuses the op."""

    send: Callable[[], None]
    refuse: Callable[[LorryError], None]
    abandoned: Callable[[], bool] = field(default=lambda: False)


class Outbox:
    """`post` returns at once. A job that is full waits alone; while the server is away, everything waits."""

    def __init__(self, link: Link, limit: int) -> None:
        self._link, self._limit = link, limit
        self._changed = threading.Condition()
        self._lanes: collections.OrderedDict[str, collections.deque[Letter]] = collections.OrderedDict()
        self._parked: dict[str, float] = {}
        self._size = 0
        self._full_notice: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="lorry-outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, lane: str, letter: Letter) -> None:
        """`lane`: letters of the same lane are sent in the order of posting."""
        with self._changed:
            self._lanes.setdefault(lane, collections.deque()).append(letter)
            self._size += 1
            self._changed.notify_all()

    @property
    def is_full(self) -> bool:
        return self._size >= self._limit

    def flush(self, timeout: float) -> int:
        """Wait until everything was sent; -> how many letters are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._size == 0, timeout)
            return self._size

    def _run(self) -> None:
        delay = DOWN_RETRY_SECONDS[0]
        while True:
            lane, letter = self._next()
            try:
                if not letter.abandoned():
                    letter.send()
            except Backpressure as full:
                self._park(lane, full)
                continue
            except LorryError as refused:
                letter.refuse(refused)
            except (OperationalError, RedisError, OSError) as error:
                self._link.lost(error)
                time.sleep(delay)
                delay = min(delay * 2, DOWN_RETRY_SECONDS[1])
                continue
            except Exception as error:
                log.exception("an op could not be sent")
                letter.refuse(ServiceError(f"the op could not be sent: {error!r}"))
            self._link.works()
            delay = DOWN_RETRY_SECONDS[0]
            self._sent(lane)

    def _next(self) -> tuple[str, Letter]:
        """The first letter of the next lane that is not parked. It stays in its lane until `_sent`."""
        with self._changed:
            while True:
                now = time.monotonic()
                for lane, letters in self._lanes.items():
                    if self._parked.get(lane, 0.0) <= now:
                        return lane, letters[0]
                wake = min((self._parked[lane] for lane in self._lanes), default=None)
                self._changed.wait(None if wake is None else max(0.0, wake - now))

    def _sent(self, lane: str) -> None:
        with self._changed:
            letters = self._lanes[lane]
            letters.popleft()
            self._size -= 1
            self._parked.pop(lane, None)
            if letters:
                self._lanes.move_to_end(lane)
            else:
                del self._lanes[lane]
            self._full_notice.discard(lane)
            self._changed.notify_all()

    def _park(self, lane: str, full: Backpressure) -> None:
        with self._changed:
            self._parked[lane] = time.monotonic() + FULL_RETRY_SECONDS
            if lane not in self._full_notice:
                self._full_notice.add(lane)
                log.warning(
                    "%s; %d ops of %s wait here and are sent as soon as there is room",
                    full.message,
                    len(self._lanes[lane]),
                    lane,
                )
