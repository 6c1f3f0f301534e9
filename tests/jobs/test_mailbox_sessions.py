"""What becomes of the jobs of a client that is gone."""

from __future__ import annotations

import time


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
