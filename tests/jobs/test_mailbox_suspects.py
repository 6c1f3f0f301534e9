"""Who is to blame when a worker dies: an op that was alone at two deaths, and nothing that merely was there."""

from __future__ import annotations

import time

import pytest

from lorry_jobs.errors import WorkerCrashed
from tests.jobs.driver import Driver


def suspect(driver: Driver, job: str) -> int | None:
    return driver.mailbox.adopt(job, driver.owner(job)).suspect


def die(driver: Driver, worker: str) -> None:
    driver.let_lease_end(worker)
    driver.reap()


@pytest.fixture
def job(driver: Driver) -> str:
    """A job with three ops, whose worker "a" has died with it; "b" has it now."""
    driver.hello("a")
    driver.create("job")
    driver.submit_all("job", 2)
    driver.hello("b")
    die(driver, "a")
    assert driver.owner("job") == "b"
    return "job"


def test_the_first_death_makes_all_that_was_handed_out_suspect(driver, job):
    assert suspect(driver, job) == 2
    assert driver.outcome("job.0") is None


def test_an_op_that_was_alone_at_the_second_death_fails(driver, job):
    driver.mailbox.trying("b", job)
    driver.hello("c")
    die(driver, "b")
    assert isinstance(driver.outcome("job.0").error, WorkerCrashed)
    assert driver.committed(job) == 0


def test_a_job_that_was_merely_there_at_the_second_death_does_not_fail(driver, job):
    driver.mailbox.trying("b", "another")
    driver.hello("c")
    die(driver, "b")
    assert driver.outcome("job.0") is None
    assert suspect(driver, job) == 2


def test_a_worker_that_comes_back_from_a_freeze_was_killed_by_nothing(driver, job):
    assert driver.mailbox.hello("a", "m", slots=4, seats=4, lease_seconds=60, info="{}", model_info="{}") == "dead"
    assert suspect(driver, job) is None
    driver.mailbox.trying("b", job)  # "b" took the job while it was suspect
    driver.hello("c")
    die(driver, "b")
    assert driver.outcome("job.0") is None, "only one worker died"
    assert suspect(driver, job) == 2


def test_coming_back_takes_nothing_back_that_another_death_said(driver, job):
    driver.hello("c")
    die(driver, "b")
    driver.hello("a")
    assert suspect(driver, job) == 2
    driver.hello("b")
    assert suspect(driver, job) is None


def test_requests_of_a_frozen_worker_are_not_suspect_either(driver):
    driver.hello("a")
    driver.request("r")
    driver.hello("b")
    die(driver, "a")
    assert driver.mailbox.take_request("r", "b") == (b"prompt", 1)
    driver.hello("a")
    assert driver.mailbox.take_request("r", "b") == (b"prompt", 0)


def test_a_job_nobody_serves_outlives_its_client_only_for_a_while(driver):
    driver.create("job", session="gone")
    driver.submit_all("job", 1)
    driver.mailbox.end_session("gone")
    assert driver.mailbox.reap_sessions(30, patience_seconds=60) == []
    driver.hello("w", "another model")
    time.sleep(0.05)
    assert driver.mailbox.reap_sessions(30, patience_seconds=0.02) == ["job"]
    assert int(driver.redis.get("lorry:bytes")) == 0
    assert driver.mailbox.unplaced("m") == 0


def test_a_job_that_is_being_served_is_never_abandoned(driver):
    driver.hello("w")
    driver.create("job", session="gone")
    driver.submit_all("job", 1)
    driver.mailbox.end_session("gone")
    time.sleep(0.05)
    assert driver.mailbox.reap_sessions(30, patience_seconds=0.02) == []
