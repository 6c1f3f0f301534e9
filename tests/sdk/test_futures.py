"""APIFuture and Submission on a real Redis, with the test in the worker's place: it decides what ends when."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import lorry
from lorry.futures import Submission
from lorry.settled import settle
from lorry_jobs.errors import OpCancelled, ServiceUnavailable, UserError
from lorry_jobs.types import OptimStepResponse, SampleResponse
from tests.sdk.by_hand import MODEL, HandWorker


@pytest.fixture
def hand(redis_url: str) -> Iterator[HandWorker]:
    worker = HandWorker(redis_url)
    worker.hello()
    yield worker
    worker.join()


@pytest.fixture
def service(redis_url: str, hand: HandWorker) -> lorry.ServiceClient:
    return lorry.ServiceClient(redis_url)


@pytest.fixture
def client(service: lorry.ServiceClient, hand: HandWorker) -> lorry.TrainingClient:
    creating = service.create_lora_training_client_async(MODEL)
    assert creating.job is not None
    hand.create(creating.job)
    return creating.result(timeout=20)


@pytest.fixture
def sampler(service: lorry.ServiceClient) -> lorry.SamplingClient:
    return service.create_sampling_client(base_model=MODEL)


def step_of(value: Any) -> float:
    assert isinstance(value, OptimStepResponse)
    return value.metrics["seq"]


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


PROMPT = lorry.ModelInput.from_ints([1, 2, 3])


# -- result, await, timeouts -----------------------------------------------------------------------------


def test_an_op_is_there_before_anyone_waits(client: lorry.TrainingClient, hand: HandWorker) -> None:
    future = client.optim_step()
    assert (future.job, future.seq, future.op) == (client.model_id, 1, "optim_step")
    assert not future.done()
    hand.step(client.model_id, 1)
    wait_until(future.done)
    assert step_of(future.result()) == 1
    assert future.status() == "done"


def test_result_and_await_can_be_repeated_and_give_the_same_object(
    client: lorry.TrainingClient, hand: HandWorker
) -> None:
    future = client.optim_step()
    hand.soon(lambda: hand.step(client.model_id, 1))

    async def wait() -> list[OptimStepResponse]:
        return [await future, await future, await future.result_async(), await future.result_async(timeout=5)]

    values = [future.result(timeout=20), future.result(), *asyncio.run(wait())]
    assert all(value is values[0] for value in values)


def test_a_timeout_says_where_the_op_stands_and_leaves_it_alone(client: lorry.TrainingClient, hand: HandWorker) -> None:
    futures = [client.optim_step() for _ in range(3)]
    with pytest.raises(TimeoutError) as caught:
        futures[2].result(timeout=0.3)
    error = caught.value
    assert isinstance(error, lorry.WaitTimeout)
    assert (error.job, error.op, error.seq) == (client.model_id, "optim_step", 3)
    for part in ("no result after 0.3 s", "2 ops of its job are ahead of it", "worker hand", "The op goes on"):
        assert part in str(error)
    with pytest.raises(lorry.WaitTimeout, match="it is the next op of its job"):
        asyncio.run(futures[0].result_async(timeout=0.2))
    assert not futures[2].done()
    for seq in (1, 2, 3):
        hand.step(client.model_id, seq)
    assert [step_of(future.result(timeout=20)) for future in futures] == [1, 2, 3]


def test_a_timeout_without_a_worker_says_that(redis_url: str) -> None:
    worker = HandWorker(redis_url)
    worker.hello()
    creating = lorry.ServiceClient(redis_url).create_lora_training_client_async(MODEL)
    wait_until(lambda: worker.mailbox.adopt(str(creating.job), worker.name))
    worker.mailbox.goodbye(worker.name)
    with pytest.raises(lorry.WaitTimeout, match=f"no live worker serves '{MODEL}'.*lorry worker --model {MODEL}"):
        creating.result(timeout=0.5)


def test_wait_for_and_cancelled_waits_leave_the_op_alone(client: lorry.TrainingClient, hand: HandWorker) -> None:
    async def main() -> list[float]:
        future = client.optim_step()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.1)
        task = asyncio.create_task(future.result_async())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await future
        hand.soon(*(lambda seq=seq: hand.step(client.model_id, seq) for seq in (1, 2)))
        return [step_of(await future), step_of(await client.optim_step())]

    assert asyncio.run(main()) == [1, 2]


def test_a_cancelled_gather_of_submissions_leaves_the_ops_alone(client: lorry.TrainingClient, hand: HandWorker) -> None:
    async def main() -> list[float]:
        subs = [client.optim_step_async() for _ in range(6)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*subs), 0.2)
        gathered = asyncio.gather(*subs)
        await asyncio.sleep(0.05)
        gathered.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathered
        hand.soon(*(lambda seq=seq: hand.step(client.model_id, seq) for seq in range(1, 7)))
        return [step_of(value) for value in await asyncio.gather(*subs)]

    assert asyncio.run(main()) == [1, 2, 3, 4, 5, 6]


def test_wait_for_on_a_submission_that_times_out_is_over_in_time_and_leaves_the_op_alone(
    client: lorry.TrainingClient, hand: HandWorker
) -> None:
    """The last of these could be withdrawn: no worker holds it yet. A wait must not do that."""
    ahead = [client.optim_step() for _ in range(client._process.settings.window)]

    async def main() -> float:
        sub = client.optim_step_async()
        # A future on 3.11, where wait_for takes the result; a coroutine later, which is over at its admission.
        waited = sub if sys.version_info < (3, 12) else sub.result_async()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waited, 0.2)
        assert not sub.done()
        hand.soon(*(lambda seq=seq: hand.step(client.model_id, seq) for seq in range(1, len(ahead) + 2)))
        return step_of(await sub.result_async())

    assert asyncio.run(asyncio.wait_for(main(), 20)) == len(ahead) + 1


def test_threads_and_several_event_loops_may_wait_for_one_future(
    client: lorry.TrainingClient, hand: HandWorker
) -> None:
    future = client.optim_step()
    sub = client.optim_step_async()

    def in_a_loop() -> list[float]:
        async def wait() -> list[float]:
            first, second = await asyncio.gather(future.result_async(), sub)
            return [step_of(first), step_of(second)]

        return asyncio.run(wait())

    def in_a_thread() -> list[float]:
        return [step_of(future.result(timeout=20)), step_of(sub.result(timeout=20))]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(wait) for _ in range(4) for wait in (in_a_loop, in_a_thread)]
        time.sleep(0.2)  # all of them wait by now, most likely; the result is the same if not
        hand.step(client.model_id, 1)
        hand.step(client.model_id, 2)
        assert [wait.result(timeout=20) for wait in waits] == [[1, 2]] * 8


def test_call_order_is_seq_order_whatever_is_awaited(client: lorry.TrainingClient, hand: HandWorker) -> None:
    async def main() -> list[tuple[int | None, float]]:
        subs = [client.optim_step_async() for _ in range(5)]
        hand.soon(*(lambda seq=seq: hand.step(client.model_id, seq) for seq in range(1, 6)))
        found = []
        for sub in reversed(subs):
            found.append((sub.seq, step_of(await (await sub))))
        return found

    assert asyncio.run(main()) == [(seq, seq) for seq in (5, 4, 3, 2, 1)]


# -- Rule 3 of reference/dialects.md: every way of waiting for what `op_async(...)` returned ---------------


async def _in_a_task_group(sub: Coroutine[Any, Any, Any]) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sub)
    return task.result()


async def _first_completed(sub: Awaitable[Any]) -> Any:
    [first] = asyncio.as_completed([sub])
    return await first


async def _awaited(sub: Any) -> Any:
    return await sub


async def _awaited_twice(sub: Any) -> Any:
    return await (await sub)


async def _result_async(sub: Any) -> Any:
    return await sub.result_async()


async def _gathered(sub: Any) -> Any:
    [value] = await asyncio.gather(sub)
    return value


async def _gathered_result_async(sub: Any) -> Any:
    [value] = await asyncio.gather(sub.result_async())
    return value


async def _gathered_after_await(sub: Any) -> Any:
    [value] = await asyncio.gather(await sub)
    return value


async def _gathered_with_another(sub: Any) -> Any:
    value, _ = await asyncio.gather(sub, asyncio.sleep(0))
    return value


async def _shielded(sub: Any) -> Any:
    return await asyncio.shield(sub)


async def _created_task(sub: Any) -> Any:
    return await asyncio.create_task(sub)


async def _ensured_future(sub: Any) -> Any:
    return await asyncio.ensure_future(sub)


async def _waited_for(sub: Any) -> Any:
    return await asyncio.wait_for(sub, 20)


async def _waited_for_after_await(sub: Any) -> Any:
    return await asyncio.wait_for(await sub, 20)


# way of waiting -> what a training op gives: its value, or the future of it
TRAINING = {
    _awaited: "future",
    _awaited_twice: "value",
    _result_async: "value",
    _gathered: "value",
    _gathered_result_async: "value",
    _gathered_after_await: "value",
    _gathered_with_another: "value",
    _shielded: "value",
    _first_completed: "value",
    _created_task: "future",
    _in_a_task_group: "future",
    _ensured_future: "future",
    _waited_for: "value" if sys.version_info < (3, 12) else "future",
    _waited_for_after_await: "value",
}


@pytest.mark.parametrize(("way", "expected"), TRAINING.items(), ids=[way.__name__ for way in TRAINING])
def test_training_ops_under_every_way_of_waiting(
    way: Callable[[Any], Coroutine[Any, Any, Any]], expected: str, client: lorry.TrainingClient, hand: HandWorker
) -> None:
    async def main() -> Any:
        sub = client.optim_step_async()
        hand.soon(lambda: hand.step(client.model_id, 1))
        return await way(sub)

    found = asyncio.run(main())
    if expected == "future":
        assert type(found) is lorry.APIFuture
        found = found.result(timeout=20)
    assert step_of(found) == 1


@pytest.mark.parametrize("way", TRAINING, ids=[way.__name__ for way in TRAINING])
def test_ops_of_one_level_give_their_value_under_every_way_of_waiting(
    way: Callable[[Any], Coroutine[Any, Any, Any]], sampler: lorry.SamplingClient, hand: HandWorker
) -> None:
    async def main() -> Any:
        sub = sampler.sample_async(PROMPT)
        hand.soon(lambda: hand.answer(sub.task_id, [7, 8]))
        return await way(sub)

    found = asyncio.run(main())
    assert isinstance(found, SampleResponse)
    assert found.sequences[0].tokens == [7, 8]
    assert found.sequences[0].text == "text"


def test_asyncio_run_takes_a_submission(
    client: lorry.TrainingClient, sampler: lorry.SamplingClient, hand: HandWorker
) -> None:
    hand.soon(lambda: hand.step(client.model_id, 1))
    future = asyncio.run(client.optim_step_async())
    assert type(future) is lorry.APIFuture
    assert step_of(future.result(timeout=20)) == 1
    sub = sampler.sample_async(PROMPT)
    hand.soon(lambda: hand.answer(sub.task_id, [9]))
    assert asyncio.run(sub).sequences[0].tokens == [9]


def test_as_completed_gives_results_in_the_order_of_their_end(sampler: lorry.SamplingClient, hand: HandWorker) -> None:
    async def main() -> list[int]:
        subs = [sampler.sample_async(PROMPT) for _ in range(3)]
        order = []
        todo = asyncio.as_completed(subs)
        for index in (2, 0, 1):
            hand.soon(lambda index=index: hand.answer(subs[index].task_id, [index]))
            order.append((await next(todo)).sequences[0].tokens[0])
        return order

    assert asyncio.run(main()) == [2, 0, 1]


def test_gather_is_mixed_with_errors(client: lorry.TrainingClient, hand: HandWorker) -> None:
    async def main() -> list[Any]:
        subs = [client.optim_step_async() for _ in range(2)]
        hand.soon(
            lambda: hand.commit(client.model_id, seq=1, error=UserError("no")),
            lambda: hand.step(client.model_id, 2),
        )
        with pytest.raises(UserError, match="no"):
            await asyncio.gather(*subs)
        return await asyncio.gather(*subs, return_exceptions=True)

    failed, fine = asyncio.run(main())
    assert isinstance(failed, UserError)
    assert step_of(fine) == 2


def test_a_submission_that_nobody_awaits_runs_and_nothing_warns(
    client: lorry.TrainingClient, hand: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client.optim_step_async()
        gc.collect()
        hand.step(client.model_id, 1)  # waits until it has arrived
        assert step_of(client_step_two(client, hand)) == 2
        gc.collect()
    assert [str(warning.message) for warning in caught if "await" in str(warning.message)] == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def client_step_two(client: lorry.TrainingClient, hand: HandWorker) -> OptimStepResponse:
    future = client.optim_step()
    hand.step(client.model_id, 2)
    return future.result(timeout=20)


def test_both_kinds_are_awaitable_in_name(client: lorry.TrainingClient) -> None:
    sub = client.optim_step_async()
    assert isinstance(sub, lorry.APIFuture | Submission)
    assert isinstance(sub, Awaitable)
    assert asyncio.isfuture(sub)
    assert lorry.APIFutureResult is lorry.APIFuture


# -- what an unresolved future says ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "metrics", "loss_fn_outputs", "sequences", "path"])
def test_a_future_is_not_its_result(client: lorry.TrainingClient, name: str) -> None:
    for future in (client.optim_step(), client.optim_step_async()):
        with pytest.raises(AttributeError, match=rf"'{name}': this is the future of optim_step.*await future"):
            getattr(future, name)
        assert not hasattr(future, f"_{name}")


# -- settle: one await too many is harmless ----------------------------------------------------------------


def test_a_value_of_one_level_bears_one_more_await(sampler: lorry.SamplingClient, hand: HandWorker) -> None:
    async def main() -> None:
        sub = sampler.sample_async(PROMPT)
        hand.soon(lambda: hand.answer(sub.task_id, [1]))
        value = await sub
        assert isinstance(value, SampleResponse)
        for plain in (await value, value.result(), await value.result_async()):
            assert type(plain) is SampleResponse
            assert plain == value
            assert plain.sequences[0].tokens == [1]
            # Cookbooks await "until it is no longer awaitable": that has to end.
            assert not hasattr(plain, "__await__")
            assert not hasattr(plain, "result_async")
            with pytest.raises(TypeError):
                await plain

    asyncio.run(main())


def test_a_list_of_one_level_bears_one_more_await(sampler: lorry.SamplingClient, hand: HandWorker) -> None:
    async def main() -> None:
        sub = sampler.compute_logprobs_async(PROMPT)
        hand.soon(lambda: hand.answer(sub.task_id, [1]))
        value = await sub
        assert value == [None, -0.5, -0.25]
        assert isinstance(value, list)
        assert type(await value) is list
        assert await value == value

    asyncio.run(main())


def test_clients_of_one_level_bear_one_more_result(service: lorry.ServiceClient, hand: HandWorker) -> None:
    async def main() -> None:
        sub = service.create_lora_training_client_async(MODEL)
        hand.soon(lambda: hand.create(str(sub.job)))
        client = await sub
        assert isinstance(client, lorry.TrainingClient)
        assert type(client.result()) is lorry.TrainingClient
        # One client, two faces: a call on one is seen by the other.
        assert (client.optim_step().seq, client.result().optim_step().seq, client.optim_step().seq) == (1, 2, 3)

    asyncio.run(main())


class _Client:
    def __init__(self) -> None:
        self.info = _Info()
        self.calls = 0


class _Info:
    def __init__(self) -> None:
        self.itself = self  # only the garbage collector can end it
        self.name = "a name"


def test_a_settled_client_is_one_state_that_the_garbage_collector_leaves_alone() -> None:
    """Python 3.13's collector emptied what was still in use."""
    plain = _Client()
    one, other = settle(plain), settle(plain)
    one.calls += 1
    other.calls += 1
    assert (plain.calls, one.calls, other.calls) == (2, 2, 2)
    assert one == other == plain
    del plain
    gc.collect()
    assert one.info.name == other.info.name == "a name"
    del other
    gc.collect()
    assert one.info.name == "a name"
    assert one.calls == 2


def test_numbers_strings_and_paths_settle_as_they_are() -> None:
    for value in (1, 2.5, "text", None, True, Path("a")):
        assert settle(value) is value


# -- errors -----------------------------------------------------------------------------------------------


def test_an_ops_error_is_raised_wherever_it_is_waited_for(client: lorry.TrainingClient, hand: HandWorker) -> None:
    future = client.optim_step()
    hand.commit(client.model_id, seq=1, error=UserError("bad learning rate", job=client.model_id, seq=1))
    for _ in range(2):
        with pytest.raises(UserError, match="bad learning rate"):
            future.result(timeout=20)
    with pytest.raises(UserError, match="bad learning rate"):
        asyncio.run(future.result_async())
    error = future.exception()
    assert isinstance(error, UserError)
    assert error.seq == 1
    fine = client.optim_step()
    hand.step(client.model_id, 2)
    assert fine.exception(timeout=20) is None


def test_an_error_that_nobody_looked_at_is_logged(
    client: lorry.TrainingClient, hand: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(seq: int, *, look: bool) -> None:
        future = client.optim_step_async() if seq % 2 else client.optim_step()
        hand.commit(client.model_id, seq=seq, error=UserError(f"mistake {seq}"))
        wait_until(future.done)
        if look:
            assert future.exception() is not None

    fail(1, look=False)
    fail(2, look=False)
    fail(3, look=True)
    gc.collect()
    said = [record.getMessage() for record in caplog.records if record.name == "lorry"]
    assert len(said) == 2
    for seq, line in enumerate(said, start=1):
        assert "nobody looked at the result of optim_step" in line
        assert f"mistake {seq}" in line


def test_an_error_in_a_users_callback_or_map_harms_nobody(
    client: lorry.TrainingClient, hand: HandWorker, caplog: pytest.LogCaptureFixture
) -> None:
    future = client.optim_step()
    future.add_done_callback(lambda done: 1 / 0)
    broken = future.map(lambda value: 1 / 0)
    plain = broken.future()
    called: list[float] = []
    future.add_done_callback(lambda done: called.append(step_of(done.result())))
    hand.step(client.model_id, 1)
    assert step_of(future.result(timeout=20)) == 1
    for wait in (lambda: broken.result(timeout=20), lambda: plain.result(timeout=20)):
        with pytest.raises(ZeroDivisionError):
            wait()
    assert isinstance(broken.exception(), ZeroDivisionError)

    async def gathered() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.gather(Submission(broken, levels=1)), 20)

    asyncio.run(gathered())
    wait_until(lambda: called)
    assert called == [1]
    assert "a callback of optim_step" in caplog.text
    after = client.optim_step()  # the listener lives
    hand.step(client.model_id, 2)
    assert step_of(after.result(timeout=20)) == 2


# -- map, future(), exception(), cancel(), async_result ----------------------------------------------------


def test_map_runs_the_op_once(client: lorry.TrainingClient, hand: HandWorker) -> None:
    calls: list[float] = []

    def double(value: OptimStepResponse) -> float:
        calls.append(value.metrics["seq"])
        return 2 * value.metrics["seq"]

    future = client.optim_step()
    mapped = future.map(double)
    assert not mapped.done()
    with pytest.raises(lorry.WaitTimeout, match="next op of its job"):
        mapped.result(timeout=0.1)
    hand.step(client.model_id, 1)
    assert mapped.result(timeout=20) == mapped.result() == 2
    assert mapped.map(lambda value: value + 1).result(timeout=20) == 3  # of one that is done
    assert step_of(future.result()) == 1
    assert calls == [1]
    assert hand.mailbox.status(client.model_id).committed == 1


def test_a_plain_future_for_the_standard_library(client: lorry.TrainingClient, hand: HandWorker) -> None:
    plain = [client.optim_step().future(), client.optim_step_async().future()]
    assert all(isinstance(future, concurrent.futures.Future) for future in plain)
    hand.step(client.model_id, 1)
    hand.commit(client.model_id, seq=2, error=UserError("second"))
    done, not_done = concurrent.futures.wait(plain, timeout=20)
    assert not not_done
    assert len(done) == 2
    assert step_of(plain[0].result()) == 1
    assert isinstance(plain[1].exception(), UserError)


def test_cancel_withdraws_what_no_worker_holds_and_nothing_else(client: lorry.TrainingClient, hand: HandWorker) -> None:
    window = client._process.settings.window
    futures = [client.optim_step() for _ in range(window + 1)]
    doomed = client.optim_step_async()
    behind = client.optim_step()
    assert doomed.cancel()
    assert not futures[0].cancel()  # a worker may have it already
    assert not doomed.done()  # in its turn
    for future in futures:
        hand.step(client.model_id, int(str(future.seq)))
    hand.step(client.model_id, int(str(behind.seq)))
    with pytest.raises(OpCancelled, match="cancelled before it started"):
        doomed.result(timeout=20)
    assert doomed.cancelled()
    assert isinstance(doomed.exception(), OpCancelled)
    assert [step_of(future.result(timeout=20)) for future in futures] == [float(str(future.seq)) for future in futures]
    assert step_of(behind.result(timeout=20)) == window + 3
    assert not behind.cancel()  # done
    assert not behind.cancelled()


def test_cancel_withdraws_a_request_that_waits_for_a_worker(
    service: lorry.ServiceClient, sampler: lorry.SamplingClient, hand: HandWorker
) -> None:
    taken = sampler.sample(PROMPT)
    wait_until(lambda: hand.mailbox.take_request(taken.task_id, hand.name))
    hand.mailbox.goodbye(hand.name)
    waiting = sampler.sample(PROMPT)
    assert waiting.cancel()
    with pytest.raises(OpCancelled):
        waiting.result(timeout=20)


def test_celery_gives_the_same_result(client: lorry.TrainingClient, hand: HandWorker) -> None:
    fine, failed = client.optim_step(), client.optim_step()
    assert fine.async_result.id == fine.task_id == f"{client.model_id}.1"
    assert not fine.async_result.ready()
    hand.soon(
        lambda: hand.step(client.model_id, 1),
        lambda: hand.commit(client.model_id, seq=2, error=UserError("not so")),
    )
    assert fine.async_result.get(timeout=20)["metrics"] == fine.result(timeout=20).metrics == {"seq": 1.0}
    assert fine.async_result.successful()
    with pytest.raises(UserError, match="not so"):
        failed.async_result.get(timeout=20)
    assert failed.async_result.state == "FAILURE"
    assert failed.exception(timeout=20) is not None


# -- fork, and one listener --------------------------------------------------------------------------------


def test_a_fork_says_so_and_a_new_client_works_there(
    redis_url: str, client: lorry.TrainingClient, hand: HandWorker
) -> None:
    future = client.optim_step()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of fork in a process with threads
        child = os.fork()
    if child == 0:
        found: dict[str, str] = {}
        calls: dict[str, Callable[[], object]] = {
            "submit": client.optim_step,
            "result": future.result,
            "await": lambda: asyncio.run(future.result_async()),
            "cancel": future.cancel,
            "new client": lambda: lorry.ServiceClient(redis_url).get_server_capabilities().supported_models[0],
        }
        for name, call in calls.items():
            try:
                found[name] = repr(call())
            except Exception as error:  # noqa: BLE001
                found[name] = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        found = json.loads(answers.read())
    os.waitpid(child, 0)
    for name in ("submit", "result", "await", "cancel"):
        assert found[name].startswith("ForkedClient"), found
        assert "create a new ServiceClient" in found[name]
    assert MODEL in found["new client"], found
    hand.step(client.model_id, 1)  # in the parent everything goes on
    assert step_of(future.result(timeout=20)) == 1


def test_clients_of_one_server_share_one_listener_and_one_outbox(redis_url: str, client: lorry.TrainingClient) -> None:
    def threads(process: Any) -> list[str]:
        alive = threading.enumerate()
        return [t.name for t in (process._listener._thread, process._outbox._thread) if t in alive]

    others = [lorry.ServiceClient(redis_url) for _ in range(5)]
    assert all(other._process is client._process for other in others)
    assert sorted(threads(client._process)) == ["lorry-listener", "lorry-outbox"]


def test_one_seq_with_other_bytes_fails_alone(client: lorry.TrainingClient, hand: HandWorker) -> None:
    """Two futures of one task in one process: the refusal of the second is not the first one's result."""
    process = client._process
    first = process.submit_op(client.model_id, 1, "optim_step", b"{}", lambda outcome: outcome.info)
    wait_until(lambda: hand.mailbox.take(client.model_id, 1, hand.name))
    other = process.submit_op(client.model_id, 1, "optim_step", b"{ }", lambda outcome: outcome.info)
    same = process.submit_op(client.model_id, 1, "optim_step", b"{}", lambda outcome: outcome.info)
    with pytest.raises(lorry.SequenceConflict, match="submitted before with another request"):
        other.result(timeout=20)
    assert not first.done()
    hand.step(client.model_id, 1)
    assert first.result(timeout=20) == same.result(timeout=20) == {"metrics": {"seq": 1.0}}


# -- the server away ---------------------------------------------------------------------------------------


def test_no_server_is_said_at_once_with_the_way_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("LORRY_URL", raising=False)
    monkeypatch.setenv("LORRY_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"lorry up.*lorry\.local"):
        lorry.ServiceClient()
    with pytest.raises(ServiceUnavailable, match="lorry up") as caught:
        lorry.ServiceClient("redis://:very-secret@127.0.0.1:1/0")
    assert isinstance(caught.value, ConnectionError)
    assert "very-secret" not in str(caught.value)
