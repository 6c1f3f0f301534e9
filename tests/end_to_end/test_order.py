"""Ops run in the order of the calls, and once each, whatever the delivery does."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import pytest
import redis

import lorry
from lorry.stack import Stack
from lorry_jobs.mailbox import Mailbox, queue_name
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import random_batch

JOBS, THREADS_PER_JOB, STEPS_PER_THREAD = 16, 4, 2
BUDGET = 500
"""So many deliveries each disturber takes. It takes its own again, too, and would be in the way for very long."""


class Disturber:
    """Takes deliveries from a worker's queue, keeps them for a while, and puts them back shuffled and twice."""

    def __init__(self, url: str, worker: str, seed: int) -> None:
        self.taken = self.reordered = self.doubled = 0
        self._redis = redis.Redis.from_url(url)
        self._queue = queue_name(worker)
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        while not self._stop.is_set() and self.taken < BUDGET:
            # Waits in the same line as the worker, so that it gets about every second message of a quiet queue.
            first = self._redis.brpop([self._queue], timeout=0.05)
            if first is None:
                continue
            held = [first[1], *(self._redis.rpop(self._queue, self._random.randint(1, 8)) or [])]
            self.taken += len(held)
            time.sleep(self._random.uniform(0, 0.04))
            shuffled = self._random.sample(held, len(held))
            self.reordered += shuffled != held
            again = [message for message in shuffled if self._random.random() < 0.3]
            self.doubled += len(again)
            for message in shuffled + again:
                if self._random.random() < 0.5:
                    self._redis.lpush(self._queue, message)
                else:
                    self._redis.rpush(self._queue, message)


@dataclass
class Job:
    client: lorry.TrainingClient
    pair: threading.Lock = field(default_factory=threading.Lock)
    seeds: list[int] = field(default_factory=list)
    """Of the batches, in the order in which their pairs were submitted."""
    futures: list[tuple[lorry.APIFuture[lorry.ForwardBackwardOutput], lorry.APIFuture[lorry.OptimStepResponse]]] = (
        field(default_factory=list)
    )


def make_client(service: lorry.ServiceClient, number: int) -> lorry.TrainingClient:
    return service.create_lora_training_client(QWEN_SMALL, rank=4, seed=number)


ADAM = lorry.AdamParams(learning_rate=3e-4)


@pytest.mark.timeout(280)
def test_64_threads_on_16_jobs_with_disturbed_delivery(stack: Stack, service: lorry.ServiceClient) -> None:
    jobs = [Job(make_client(service, number)) for number in range(JOBS)]

    def submit(job: Job, thread: int) -> None:
        random_ = random.Random(thread)
        for step in range(STEPS_PER_THREAD):
            time.sleep(random_.uniform(0, 0.02))
            with job.pair:
                seed = thread * STEPS_PER_THREAD + step
                job.seeds.append(seed)
                job.futures.append((job.client.forward_backward(random_batch(seed)), job.client.optim_step(ADAM)))

    with redis.Redis.from_url(stack.url) as connection:
        [worker] = Mailbox(connection).live_workers(QWEN_SMALL)
    with Disturber(stack.url, worker, 1) as one, Disturber(stack.url, worker, 2) as two:
        threads = [
            threading.Thread(target=submit, args=(jobs[number % JOBS], number))
            for number in range(JOBS * THREADS_PER_JOB)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [[(output.result(120), step.result(120)) for output, step in job.futures] for job in jobs]
    print(
        f"taken {one.taken + two.taken}, shuffled {one.reordered + two.reordered} times, "
        f"doubled {one.doubled + two.doubled} of {2 * JOBS * THREADS_PER_JOB * STEPS_PER_THREAD} ops"
    )
    assert one.reordered + two.reordered > 10  # else this test has shown nothing
    assert one.doubled + two.doubled > 10

    for number, job in enumerate(jobs):
        assert len(job.seeds) == THREADS_PER_JOB * STEPS_PER_THREAD
        assert [(output.seq, step.seq) for output, step in job.futures] == [
            (2 * i + 1, 2 * i + 2) for i in range(len(job.seeds))
        ]
        cycles = [result.cycle for pair in found[number] for result in pair]
        assert cycles == sorted(cycles)
        assert service._process.mailbox.status(job.client.model_id).committed == 2 * len(job.seeds)

    # The same ops on fresh jobs, one at a time.
    for number, job in enumerate(jobs):
        alone = make_client(service, number)
        expected_losses, expected_norms = [], []
        for seed in job.seeds:
            expected_losses.append(alone.forward_backward(random_batch(seed)).result(60).loss)
            expected_norms.append(alone.optim_step(ADAM).result(60).metrics["grad_norm"])
        assert [output.loss for output, _ in found[number]] == pytest.approx(expected_losses, abs=1e-6)
        assert [step.metrics["grad_norm"] for _, step in found[number]] == pytest.approx(expected_norms, rel=1e-4)
        # Another order would show: one step moves the loss of a batch by far more than the tolerance.
        moved = job.client.forward(random_batch(job.seeds[0])).result(60).loss
        assert abs(moved - expected_losses[0]) > 1e-3
