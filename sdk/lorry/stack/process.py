"""One child process of a stack: its command, its log file, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

# A child that ended is started again after these pauses; then it is given up.
RESTART_DELAYS_SECONDS = (1.0, 2.0, 4.0)
# A child that ran this long before it ended gets its full number of tries back.
HEALTHY_SECONDS = 60.0

TAIL_LINES = 20


def _never() -> bool:
    return False


@dataclass(frozen=True)
class ProcessSpec:
    """What to run, and how to know that it works.

    `env` is added to this process's environment. Secrets belong there and not into `argv`: every user of
    the machine can read a command line, only the owner can read an environment. `ready` gets the stack's
    Redis URL and the pid, and says whether the process does its work yet; it is asked again and again.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ready: Callable[[str, int], bool] | None = None
    stop_seconds: float = 30.0


class Child:
    """A process started from a command, with both output streams in one log file.

    It leads a session of its own, so that Ctrl-C in the terminal reaches its parent alone, who then stops
    the children in order.
    """

    def __init__(self, name: str, argv: tuple[str, ...], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.started = time.monotonic()
        with _open_private(log) as output:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; as in `subprocess`, -9 means that it was ended by signal 9."""
        return self._process.poll()

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def up_seconds(self) -> float:
        return time.monotonic() - self.started

    def ask_to_stop(self) -> None:
        if self.is_running:
            self._process.terminate()

    def wait_or_kill(self, seconds: float, hurry: Callable[[], bool] = _never) -> None:
        """Wait for an end that has been asked for; after `seconds`, or as soon as `hurry()`, force it."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        if self.is_running:
            # Its own session makes the child the leader of its group: what it started ends with it.
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def obituary(self) -> str:
        """Which process ended, how, and the last lines that it wrote."""
        return (
            f"{self.name} (pid {self.pid}) {describe_exit(self.exit_code)}. "
            f"The end of its log, {self.log}:\n{self.tail()}"
        )

    def tail(self, lines: int = TAIL_LINES) -> str:
        return tail(self.log, lines)


def restart_delay(failures: int) -> float | None:
    """Seconds to wait before the next start after this many failures in a row; None means give up."""
    if failures > len(RESTART_DELAYS_SECONDS):
        return None
    return RESTART_DELAYS_SECONDS[failures - 1]


def describe_exit(code: int | None) -> str:
    if code is None:
        return "still runs"
    if code >= 0:
        return f"ended with exit code {code}"
    by = signal.Signals(-code).name
    hint = " (the kernel does that when memory runs out)" if by == "SIGKILL" else ""
    return f"was ended by {by}{hint}"


def tail(log: Path, lines: int) -> str:
    """The last lines of a log, indented; reads at most 64 KiB of it."""
    if not log.exists():
        return "  (somebody has removed it)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        found = file.read().decode(errors="replace").splitlines()[-lines:]
    return "\n".join(f"  {line}" for line in found) or "  (empty)"


def _open_private(log: Path) -> BinaryIO:
    """Append to a log that only its owner can read: what is said in it may be about somebody's data."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
