"""10,000 futures outstanding in one process: one listener, and memory and time that grow in line."""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
import time

import pytest

import lorry
from lorry.process import _processes
from lorry.stack import Stack
from tests.conftest import QWEN_LARGE


def submit(sampler: lorry.SamplingClient, count: int) -> list[lorry.APIFuture[lorry.SampleResponse]]:
    prompt = lorry.ModelInput.from_ints([5, 6, 7])
    params = lorry.SamplingParams(max_tokens=1, temperature=0.0)
    return [sampler.sample(prompt, 1, params) for _ in range(count)]


def rss_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand(service: lorry.ServiceClient, stack: Stack) -> None:
    sampler = service.create_sampling_client(base_model=QWEN_LARGE)
    submit(sampler, 200)[-1].result(120)  # warm
    costs = {}
    for count in (1_000, 10_000):
        gc.collect()
        threads, before, started = threading.active_count(), rss_bytes(), time.perf_counter()
        futures = submit(sampler, count)
        submitted, grown = time.perf_counter() - started, rss_bytes() - before
        waiting = sum(not future.done() for future in futures)
        assert waiting > count * 0.8  # they really are outstanding
        assert threading.active_count() == threads
        values = asyncio.run(gather(futures))
        elapsed = time.perf_counter() - started
        assert len(values) == count
        assert all(len(value.sequences[0].tokens) == 1 for value in values)
        costs[count] = grown / count
        print(
            f"{count} futures: submit {submitted / count * 1e6:.0f} µs, {grown / count:.0f} bytes, "
            f"done after {elapsed / count * 1e3:.2f} ms each"
        )
    # The times are only reported; memory per future must not grow with their number.
    assert costs[10_000] < 30_000


async def gather(futures: list[lorry.APIFuture[lorry.SampleResponse]]) -> list[lorry.SampleResponse]:
    return await asyncio.gather(*futures)


def test_one_listener_and_one_outbox_for_all_clients(stack: Stack) -> None:
    services = [lorry.ServiceClient(base_url=stack.url) for _ in range(5)]
    futures = [f for service in services for f in submit(service.create_sampling_client(base_model=QWEN_LARGE), 40)]
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("lorry-")]
    for future in futures:
        assert len(future.result(120).sequences) == 1
    # Other tests of this process talk to servers of their own; there is one of each per server.
    assert names.count("lorry-listener") == len(_processes)
    assert names.count("lorry-outbox") == len(_processes)
    before = threading.active_count()
    submit(services[0].create_sampling_client(base_model=QWEN_LARGE), 100)[-1].result(120)
    assert threading.active_count() == before
