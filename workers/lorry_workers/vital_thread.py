"""A thread without which the worker is of no use: if an error ends it, the process ends too."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class VitalThread(threading.Thread):
    """Whoever supervises the process starts it again, and its jobs go to other workers when the lease ends.

    A worker that lived on without its clock, say, would hold its jobs and never run them.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            log.critical("the thread %s ended with an error; the worker exits", self.name, exc_info=True)
            logging.shutdown()
            os._exit(1)
