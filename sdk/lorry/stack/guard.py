"""Stop the children of a stack when the process that started them is gone, however it went.

A process killed with SIGKILL (an out-of-memory kill, a notebook kernel that is restarted) cannot stop its
children, and a worker left behind keeps the GPU's memory. So a stack starts one more small process, the
guard, which reads the children's pids from a pipe. The kernel closes the pipe with the parent's last
breath; the guard then stops what is left, newest first, so that Redis outlives the workers that still
commit to it.

Why not PR_SET_PDEATHSIG: it is Linux only, it has to be set between fork and exec by code that is not safe
in a process with threads, and it fires when the *thread* that called fork ends, not the process: a stack
started from a notebook's or a test's thread would lose its Redis when that thread returned.

This file is also the guard's program (`python -I -S guard.py`), so it imports the standard library alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TextIO

GRACE_SECONDS = 10.0


class Guard:
    """The parent's end of the pipe. `watch` and `forget` are called as children start and end."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pid: int) -> None:
        self._pids.append(pid)
        self._send(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """To be called once the child has been waited for: from then on its pid may become another's."""
        if pid in self._pids:
            self._pids.remove(pid)
            self._send(f"-{pid}\n")

    def close(self) -> None:
        """End the guard. What it still watches is stopped."""
        os.close(self._pipe)
        self._process.wait()

    def _start(self) -> None:
        theirs, self._pipe = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)

    def _send(self, text: str) -> None:
        try:
            os.write(self._pipe, text.encode())
        except BrokenPipeError:  # somebody has killed the guard: start another one
            self.close()
            self._start()
            os.write(self._pipe, "".join(f"+{pid}\n" for pid in self._pids).encode())


def _main(lines: TextIO) -> None:
    pids: list[int] = []
    for line in lines:
        change, pid = line[0], int(line[1:])
        if change == "+":
            pids.append(pid)
        elif pid in pids:
            pids.remove(pid)
    for pid in reversed(pids):
        _stop(pid)


def _stop(pid: int) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(0.05)
            os.kill(pid, 0)
        os.killpg(pid, signal.SIGKILL)  # each child leads a process group of its own
    except ProcessLookupError:
        return


if __name__ == "__main__":
    _main(sys.stdin)
