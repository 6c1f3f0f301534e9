"""An op sent with Celery's own `send_task` lands in the mailbox; everything else goes kombu's ordinary way."""

from __future__ import annotations

import collections
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from kombu.exceptions import ContentDisallowed, OperationalError

from lorry_jobs import ops, transport
from lorry_jobs.celery_app import create_app
from lorry_jobs.errors import Backpressure, JobNotFound, LorryError, SequenceConflict
from lorry_jobs.mailbox import queue_name
from lorry_jobs.settings import QueueSettings


class Sender:
    def __init__(self, app):
        self.app = app

    def op(self, job, seq, payload=b"payload", op=ops.OPTIM_STEP, **headers):
        return self.app.send_task(
            ops.task_name(op),
            args=(job, seq),
            task_id=ops.task_id(job, seq),
            ignore_result=True,
            headers={
                transport.JOB: job,
                transport.SEQ: seq,
                transport.CHANNEL: "ears",
                transport.PAYLOAD: payload,
                transport.DIGEST: ops.digest(op, payload),
                transport.TTL: 60,
                transport.MAX_TOTAL: 2**40,
                **headers,
            },
        )

    def request(self, task, model="m", payload=b"prompt"):
        return self.app.send_task(
            ops.task_name(ops.SAMPLE),
            args=(model,),
            task_id=task,
            ignore_result=True,
            headers={
                transport.MODEL: model,
                transport.CHANNEL: "ears",
                transport.PAYLOAD: payload,
                transport.DIGEST: ops.digest(ops.SAMPLE, payload),
                transport.TTL: 60,
                transport.MAX_TOTAL: 2**40,
            },
        )


@pytest.fixture
def app(redis_url):
    app = create_app(QueueSettings(url=redis_url), client_name="sender")
    yield app
    app.close()


@pytest.fixture
def sender(app):
    return Sender(app)


def envelopes(driver, worker="w"):
    return [json.loads(message) for message in driver.redis.rpop(queue_name(worker), 10_000) or []]


def test_an_op_lands_in_the_mailbox_once_though_it_is_sent_twice(driver, sender):
    driver.hello("w")
    driver.create("a")
    assert sender.op("a", 0, b"bytes").id == "a.0"
    sender.op("a", 0, b"bytes")
    [envelope] = envelopes(driver)
    assert envelope["headers"]["task"] == "lorry.optim_step"
    assert envelope["headers"]["id"] == "a.0"
    assert driver.take("a", 0, "w") == b"bytes"
    assert driver.redis.exists("lorry", "unacked", "unacked_index") == 0  # nothing went kombu's way


@pytest.mark.parametrize("payload", [b"", b"\x00\xff\r\n\x80", b"0123456789abcdef" * 65536])
def test_the_payload_travels_beside_the_envelope(driver, sender, payload):
    driver.hello("w")
    driver.create("a", max_bytes=2**21)
    sender.op("a", 0, payload)
    [message] = driver.redis.rpop(queue_name("w"), 10)
    assert len(message) < 1500
    envelope = json.loads(message)
    assert not {transport.PAYLOAD, transport.DIGEST, transport.TTL, transport.MAX_TOTAL} & set(envelope["headers"])
    assert envelope["headers"][transport.CHANNEL] == "ears"
    assert driver.take("a", 0, "w") == payload


def test_refusals_are_raised_where_the_op_was_sent(driver, sender):
    driver.create("a", max_ops=2)
    sender.op("a", 0)
    sender.op("a", 1)
    for call, error, words in (
        (lambda: sender.op("a", 0, b"other bytes"), SequenceConflict, "another request"),
        (lambda: sender.op("a", 1, op=ops.SAVE_STATE), SequenceConflict, "another request"),
        (lambda: sender.op("a", 2), Backpressure, "as much for now as its bounds allow"),
        (lambda: sender.op("ghost", 0), JobNotFound, "does not know this job"),
    ):
        with pytest.raises(LorryError, match=words) as caught:
            call()
        assert type(caught.value) is error
    assert (caught.value.job, caught.value.op, caught.value.seq) == ("ghost", "optim_step", 0)
    sender.op("a", 1)  # and the connection still works


def test_an_op_of_a_failed_job_is_accepted_and_resolves_with_the_jobs_error(driver, sender):
    driver.hello("w")
    driver.create("a")
    sender.op("a", 0)
    driver.fail("a", "w", Backpressure("a stand-in for any error"))
    sender.op("a", 1)
    assert driver.outcome("a.1").error.message == "a stand-in for any error"


def test_a_request_takes_a_seat_and_may_be_sent_twice(driver, sender):
    driver.hello("w")
    sender.request("r1")
    sender.request("r1")
    [envelope] = envelopes(driver)
    assert (envelope["headers"]["id"], envelope["headers"]["task"]) == ("r1", "lorry.sample")
    assert driver.mailbox.take_request("r1", "w") == (b"prompt", 0)
    with pytest.raises(SequenceConflict):
        sender.request("r1", payload=b"another prompt")


def test_the_envelope_is_one_that_kombu_delivers(driver, sender, app):
    driver.hello("w")
    driver.create("a")
    sender.op("a", 0)
    with app.connection_for_read() as connection, connection.SimpleQueue(queue_name("w")) as queue:
        message = queue.get(timeout=10)
        args, kwargs, _ = message.decode()
        assert (args, kwargs) == (["a", 0], {})
        assert message.headers[transport.SEQ] == 0
        message.ack()


def test_other_messages_go_to_an_ordinary_queue(driver, app):
    app.send_task("someone.elses", args=(1, 2), task_id="t1", queue="ordinary")
    [message] = driver.redis.lrange("ordinary", 0, -1)
    assert json.loads(message)["headers"]["task"] == "someone.elses"
    with app.connection_for_read() as connection, connection.SimpleQueue("ordinary") as queue:
        assert queue.get(timeout=10).decode()[0] == [1, 2]


def test_a_pickled_task_is_not_read(app):
    taken = []

    def take_one():
        with app.connection_for_read() as connection:
            queue = app.amqp.queues.select_add("ordinary")
            with app.amqp.TaskConsumer(connection.channel(), [queue]) as consumer:
                consumer.register_callback(lambda body, message: taken.append(body[0]))
                connection.drain_events(timeout=10)

    app.send_task("someone.elses", args=(1, 2), queue="ordinary", serializer="pickle")
    with pytest.raises(ContentDisallowed, match="pickle"):
        take_one()
    app.send_task("someone.elses", args=(1, 2), queue="ordinary")
    take_one()
    assert taken == [[1, 2]]


def test_a_server_that_is_away_is_an_error_of_the_connection_not_of_the_op(redis_url):
    with socket.socket() as unused:  # bound and not listening: connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        app = create_app(QueueSettings(url=url, connect_timeout_seconds=0.5))
        with pytest.raises((OperationalError, redis.RedisError, OSError)) as caught:  # what the SDK tries again
            Sender(app).op("a", 0)
        assert not isinstance(caught.value, LorryError)
        app.close()


def test_many_threads_send_many_jobs_in_any_order_and_each_chain_is_in_order(driver, sender):
    jobs, length = [f"job{number}" for number in range(16)], 24
    driver.hello("w", slots=16)
    for job in jobs:
        driver.create(job, window=4)
    # Every op is sent by two threads, in an order that has nothing to do with the seqs.
    posts = [(job, seq) for job in jobs for seq in range(length)] * 2
    random.Random(7).shuffle(posts)
    with ThreadPoolExecutor(64) as pool:
        for sent in [pool.submit(sender.op, job, seq, f"{job} {seq}".encode()) for job, seq in posts]:
            sent.result(30)
    seen = collections.defaultdict(list)
    while delivered := envelopes(driver):
        for envelope in delivered:
            job, seq = envelope["headers"][transport.JOB], envelope["headers"][transport.SEQ]
            seen[job].append(seq)
            assert driver.take(job, seq, "w") == f"{job} {seq}".encode()
            assert driver.commit(job, seq, "w") == "ok"
    assert seen == {job: list(range(length)) for job in jobs}
