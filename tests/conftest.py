"""Fixtures for every test: a real Redis, tiny models made on the spot, and whole stacks of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lorry
from lorry.stack import RedisServer, Stack, StackSettings
from lorry.stack.programs import free_port

QWEN_SMALL = "Qwen/Qwen3-0.6B"
QWEN_LARGE = "Qwen/Qwen3-4B-Instruct-2507"


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import make_tiny_qwen3  # here, so that tests of the SDK run without torch

    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One real redis-server for tests that need no worker. Use `redis_url`, which starts each test empty."""
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder / "data", free_port(), "test-password", folder / "redis.log") as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


StackMaker = Callable[..., Stack]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Stack]:
    """A stack of real processes for all tests that do not break it: two tiny models under the seeds' names, Flower."""
    settings = StackSettings(
        home=tmp_path_factory.mktemp("stack"),
        url=None,
        models=[f"{QWEN_SMALL}={tiny_qwen3}", f"{QWEN_LARGE}={tiny_qwen3}"],
        flower=True,
    )
    with Stack(settings, started_by="pytest") as running:
        yield running


@pytest.fixture
def service(stack: Stack) -> lorry.ServiceClient:
    return lorry.ServiceClient(base_url=stack.url)


@pytest.fixture
def make_stack(tmp_path: Path, tiny_qwen3: Path) -> Iterator[StackMaker]:
    """Stacks of one's own, for tests that kill, freeze or restart something. All are stopped at the end."""
    started: list[Stack] = []

    def make(*, workers: int = 1, flower: bool = False, models: list[str] | None = None) -> Stack:
        settings = StackSettings(
            home=tmp_path / f"stack-{len(started)}",
            url=None,
            models=models or [f"{QWEN_SMALL}={tiny_qwen3}"],
            workers=workers,
            flower=flower,
        )
        running = Stack(settings, started_by="pytest")
        running.start()
        started.append(running)
        return running

    yield make
    for running in started:
        running.stop()
