"""What the end-to-end tests share: data, training runs, and worker processes of one's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import lorry
from lorry.stack.process import Child
from lorry.stack.programs import holds_a_lease, worker_specs

VOCABULARY = 300
"""Fewer than every tiny model has."""


def random_batch(seed: int, rows: int = 2, length: int = 12) -> list[lorry.Datum]:
    """The same seed gives the same tokens; another seed, others."""
    random = np.random.default_rng(seed)
    batch = []
    for _ in range(rows):
        tokens = random.integers(0, VOCABULARY, length + 1)
        batch.append(lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return batch


def submit_steps(
    client: lorry.TrainingClient, seeds: Sequence[int], learning_rate: float = 1e-3
) -> list[tuple[lorry.APIFuture[lorry.ForwardBackwardOutput], lorry.APIFuture[lorry.OptimStepResponse]]]:
    """One forward_backward and one optim_step for each seed, all submitted before anything is waited for."""
    adam = lorry.AdamParams(learning_rate=learning_rate)
    return [(client.forward_backward(random_batch(seed)), client.optim_step(adam)) for seed in seeds]


def train(client: lorry.TrainingClient, seeds: Sequence[int], learning_rate: float = 1e-3) -> list[float]:
    """The losses of as many steps as there are seeds, and of one more forward with the weights after them."""
    steps = submit_steps(client, seeds, learning_rate)
    last = client.forward(random_batch(seeds[-1]))
    for _, step in steps:
        step.result(timeout=120)
    return [output.result(timeout=120).loss for output, _ in steps] + [last.result(timeout=120).loss]


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


class WorkerProcess:
    """A real worker process on a Redis of the test's own; a `Stack` would stop together with its Redis."""

    def __init__(self, url: str, model: str, folder: Path, number: int = 1) -> None:
        [*_, spec] = worker_specs([model], number)
        self._url = url
        env = {
            "LORRY_URL": url,
            "LORRY_HOME": str(folder),
            "LORRY_STORE_DIR": str(folder / "store"),
            "PYTHONUNBUFFERED": "1",
        }
        self.child = Child(spec.name, spec.argv, folder / f"{spec.name}-{time.monotonic_ns()}.log", env)

    def wait_ready(self, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds_a_lease(self._url, self.child.pid):
            assert self.child.is_running, self.child.obituary()
            assert time.monotonic() < deadline, self.child.tail()
            time.sleep(0.1)

    def kill(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait_or_kill(10)

    def stop(self, seconds: float = 30.0) -> int | None:
        """SIGTERM, and its exit code."""
        self.child.ask_to_stop()
        self.child.wait_or_kill(seconds)
        return self.child.exit_code


@contextmanager
def worker_process(url: str, model: str, folder: Path, number: int = 1) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(url, model, folder, number)
    try:
        yield worker
    finally:
        worker.kill() if worker.child.is_running else None
