"""The files by which other processes find, and leave alone, the stack that runs in a home.

    <home>/stack.lock   held (flock) as long as the stack's process lives; names its pid
    <home>/stack.json   how to reach the stack; written when everything is ready, removed when it stops

The lock is the truth: the kernel drops it when the process dies, so a state file without a held lock is
a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from lorry.stack.redis_server import write_private
from lorry_jobs.errors import ServiceError
from lorry_jobs.settings import masked_url


class FlowerInfo(BaseModel):
    """Where Flower is, and its login."""

    model_config = ConfigDict(frozen=True)

    url: str
    user: str
    password: str = Field(repr=False)


class StackInfo(BaseModel):
    """A running stack, as told to other processes. Holds secrets: its file is readable by the owner only."""

    model_config = ConfigDict(frozen=True)

    url: str = Field(repr=False)
    flower: FlowerInfo | None
    pid: int
    pids: dict[str, int]
    models: list[str]
    started: datetime
    started_by: str  # "lorry up" or "lorry.local()"

    @property
    def masked_url(self) -> str:
        return masked_url(self.url)


class StackRunning(ServiceError):
    """This home has a running stack already."""

    code = "stack_running"


def running_stack(home: Path) -> StackInfo | None:
    """The stack that runs in this home and is ready, or None."""
    if not _is_locked(_lock_file(home)):
        return None
    try:
        text = state_file(home).read_text()
    except FileNotFoundError:
        return None  # it is starting or stopping
    return StackInfo.model_validate_json(text)


@dataclass(frozen=True)
class LockOwner:
    """The process that starts, runs or stops a stack, as it put itself into the lock file."""

    pid: int
    since: float
    started_by: str

    @classmethod
    def read(cls, lock: Path) -> LockOwner:
        deadline = time.monotonic() + 1.0
        while not (text := lock.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)  # locked an instant ago, not yet written
        return cls(**json.loads(text))

    def write(self, fd: int) -> None:
        # Written in place: a renamed file would be another file than the one that is locked.
        os.ftruncate(fd, 0)
        os.write(fd, json.dumps(vars(self)).encode())


def lock_owner(home: Path) -> LockOwner | None:
    """Who holds this home now; None if nobody does."""
    lock = _lock_file(home)
    return LockOwner.read(lock) if _is_locked(lock) else None


@contextmanager
def stack_lock(home: Path, started_by: str) -> Iterator[None]:
    """Hold the home for one stack. Raises `StackRunning`, which says what to do, if another one holds it."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(_lock_file(home), "a+") as file:
        if not _lock_within(file.fileno(), seconds=1.0):
            raise StackRunning(_who_runs(home))
        state_file(home).unlink(missing_ok=True)  # a leftover: its writer no longer holds the lock
        LockOwner(os.getpid(), time.time(), started_by).write(file.fileno())
        yield


def state_file(home: Path) -> Path:
    return home / "stack.json"


def write_state(home: Path, info: StackInfo) -> None:
    write_private(state_file(home), info.model_dump_json(indent=2) + "\n")


def _lock_file(home: Path) -> Path:
    return home / "stack.lock"


def _lock_within(fd: int, seconds: float) -> bool:
    # `_is_locked` holds the lock for an instant to look at it; that must not pass for a running stack.
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def _is_locked(lock: Path) -> bool:
    with suppress(FileNotFoundError), open(lock) as file:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _who_runs(home: Path) -> str:
    owner = LockOwner.read(_lock_file(home))
    since = datetime.fromtimestamp(owner.since).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    info = running_stack(home)
    reach = f"It is at {info.masked_url}" if info else "It is not ready yet, or just stopping"
    stop = "stop it with `lorry down`" if owner.started_by == "lorry up" else f"stop it in process {owner.pid}"
    return (
        f"A stack runs in {home} already: {owner.started_by}, pid {owner.pid}, since {since}. {reach}; "
        f"clients on this machine find it by themselves. To start another one, {stop} "
        f"or set LORRY_HOME to another folder."
    )
