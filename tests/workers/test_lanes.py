"""A cycle waits a little for the jobs that shared the last one."""

from __future__ import annotations

import threading
import time

import pytest

from lorry_workers.lanes import Delivery, Lanes

LONG = 30.0


def make_lanes(*jobs: str) -> Lanes:
    lanes = Lanes()
    for job in jobs:
        lanes.ensure(job)
        lanes.adopted(lanes.get(job), epoch="1", applied=-1, incomplete=None)
    return lanes


def deliver(lanes: Lanes, job: str) -> None:
    assert lanes.deliver(job, Delivery(f"{job}-0", "forward_backward", None, "", seq=0, tokens=10))


def test_it_ends_as_soon_as_all_are_there():
    lanes = make_lanes("a", "b", "c")
    deliver(lanes, "a")
    later = [threading.Timer(0.05 * number, deliver, (lanes, job)) for number, job in enumerate("bc", 1)]
    for timer in later:
        timer.start()
    started = time.monotonic()
    lanes.wait_for_company(["a", "b", "c"], LONG)
    assert time.monotonic() - started < LONG
    assert {lane.job for lane, _ in lanes.take_runs(1000)} == {"a", "b", "c"}
    for timer in later:
        timer.join()


def test_it_ends_with_its_time():
    lanes = make_lanes("a", "b")
    deliver(lanes, "a")
    started = time.monotonic()
    lanes.wait_for_company(["a", "b"], 0.05)
    assert 0.05 <= time.monotonic() - started < LONG
    assert [lane.job for lane, _ in lanes.take_runs(1000)] == ["a"]


@pytest.mark.parametrize("gone", ["dropped", "leaving", "closed", "never here"])
def test_nobody_waits_for_a_job_that_is_no_longer_here(gone):
    lanes = make_lanes("a", "b") if gone != "never here" else make_lanes("a")
    deliver(lanes, "a")
    end = {
        "dropped": lambda: lanes.drop("b", "moved"),
        "leaving": lambda: lanes.leave(lanes.get("b")),
        "closed": lambda: lanes.close("the worker stops"),
        "never here": lambda: None,
    }[gone]
    end()
    started = time.monotonic()
    lanes.wait_for_company(["a", "b"], LONG)
    assert time.monotonic() - started < LONG / 2


def test_nobody_waits_where_nothing_is_to_run():
    lanes = make_lanes("a", "b")
    started = time.monotonic()
    lanes.wait_for_company(["a", "b"], LONG)
    assert time.monotonic() - started < LONG / 2
