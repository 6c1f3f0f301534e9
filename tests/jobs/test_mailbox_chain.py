"""A job's chain: submitted once, released in order, committed once."""

from __future__ import annotations

import time

import pytest
import redis
from redis.exceptions import NoScriptError

from lorry_jobs import ops
from lorry_jobs.errors import OpCancelled, StateRolledBack, UserError
from lorry_jobs.mailbox import DROP_GRADIENTS, SKIP, JobStatus, meta_key, output_key
from lorry_jobs.settings import MAX_WINDOW
from tests.jobs.driver import TTL, Driver


def start(driver: Driver, job: str = "a", worker: str = "w", **limits: int) -> None:
    """A worker, and a job on it whose first op is waiting in the worker's queue."""
    driver.hello(worker)
    assert driver.create(job, **limits) == "ok"


# ----------------------------------------------------------------------------------------------------- submitting


def test_creating_again_is_safe_and_creating_something_else_is_a_conflict(driver):
    assert driver.create("a", "m", spec='{"rank": 8}') == "ok"
    assert driver.create("a", "m", spec='{"rank": 8}') == "dup"
    assert driver.create("a", "m", spec='{"rank": 9}') == "conflict"
    assert driver.create("a", "other", spec='{"rank": 8}') == "conflict"


def test_a_new_job_waits_for_op_0(driver):
    start(driver)
    status = driver.mailbox.status("a")
    assert (status.state, status.model, status.committed, status.released) == ("active", "m", -1, -1)
    assert driver.owner("a") == ""  # no work, so no place is taken


def test_submitting_twice_delivers_once(driver):
    start(driver)
    assert [driver.submit("a", 0), driver.submit("a", 0)] == ["ok", "dup"]
    assert driver.delivered("w") == [("a", 0)]


def test_another_request_under_the_same_seq_is_a_conflict_before_and_after_the_commit(driver):
    start(driver)
    driver.submit("a", 0, b"one")
    assert driver.submit("a", 0, b"two") == "conflict"
    assert driver.take("a", 0, "w") == b"one"
    assert driver.commit("a", 0, "w") == "ok"
    assert driver.submit("a", 0, b"two") == "conflict"
    assert driver.submit("a", 0, b"one") == "dup"
    assert driver.delivered("w") == [("a", 0)]


def test_submitting_a_committed_op_again_publishes_its_result_again(driver):
    start(driver)
    driver.submit("a", 0)
    driver.commit("a", 0, "w", info={"loss": 2.5})
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears")
        assert listener.get_message(timeout=5) is None  # the subscription itself
        assert driver.submit("a", 0, channel="ears") == "dup"
        message = listener.get_message(timeout=5)
    assert message["data"] == driver.redis.get(meta_key("a.0"))


def test_a_seq_below_0_is_refused(driver):
    start(driver)
    assert driver.submit("a", -1) == "conflict"
    assert driver.redis.exists("lorry:job:a:ops", "lorry:job:a:ledger") == 0


def test_an_op_for_an_unknown_job_is_refused_and_leaves_nothing(driver):
    assert driver.submit("ghost", 0) == "nojob"
    assert driver.all_keys() == set()
    assert driver.mailbox.status("ghost") == JobStatus("unknown")


def test_ops_that_arrive_out_of_order_are_staged_and_released_in_order(driver):
    start(driver)
    driver.submit("a", 0)
    driver.commit("a", 0, "w")
    driver.delivered("w")
    assert driver.submit("a", 3) == "ok"
    assert driver.delivered("w") == []
    assert driver.submit("a", 1) == "ok"
    assert driver.delivered("w") == [("a", 1)]
    assert driver.submit("a", 2) == "ok"
    assert driver.delivered("w") == [("a", 2), ("a", 3)]


def test_never_more_than_the_window_is_released_and_uncommitted(driver):
    start(driver, window=3)
    driver.submit_all("a", 9)
    seen = driver.delivered("w")
    assert seen == [("a", 0), ("a", 1), ("a", 2)]
    for seq in range(10):
        assert driver.commit("a", seq, "w") == "ok"
        status = driver.mailbox.status("a")
        assert status.committed == seq
        assert status.released == min(seq + 3, 9)
        seen += driver.delivered("w")
        assert len(seen) == status.released + 1
    assert seen == [("a", seq) for seq in range(10)]


def test_whole_updates_are_released_however_many_chunks_they_have(driver):
    start(driver, window=2)
    kinds = [ops.FORWARD_BACKWARD] * 5 + [ops.OPTIM_STEP] + [ops.FORWARD_BACKWARD, ops.OPTIM_STEP] * 2
    driver.submit("a", 0)
    driver.commit("a", 0, "w")
    for seq, kind in enumerate(kinds, 1):
        assert driver.submit("a", seq, op=kind) == "ok"
    released = []
    for seq in range(1, len(kinds) + 1):
        assert driver.commit("a", seq, "w") == "ok"
        released.append(driver.mailbox.status("a").released)
    # The five chunks and their step at once; then one update is whole, and the next begins as there is room.
    assert released == [6, 6, 6, 6, 8, 8, 10, 10, 10, 10]


def test_the_window_grows_to_sixteen_and_no_further(driver):
    assert MAX_WINDOW == 16
    start(driver, window=2)
    driver.submit("a", 0)
    for seq in range(1, 41):
        driver.submit("a", seq, op=ops.FORWARD)
    assert driver.mailbox.status("a").released == 15
    driver.commit("a", 0, "w")
    assert driver.mailbox.status("a").released == 16
    driver.commit("a", 1, "w")
    assert driver.mailbox.status("a").released == 17


def test_backpressure_by_number_of_ops(driver):
    start(driver, max_ops=3)
    assert [driver.submit("a", seq) for seq in range(4)] == ["ok", "ok", "ok", "full"]
    driver.commit("a", 0, "w")
    assert driver.submit("a", 3) == "ok"
    assert driver.submit("a", 4) == "full"
    # A refused op leaves no trace: later it is accepted, and with other bytes.
    driver.commit("a", 1, "w")
    assert driver.submit("a", 4, b"another") == "ok"


def test_backpressure_by_bytes_but_the_next_op_is_always_accepted(driver):
    start(driver, max_bytes=100)
    assert driver.submit("a", 0, b"x" * 60) == "ok"
    assert driver.submit("a", 1, b"x" * 41) == "full"
    assert driver.submit("a", 1, b"x" * 40) == "ok"
    assert driver.submit("a", 2, b"") == "ok"  # exactly 100 bytes
    assert driver.queued_bytes("a") == 100
    driver.commit("a", 0, "w", effect="0")
    driver.commit("a", 1, "w", effect="0")
    driver.commit("a", 2, "w", effect="0")
    assert driver.submit("a", 3, b"x" * 5000) == "ok"  # larger than the bound, but nothing else could go first
    assert driver.submit("a", 4, b"x") == "full"


# ----------------------------------------------------------------------------------------------------- committing


def test_a_commit_is_recorded_once_and_says_why_it_is_not(driver):
    start(driver)
    driver.submit_all("a", 2)
    assert driver.commit("a", 1, "w") == "gap"
    assert driver.commit("a", 0, "w", info={"first": True}) == "ok"
    assert driver.commit("a", 0, "w", info={"first": False}) == "dup"
    assert driver.outcome("a.0").info == {"first": True}
    assert driver.commit("a", 1, "other worker") == "stale"
    assert driver.commit("a", 1, "w", epoch=str(int(driver.epoch("a")) - 1)) == "stale"
    assert driver.outcome("a.1") is None
    assert driver.committed("a") == 0


def test_a_commit_publishes_to_the_listener_and_to_celery(driver):
    start(driver)
    driver.submit("a", 0)
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears", meta_key("a.0"))
        while driver.redis.pubsub_numsub("ears", meta_key("a.0")) != [(b"ears", 1), (b"celery-task-meta-a.0", 1)]:
            pass
        driver.commit("a", 0, "w", channel="ears")
        heard = {}
        while len(heard) < 2:
            message = listener.get_message(timeout=5)
            if message:
                heard[message["channel"].decode()] = message["data"]
    record = driver.redis.get("celery-task-meta-a.0")
    assert heard == {"ears": record, "celery-task-meta-a.0": record}


def test_results_have_a_time_to_live(driver):
    start(driver)
    driver.submit("a", 0)
    driver.commit("a", 0, "w", output=b"x" * 100_000)
    for key in (meta_key("a.0"), output_key("a.0")):
        assert TTL - 60 <= driver.redis.ttl(key) <= TTL


def test_the_journal_says_what_a_replay_does(driver):
    start(driver)
    driver.submit_all("a", 3)
    driver.commit("a", 0, "w", effect="1")
    driver.commit("a", 1, "w", effect="0")
    driver.commit("a", 2, "w", effect="drop")
    journal = driver.mailbox.journal("a", 0, 2)
    assert [seq for seq, _, _ in journal] == [0, 1, 2]
    assert b'"seq": 0' in journal[0][1]
    assert [envelope for _, envelope, _ in journal[1:]] == [SKIP, DROP_GRADIENTS]
    assert [payload for _, _, payload in journal] == [b"payload", None, None]
    assert driver.mailbox.journal("a", 3, 2) == []


def test_a_snapshot_frees_the_journal_before_the_snapshot_before_it(driver):
    """Two generations: should the last snapshot be damaged, the one before and the journal since it are there."""
    start(driver)
    driver.submit_all("a", 5)
    for seq in range(5):
        driver.commit("a", seq, "w")
    epoch = driver.epoch("a")
    assert driver.snapshot("a", "w", 5, "ref-5") == "gap"  # op 5 is not committed
    assert driver.snapshot("a", "w", 2, "ref-2", epoch=str(int(epoch) - 1)) == "stale"
    assert driver.mailbox.snapshot("a", "w", epoch, 2, "ref-2") == ("ok", "", "")
    assert driver.snapshot("a", "w", 1, "ref-1") == "old"
    assert len(driver.redis.hkeys("lorry:job:a:ops")) == 6  # nothing before ref-2: the journal goes back to op 0
    assert driver.mailbox.snapshot("a", "w", epoch, 3, "ref-3") == ("ok", "", "ref-2")
    placement = driver.mailbox.adopt("a", "w")
    assert (placement.snapshot, placement.snapshot_ref, placement.committed) == (3, "ref-3", 4)
    assert (placement.previous_snapshot, placement.previous_ref) == (2, "ref-2")
    assert sorted(driver.redis.hkeys("lorry:job:a:ops")) == [b"3", b"4", b"5"]
    assert sorted(driver.redis.hkeys("lorry:job:a:payloads")) == [b"3", b"4", b"5"]
    assert driver.queued_bytes("a") == 3 * len(b"payload")
    assert driver.mailbox.snapshot("a", "w", epoch, 4, "ref-4") == ("ok", "ref-2", "ref-3")


def test_queued_bytes_return_to_0(driver):
    start(driver)
    for seq, size in enumerate([7, 0, 100, 31, 8]):
        assert driver.submit("a", seq, b"x" * size) == "ok"
    assert driver.queued_bytes("a") == 146
    assert driver.cancel("a", 4)
    driver.commit("a", 0, "w", effect="1")
    driver.commit("a", 1, "w", effect="1")
    driver.commit("a", 2, "w", effect="0")
    assert driver.queued_bytes("a") == 7 + 31 + 8
    driver.commit("a", 3, "w", effect="drop")  # and passes the cancelled op 4
    assert driver.queued_bytes("a") == 7
    assert driver.mailbox.total_bytes() == 7
    driver.snapshot("a", "w", 4, "ref")
    driver.snapshot("a", "w", 4, "ref")  # now it is the one before, too
    assert driver.queued_bytes("a") == 0
    assert driver.mailbox.total_bytes() == 0
    assert driver.redis.exists("lorry:job:a:ops", "lorry:job:a:payloads", "lorry:job:a:cancelled") == 0


def test_the_incomplete_mark_stays_until_it_is_cleared_and_moves_with_the_job(driver):
    start(driver)
    driver.submit_all("a", 4)
    driver.commit("a", 0, "w")
    assert driver.mailbox.adopt("a", "w").incomplete is None
    driver.commit("a", 1, "w", incomplete="1", error=UserError("bad shape"))
    driver.commit("a", 2, "w", incomplete="-")
    driver.hello("w2")
    driver.yield_job("a", "w")
    assert driver.mailbox.adopt("a", "w2").incomplete == 1
    driver.commit("a", 3, "w2", incomplete="")
    assert driver.mailbox.adopt("a", "w2").incomplete is None


def test_the_mean_cost_is_the_time_at_the_head_of_the_chain(driver):
    start(driver)
    driver.submit_all("a", 2)
    driver.commit("a", 0, "w")  # making the model is no measure of what follows
    assert driver.mailbox.status("a").cost_ms == 0
    time.sleep(0.05)
    driver.commit("a", 1, "w")
    first = driver.mailbox.status("a").cost_ms
    assert 50 <= first < 2000
    driver.commit("a", 2, "w")  # at once: the mean of the two
    assert first * 0.5 <= driver.mailbox.status("a").cost_ms <= first * 0.5 + 25


def test_a_payload_is_handed_only_to_the_owner_and_only_before_the_commit(driver):
    start(driver)
    driver.submit("a", 0, b"")
    driver.submit("a", 1, b"bytes")
    assert driver.take("a", 0, "w") == b""
    assert driver.take("a", 1, "other") is None
    assert driver.take("ghost", 1, "w") is None
    driver.commit("a", 0, "w")
    assert driver.take("a", 0, "w") is None
    assert driver.take("a", 1, "w") == b"bytes"


def test_two_jobs_do_not_wait_for_each_other(driver):
    start(driver, "a", window=2)
    driver.create("b", window=2)
    driver.submit_all("a", 3)
    driver.submit_all("b", 3)
    assert driver.delivered("w") == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    driver.commit("b", 0, "w")
    driver.commit("b", 1, "w")
    assert driver.delivered("w") == [("b", 2), ("b", 3)]
    assert (driver.committed("a"), driver.committed("b")) == (-1, 1)


# ----------------------------------------------------------------------------------------------------- cancelling


def cancelled(driver: Driver, task: str) -> bool:
    outcome = driver.outcome(task)
    return outcome is not None and type(outcome.error) is OpCancelled


def test_an_op_that_was_handed_out_or_is_unknown_cannot_be_cancelled(driver):
    start(driver, window=2)
    driver.submit_all("a", 2)
    assert not driver.cancel("a", 1)  # with the worker
    driver.commit("a", 0, "w")
    assert not driver.cancel("a", 0)  # committed
    assert not driver.cancel("a", 7)  # never submitted
    assert not driver.cancel("ghost", 0)
    for seq in (1, 2):
        assert driver.commit("a", seq, "w", info={"ran": seq}) == "ok"
        assert driver.outcome(f"a.{seq}").info == {"ran": seq}


def test_the_chain_goes_on_past_cancelled_ops(driver):
    start(driver, window=2)
    driver.submit_all("a", 6)
    assert driver.cancel("a", 3)
    assert driver.cancel("a", 4)
    driver.commit("a", 0, "w")
    assert driver.delivered("w") == [("a", 0), ("a", 1), ("a", 2)]
    assert not cancelled(driver, "a.3")  # resolved in its turn, not before
    driver.commit("a", 1, "w")
    assert driver.delivered("w") == []
    driver.commit("a", 2, "w")
    assert cancelled(driver, "a.3")
    assert cancelled(driver, "a.4")
    assert driver.committed("a") == 4
    assert driver.delivered("w") == [("a", 5), ("a", 6)]
    assert driver.commit("a", 5, "w") == "ok"
    assert driver.mailbox.journal("a", 3, 4) == [(3, SKIP, None), (4, SKIP, None)]


def test_an_op_at_the_head_of_a_job_without_worker_is_cancelled_at_once(driver):
    driver.create("a")
    driver.submit_all("a", 1)
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears")
        listener.get_message(timeout=5)
        assert driver.cancel("a", 0, channel="ears")
        assert listener.get_message(timeout=5)["data"] == driver.redis.get(meta_key("a.0"))
    assert cancelled(driver, "a.0")
    assert driver.committed("a") == 0
    driver.hello("w")
    assert driver.delivered("w") == [("a", 1)]


def test_a_job_whose_only_op_was_cancelled_no_longer_waits_for_a_worker(driver):
    driver.create("a")
    driver.submit("a", 0)
    assert driver.mailbox.unplaced("m") == 1
    driver.cancel("a", 0)
    assert driver.mailbox.unplaced("m") == 0


def test_cancelling_a_forward_backward_leaves_the_accumulation_incomplete(driver):
    start(driver, window=2)
    driver.submit_all("a", 4)
    assert driver.cancel("a", 2, poisons=True)
    assert driver.cancel("a", 3, poisons=True)
    driver.commit("a", 0, "w")
    assert driver.mailbox.adopt("a", "w").incomplete is None
    driver.commit("a", 1, "w")
    assert driver.mailbox.adopt("a", "w").incomplete == 2  # the first that is missing


def test_cancelling_another_op_does_not(driver):
    driver.create("a")
    driver.submit_all("a", 1)
    driver.cancel("a", 0, poisons=False)
    driver.hello("w")
    assert driver.mailbox.adopt("a", "w").incomplete is None


def test_cancelling_twice_is_the_same_as_once(driver):
    start(driver, window=2)
    driver.submit_all("a", 3)
    assert driver.cancel("a", 2)
    assert driver.cancel("a", 2)
    driver.commit("a", 0, "w")
    driver.commit("a", 1, "w")
    assert driver.committed("a") == 2
    assert driver.delivered("w") == [("a", 0), ("a", 1), ("a", 3)]


# ------------------------------------------------------------------------------------------- the end of a job


def test_a_failed_job_fails_what_is_queued_and_all_that_comes(driver):
    start(driver, window=2)
    driver.submit_all("a", 3)
    driver.submit("a", 5)
    driver.commit("a", 0, "w")
    assert driver.cancel("a", 3)
    error = StateRolledBack("the journal is gone", job="a")
    assert not driver.mailbox.fail("a", "w", "1", template="{}", ttl=TTL)  # not the owner's epoch
    assert driver.fail("a", "w", error)
    for task in ("a.1", "a.2"):
        outcome = driver.outcome(task)
        assert outcome.task == task
        assert type(outcome.error) is StateRolledBack
        assert outcome.error.message == "the journal is gone"
    assert cancelled(driver, "a.3")
    assert driver.outcome("a.5") is None  # op 4 may still come before it
    assert driver.submit("a", 4, channel="") == "failed"
    assert type(driver.outcome("a.4").error) is StateRolledBack
    assert type(driver.outcome("a.5").error) is StateRolledBack
    assert driver.submit("a", 6) == "failed"
    assert driver.submit("a", 6) == "dup"
    assert driver.submit("a", 6, b"other") == "conflict"
    status = driver.mailbox.status("a")
    assert (status.state, status.committed) == ("failed", 6)
    assert driver.queued_bytes("a") == len(b"payload")  # op 0's, in the journal
    assert driver.redis.exists("lorry:job:a:cancelled") == 0


def test_a_failed_job_tells_each_client_on_its_own_channel(driver):
    start(driver)
    driver.submit("a", 0, channel="ears-0")
    driver.submit("a", 1, channel="ears-1")
    with driver.redis.pubsub(ignore_subscribe_messages=True) as listener:
        listener.subscribe("ears-0", "ears-1")
        listener.get_message(timeout=5)
        listener.get_message(timeout=5)
        driver.fail("a", "w", StateRolledBack("gone"))
        heard = [listener.get_message(timeout=5) for _ in range(2)]
    assert [(message["channel"], message["data"]) for message in heard] == [
        (b"ears-0", driver.redis.get(meta_key("a.0"))),
        (b"ears-1", driver.redis.get(meta_key("a.1"))),
    ]


def test_a_failed_job_needs_no_worker_any_more(driver):
    driver.hello("w", slots=1)
    for job in "ab":
        driver.create(job)
        driver.submit(job, 0)
    epoch = driver.epoch("a")
    assert driver.fail("a", "w", StateRolledBack("gone"))
    assert (driver.owner("a"), driver.owner("b")) == ("", "w")
    assert driver.mailbox.jobs_of("w") == {"b"}
    assert driver.mailbox.adopt("a", "w") is None
    assert driver.commit("a", 0, "w", epoch=epoch) == "stale"
    assert driver.submit("a", 1) == "failed"
    assert driver.mailbox.unplaced("m") == 0


def test_closing_frees_the_place_and_every_key_but_the_results(driver):
    driver.hello("w", slots=2)
    before = driver.all_keys() | {"lorry:queue:w"}
    driver.create("a", window=2)
    driver.submit_all("a", 4)
    driver.commit("a", 0, "w", output=b"x" * 100_000)
    driver.cancel("a", 4)
    assert driver.free_slots("w") == 1
    assert driver.mailbox.close("a") == "ok"
    assert driver.mailbox.close("a") == "nojob"
    assert driver.free_slots("w") == 2
    assert driver.all_keys() == before | {"celery-task-meta-a.0", "lorry:output:a.0"}
    # What the worker still has in hand is refused.
    assert driver.take("a", 1, "w") is None
    assert driver.commit("a", 1, "w", epoch="1") == "stale"
    assert driver.submit("a", 5) == "nojob"


def test_an_unplaced_job_can_be_closed(driver):
    driver.create("a")
    driver.submit("a", 0)
    assert driver.mailbox.close("a") == "ok"
    assert driver.all_keys() == set()
    driver.hello("w")
    assert driver.delivered("w") == []


def test_answers_survive_a_lost_script_cache(driver):
    start(driver)
    driver.submit("a", 0)
    driver.redis.script_flush()  # as after a restart of Redis
    assert driver.submit("a", 1) == "ok"
    driver.redis.script_flush()
    # Single calls load it again by themselves; who sends a pipeline does so and sends it again.
    with pytest.raises(NoScriptError):
        driver.commit("a", 0, "w")
    driver.mailbox.load_script()
    assert driver.commit("a", 0, "w") == "ok"


def test_a_wrong_call_fails_without_half_a_write(driver):
    start(driver)
    try:
        driver.mailbox._call("no_such_function")
    except redis.ResponseError:
        pass
    else:
        raise AssertionError("an unknown function must be an error")
    assert driver.mailbox.status("a").state == "active"
