"""A mailbox on the real Redis of the session, empty at the start of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from lorry_jobs.mailbox import Mailbox
from tests.jobs.driver import Driver


@pytest.fixture
def driver(redis_url: str) -> Iterator[Driver]:
    with redis.Redis.from_url(redis_url) as client:
        yield Driver(client)


@pytest.fixture
def mailbox(driver: Driver) -> Mailbox:
    return driver.mailbox
