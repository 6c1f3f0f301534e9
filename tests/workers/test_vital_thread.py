"""A worker whose clock or lease ended with an error must not live on as if it were well."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time
from lorry_workers.vital_thread import VitalThread

def work():
    {work}

VitalThread(work, "the-thread").start()
time.sleep({patience})
print("alive")
"""


def run(work: str, patience: float) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(work=work, patience=patience)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)


def test_an_error_ends_the_process() -> None:
    found = run("raise ValueError('broken')", 45)
    assert found.returncode == 1
    assert "alive" not in found.stdout
    assert "the thread the-thread ended with an error" in found.stderr
    assert "broken" in found.stderr


def test_a_thread_that_is_done_ends_nothing() -> None:
    found = run("pass", 0.2)
    assert (found.returncode, found.stdout.strip()) == (0, "alive")
