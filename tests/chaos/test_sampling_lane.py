"""Thousands of sampling requests in flight and a worker killed half way: each is answered, and once."""

from __future__ import annotations

import collections
import threading
import time
from pathlib import Path

import pytest
import redis

import lorry
from tests.chaos.cell import MODEL, Cell


def test_two_hundred(calm_cell: Cell) -> None:
    run(calm_cell, 200)


@pytest.mark.slow
def test_two_thousand(tmp_path: Path, tiny_llama: Path) -> None:
    with Cell(tmp_path, tiny_llama, workers=2) as cell:
        run(cell, 2000)


def run(cell: Cell, count: int) -> None:
    sampler = lorry.ServiceClient(base_url=cell.url).create_sampling_client(base_model=MODEL)
    answers = AnswerCounter(cell)
    victim = cell.alive()[0]
    spare = len(cell.alive()) > 1
    started = time.monotonic()
    futures = [
        sampler.sample(
            lorry.ModelInput.from_ints([1 + n % 250, 2]), 1, lorry.SamplingParams(max_tokens=1 + n % 2, seed=n)
        )
        for n in range(count)
    ]
    while sum(future.done() for future in futures) < count // 2:
        time.sleep(0.002)
    assert not all(future.done() for future in futures)
    cell.kill(victim)
    if not spare:
        cell.start_worker()
    for n, future in enumerate(futures):
        (sequence,) = future.result(120).sequences
        assert 1 <= len(sequence.tokens) <= 1 + n % 2
    print(f"{count} requests and a death: {time.monotonic() - started:.1f} s")
    assert answers.stop() == {future.task_id: 1 for future in futures}
    with cell.client() as client:
        left = [*client.scan_iter("lorry:request:*"), *client.scan_iter("lorry:waiting:*")]
        assert not left
        assert int(client.get("lorry:bytes") or 0) >= 0


class AnswerCounter:
    """How often each request's result is published."""

    def __init__(self, cell: Cell) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._channel = cell.client().pubsub()
        self._channel.psubscribe("celery-task-meta-sample-*")
        assert self._channel.get_message(timeout=5)
        self._stopped = False
        self._thread = threading.Thread(target=self._count, daemon=True)
        self._thread.start()

    def _count(self) -> None:
        while not self._stopped:
            try:
                message = self._channel.get_message(timeout=0.2)
            except redis.ConnectionError:
                return
            if message and message["type"] == "pmessage":
                self._counts[message["channel"].decode().removeprefix("celery-task-meta-")] += 1

    def stop(self) -> dict[str, int]:
        time.sleep(0.5)
        self._stopped = True
        self._thread.join()
        return dict(self._counts)
