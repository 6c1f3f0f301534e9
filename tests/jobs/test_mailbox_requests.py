"""Sampling requests: unordered, each recorded before it is delivered, held by one worker at a time."""

from __future__ import annotations

import json

from lorry_jobs import results
from lorry_jobs.errors import OpCancelled
from lorry_jobs.mailbox import RequestStatus, meta_key
from tests.jobs.driver import TTL, Driver, next_millisecond


def cancel(driver: Driver, task: str) -> bool:
    record = results.failure(task, OpCancelled("cancelled before it started"))
    return driver.mailbox.cancel_request(task, meta=record, channel="ears", ttl=TTL)


def ask(driver: Driver, *tasks: str) -> None:
    for task in tasks:
        assert driver.request(task) == "ok"
        next_millisecond()


def test_no_more_requests_are_handed_out_than_there_are_seats(driver):
    driver.hello("w", seats=2)
    ask(driver, "r1", "r2", "r3")
    assert driver.delivered_requests("w") == ["r1", "r2"]
    assert driver.mailbox.requests_of("w") == {"r1", "r2"}
    assert driver.free_seats("w") == 0
    assert driver.mailbox.request_status("r1") == RequestStatus("active", "m", owner="w", workers=1, ahead=-1)
    assert driver.mailbox.request_status("r3") == RequestStatus("active", "m", owner="", workers=1, ahead=0)


def test_a_finished_request_frees_its_seat_for_the_one_that_waited_longest(driver):
    driver.hello("w", seats=1)
    ask(driver, "r1", "zebra", "apple", "mango")
    served = []
    for _ in range(4):
        [task] = driver.delivered_requests("w")
        served.append(task)
        assert driver.finish(task, "w") == "ok"
    assert served == ["r1", "zebra", "apple", "mango"]
    assert driver.delivered_requests("w") == []
    assert driver.free_seats("w") == 1


def test_requests_wait_for_a_worker_of_their_model(driver):
    ask(driver, "first", "second")
    driver.hello("other", "n")
    assert driver.delivered_requests("other") == []
    assert driver.mailbox.request_status("second") == RequestStatus("active", "m", workers=0, ahead=1)
    driver.hello("w", seats=5)
    assert driver.delivered_requests("w") == ["first", "second"]


def test_seats_and_slots_are_counted_apart(driver):
    driver.hello("w", slots=1, seats=1)
    driver.create("job")
    driver.submit("job", 0)
    ask(driver, "r")
    assert (driver.free_slots("w"), driver.free_seats("w")) == (0, 0)
    driver.finish("r", "w")
    assert (driver.free_slots("w"), driver.free_seats("w")) == (0, 1)


def test_a_result_is_written_once_published_and_leaves_nothing_else(driver):
    driver.hello("w")
    before = driver.all_keys()
    ask(driver, "r")
    assert driver.mailbox.take_request("r", "w") == (b"prompt", 0)
    assert driver.mailbox.take_request("r", "other") is None
    driver.delivered_requests("w")
    assert driver.finish("r", "other") == "stale"
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears")
        listener.get_message(timeout=5)
        assert driver.finish("r", "w", channel="ears") == "ok"
        assert listener.get_message(timeout=5)["data"] == driver.redis.get(meta_key("r"))
    assert driver.outcome("r").info == {"worker": "w"}
    assert driver.finish("r", "w") == "dup"
    assert driver.free_seats("w") == 4
    assert driver.mailbox.take_request("r", "w") is None
    assert driver.mailbox.request_status("r") == RequestStatus("unknown")
    assert driver.all_keys() == before | {"celery-task-meta-r"}
    assert TTL - 60 <= driver.redis.ttl("celery-task-meta-r") <= TTL


def test_asking_again_is_safe_before_and_after_the_answer(driver):
    driver.hello("w")
    assert [driver.request("r"), driver.request("r")] == ["ok", "dup"]
    assert driver.request("r", payload=b"another prompt") == "conflict"
    assert driver.delivered_requests("w") == ["r"]
    driver.finish("r", "w")
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears")
        listener.get_message(timeout=5)
        assert driver.request("r", channel="ears") == "dup"
        assert listener.get_message(timeout=5)["data"] == driver.redis.get(meta_key("r"))
    assert driver.delivered_requests("w") == []
    assert driver.free_seats("w") == 4


def test_a_waiting_request_can_be_cancelled_and_a_running_one_cannot(driver):
    driver.hello("w", seats=1)
    ask(driver, "r1", "r2", "r3")
    assert not cancel(driver, "r1")
    assert not cancel(driver, "ghost")
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears")
        listener.get_message(timeout=5)
        assert cancel(driver, "r2")
        assert json.loads(listener.get_message(timeout=5)["data"])["task_id"] == "r2"
    assert type(driver.outcome("r2").error) is OpCancelled
    assert not cancel(driver, "r2")
    driver.delivered_requests("w")
    driver.finish("r1", "w")
    assert driver.delivered_requests("w") == ["r3"]
    assert driver.outcome("r1").info == {"worker": "w"}


def test_the_requests_of_a_dead_worker_go_to_another(driver):
    driver.hello("w1", seats=3)
    ask(driver, "r1", "r2", "r3")
    driver.hello("w2", seats=2)
    driver.let_lease_end("w1")
    assert driver.reap() == 3
    taken = driver.delivered_requests("w2")
    assert len(taken) == 2
    [waits] = {"r1", "r2", "r3"} - set(taken)
    assert driver.mailbox.request_status(waits).ahead == 0
    assert driver.finish(taken[0], "w1") == "stale"  # the dead worker's late answer
    assert driver.mailbox.take_request(taken[0], "w1") is None
    assert driver.outcome(taken[0]) is None
    assert driver.finish(taken[0], "w2") == "ok"
    assert driver.delivered_requests("w2") == [waits]
    assert driver.outcome(taken[0]).info == {"worker": "w2"}


def test_a_lost_delivery_is_sent_again(driver):
    driver.hello("w")
    ask(driver, "r")
    assert driver.delivered_requests("w") == ["r"]  # taken from the queue, and lost
    assert driver.mailbox.resend_request("r", "w") == "ok"
    assert driver.delivered_requests("w") == ["r"]
    assert driver.mailbox.resend_request("r", "other") == "stale"
    driver.finish("r", "w")
    assert driver.mailbox.resend_request("r", "w") == "gone"
    assert driver.delivered_requests("w") == []
    assert driver.free_seats("w") == 4
