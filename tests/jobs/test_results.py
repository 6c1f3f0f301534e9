"""A committed result is an ordinary Celery result: `AsyncResult` reads it, waits for it and raises what failed."""

from __future__ import annotations

import base64
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lorry_jobs import results
from lorry_jobs.celery_app import create_app
from lorry_jobs.errors import AccumulationIncomplete, ServiceError, UserError
from lorry_jobs.mailbox import meta_key, output_key
from lorry_jobs.settings import QueueSettings


@pytest.fixture
def app(redis_url):
    app = create_app(QueueSettings(url=redis_url))
    yield app
    app.backend.result_consumer.stop()
    app.close()


@pytest.fixture
def job(driver):
    driver.hello("w")
    driver.create("a")
    return "a"


# -------------------------------------------------------------------------------------------------- records


def test_a_small_output_rides_in_the_record():
    record, beside = results.success("a.1", {"loss": 0.5}, b"\x00\xff binary")
    assert beside == b""
    assert json.loads(record) == {
        "status": "SUCCESS",
        "result": {"loss": 0.5, "output": base64.b64encode(b"\x00\xff binary").decode()},
        "traceback": None,
        "children": [],
        "task_id": "a.1",
    }
    outcome = results.read(record)
    assert (outcome.task, outcome.error, outcome.info) == ("a.1", None, {"loss": 0.5})
    assert (outcome.output, outcome.output_is_elsewhere) == (b"\x00\xff binary", False)


def test_a_large_output_lies_beside_it():
    limit = 48 * 1024
    assert results.success("a.1", {}, b"x" * limit)[1] == b""
    record, beside = results.success("a.1", {}, b"x" * (limit + 1))
    assert beside == b"x" * (limit + 1)
    assert len(record) < 200
    outcome = results.read(record)
    assert (outcome.output, outcome.output_is_elsewhere) == (None, True)
    assert outcome.info == {"output_bytes": limit + 1}


def test_no_output_is_not_an_empty_one_elsewhere():
    outcome = results.read(results.success("a.1", {"x": 1})[0])
    assert (outcome.output, outcome.output_is_elsewhere, outcome.info) == (None, False, {"x": 1})


def test_a_failure_keeps_the_class_and_where_it_was():
    error = AccumulationIncomplete("seq 4 failed", job="a", op="optim_step", seq=5)
    outcome = results.read(results.failure("a.5", error).encode())
    assert type(outcome.error) is AccumulationIncomplete
    assert (outcome.error.job, outcome.error.op, outcome.error.seq) == ("a", "optim_step", 5)
    assert (outcome.info, outcome.output) == ({}, None)


def test_a_record_that_is_not_the_end_has_no_outcome():
    assert results.read(json.dumps({"status": "STARTED", "result": None, "task_id": "a.1"})) is None


def test_a_failure_that_celery_wrote_itself_is_a_service_error():
    record = {"status": "REVOKED", "result": {"exc_type": "TaskRevokedError"}, "task_id": "a.1"}
    assert type(results.read(json.dumps(record)).error) is ServiceError


# ---------------------------------------------------------------------------------------------- Celery's reader


def test_async_result_reads_a_success(driver, job, app):
    driver.submit(job, 0)
    result = app.AsyncResult("a.0")
    assert (result.status, result.ready()) == ("PENDING", False)
    driver.commit(job, 0, "w", info={"loss": 1.25, "cycle": 3})
    result = app.AsyncResult("a.0")
    assert (result.status, result.ready(), result.successful()) == ("SUCCESS", True, True)
    assert result.get(timeout=5) == {"loss": 1.25, "cycle": 3}


def test_async_result_raises_the_same_error(driver, job, app):
    driver.submit(job, 0)
    driver.commit(job, 0, "w", error=AccumulationIncomplete("forward_backward 4 failed", job="a", seq=5))
    result = app.AsyncResult("a.0")
    assert (result.status, result.failed()) == ("FAILURE", True)
    with pytest.raises(AccumulationIncomplete, match="forward_backward 4 failed") as caught:
        result.get(timeout=5)
    assert type(caught.value) is AccumulationIncomplete
    assert isinstance(result.result, UserError)


def test_async_result_raises_the_error_of_a_failed_job(driver, job, app):
    driver.submit(job, 0)
    driver.fail(job, "w", ServiceError("the store is gone"))
    with pytest.raises(ServiceError, match="the store is gone"):
        app.AsyncResult("a.0").get(timeout=5)


def test_a_blocked_async_result_wakes_up_when_the_commit_publishes(driver, job, app):
    driver.submit(job, 0)
    started = threading.Event()

    def wait():
        started.set()
        return app.AsyncResult("a.0").get(timeout=20), time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        started.wait(5)
        channel = meta_key("a.0").encode()
        deadline = time.monotonic() + 10
        while driver.redis.pubsub_numsub(channel) != [(channel, 1)]:
            assert time.monotonic() < deadline, "AsyncResult.get() never subscribed"
            time.sleep(0.01)
        assert not waiting.done()
        committed = time.monotonic()
        driver.commit(job, 0, "w", info={"loss": 2.0})
        value, woken = waiting.result(20)
    assert value == {"loss": 2.0}
    assert woken - committed < 5


def test_a_large_output_is_stored_beside_the_record_and_expires_with_it(driver, job, app):
    output = bytes(range(256)) * 400
    driver.submit(job, 0)
    driver.commit(job, 0, "w", info={"loss": 1.0}, output=output)
    assert app.AsyncResult("a.0").get(timeout=5) == {"loss": 1.0, "output_bytes": 102_400}
    assert driver.redis.get(output_key("a.0")) == output
    for key in (meta_key("a.0"), output_key("a.0")):
        assert 0 < driver.redis.ttl(key) <= 3600


def test_a_commit_that_was_refused_writes_no_result(driver, job, app):
    driver.submit(job, 0)
    driver.submit(job, 1)
    assert driver.commit(job, 1, "w") == "gap"
    assert driver.commit(job, 0, "w", epoch="1", output=b"x" * 100_000) == "stale"
    assert app.AsyncResult("a.0").status == "PENDING"
    assert driver.redis.exists(output_key("a.0"), meta_key("a.1")) == 0
