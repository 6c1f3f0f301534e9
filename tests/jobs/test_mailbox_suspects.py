"""Who is to blame when a worker dies: an op that was alone at two deaths, and nothing that merely was there."""

from __future__ import annotations

import pytest

from lorry_jobs import ops
from lorry_jobs.errors import WorkerCrashed
from tests.jobs.driver import Driver


def suspect(driver: Driver, job: str) -> int | None:
    return driver.mailbox.adopt(job, driver.owner(job)).suspect


def suspect_of(driver: Driver, job: str) -> str:
    """As it stands in the job's record, whoever owns the job."""
    return driver.mailbox.job_record(job)["suspect"]


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
    assert not driver.hello("a")
    driver.mailbox.absolve("a", [job])
    assert suspect(driver, job) is None
    driver.mailbox.trying("b", job)  # "b" took the job while it was suspect
    driver.hello("c")
    die(driver, "b")
    assert driver.outcome("job.0") is None, "only one worker died"
    assert suspect(driver, job) == 2


def test_coming_back_takes_nothing_back_that_another_death_said(driver, job):
    driver.hello("c")
    die(driver, "b")
    driver.mailbox.absolve("a", [job])
    assert suspect(driver, job) == 2
    driver.mailbox.absolve("b", [job])
    assert suspect(driver, job) is None


def test_an_op_that_freezes_every_worker_is_found_out(driver, job):
    """Each of them comes back. Only the first is believed, until the chain has gone on."""
    driver.mailbox.absolve("a", [job])
    driver.hello("c")
    die(driver, "b")
    driver.mailbox.absolve("b", [job])
    assert suspect(driver, job) == 2
    driver.mailbox.trying("c", job)
    driver.hello("d")
    die(driver, "c")
    assert isinstance(driver.outcome("job.0").error, WorkerCrashed)
    assert driver.owner(job) == "d"
    driver.commit(job, 1, "d")
    die(driver, "d")
    driver.mailbox.absolve("d", [job])
    assert suspect_of(driver, job) == ""


def test_requests_of_a_frozen_worker_are_not_suspect_either_but_once(driver):
    driver.hello("a")
    driver.request("r")
    driver.hello("b")
    die(driver, "a")
    assert driver.mailbox.take_request("r", "b") == (b"prompt", 1)
    driver.mailbox.absolve("a", ["r"])
    assert driver.mailbox.take_request("r", "b") == (b"prompt", 0)
    driver.hello("c")
    die(driver, "b")
    driver.mailbox.absolve("b", ["r"])
    assert driver.mailbox.take_request("r", "c") == (b"prompt", 1)


@pytest.mark.parametrize("op", ops.CHECKPOINT_OPS)
def test_a_request_that_runs_beside_the_clock_takes_down_two_workers_at_most(driver, op):
    driver.hello("a")
    driver.request("r", op=op)
    for heir, victim in (("b", "a"), ("c", "b")):
        assert driver.outcome("r") is None
        driver.hello(heir)
        die(driver, victim)
    error = driver.outcome("r").error
    assert isinstance(error, WorkerCrashed)
    assert error.op == op
    assert "while they worked on this request" in error.message


def test_a_sample_that_merely_was_there_at_two_deaths_goes_on(driver):
    driver.hello("a")
    driver.request("r")
    for heir, victim in (("b", "a"), ("c", "b")):
        driver.hello(heir)
        die(driver, victim)
    assert driver.outcome("r") is None
    assert driver.mailbox.take_request("r", "c") == (b"prompt", 1)
