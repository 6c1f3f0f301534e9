"""The reaper, over a real Redis: on time, never what is in use or pinned, and with a warning before."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from lorry_jobs.checkpoint_index import CheckpointIndex
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.types import ReindexRequest
from lorry_workers.administration import Administration
from lorry_workers.engine.store import Store
from lorry_workers.reaper import Reaper
from lorry_workers.settings import WorkerSettings

from .conftest import JOB, PATH, content, everything_in, origin


class Engine:
    """What administration needs of an engine where nothing is merged."""

    def __init__(self, store: Store[Any]) -> None:
        self.store = store


@pytest.fixture
def administration(redis_url: str, store: Store[Any], tmp_path: Path) -> Administration:
    settings = WorkerSettings(store_dir=tmp_path)
    return Administration(Engine(store), redis.Redis.from_url(redis_url), settings)  # type: ignore[arg-type]


@pytest.fixture
def index(administration: Administration) -> CheckpointIndex:
    return administration.index


@pytest.fixture
def reaper(store: Store[Any], administration: Administration) -> Reaper:
    return Reaper(store, administration, WorkerSettings())


def save(store: Store[Any], index: CheckpointIndex, name: str, ttl: int | None) -> str:
    manifest = store.save(CheckpointPath(JOB, "weights", name), content(1), origin(name), ttl_seconds=ttl)
    index.put(manifest.metadata)
    return str(manifest.path)


def test_it_deletes_what_has_expired_and_nothing_else(
    store: Store[Any], index: CheckpointIndex, reaper: Reaper
) -> None:
    forever, later = save(store, index, "forever", None), save(store, index, "later", 3600)
    brief, pinned, used = (save(store, index, name, 1) for name in ("brief", "pinned", "used"))
    index.put(store.change(CheckpointPath.parse(pinned), pinned=True).metadata)
    index.use(used, 2.5)
    assert reaper.reap() == []
    time.sleep(1.1)
    assert reaper.reap() == [brief]
    assert index.paths() == {forever, later, pinned, used}
    assert {str(path) for path in store.paths()} == index.paths()
    time.sleep(1.6)
    assert reaper.reap() == [used]  # nobody uses it any more
    assert index.paths() == {forever, later, pinned}


def test_it_believes_the_manifest_and_not_the_index(store: Store[Any], index: CheckpointIndex, reaper: Reaper) -> None:
    path = save(store, index, "one", 1)
    store.change(PATH, set_ttl=True, ttl_seconds=3600)  # by a worker that died before it told the index
    time.sleep(1.1)
    assert reaper.reap() == []
    assert index.get(path) == store.manifest(PATH).metadata


def test_it_warns_once_before(
    store: Store[Any], index: CheckpointIndex, reaper: Reaper, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, index, "soon", 600)
    save(store, index, "later", 6 * 3600)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reaper.reap()
    (warning,) = caplog.messages
    assert "weights/soon expires in 10 min" in warning
    assert "lorry checkpoints pin" in warning


def test_tidying_finds_expired_ones_that_the_index_lost(
    store: Store[Any], index: CheckpointIndex, reaper: Reaper
) -> None:
    save(store, index, "lost", 1)
    index.redis.delete("lorry:checkpoints")
    time.sleep(1.1)
    assert reaper.reap() == []
    reaper.tidy()
    assert everything_in(store) == []


def test_one_worker_at_a_time(index: CheckpointIndex) -> None:
    assert index.take_turn("reap", 0.3)
    assert not index.take_turn("reap", 0.3)
    time.sleep(0.4)
    assert index.take_turn("reap", 0.3)


def test_the_index_is_rebuilt_from_the_store(
    store: Store[Any], index: CheckpointIndex, administration: Administration
) -> None:
    kept, lost = save(store, index, "kept", 3600), save(store, index, "lost", None)
    index.put(store.change(CheckpointPath.parse(lost), pinned=True).metadata)
    before = {path: index.get(path) for path in (kept, lost)}
    gone = save(store, index, "gone", None)
    store.delete(CheckpointPath.parse(gone))
    index.remove(lost)
    info, _ = administration._reindex(ReindexRequest())
    assert info == {"checkpoints": 2, "added": [lost], "removed": [gone], "unreadable": []}
    index.redis.flushall()
    administration._reindex(ReindexRequest())
    assert {path: index.get(path) for path in index.paths()} == before


def test_names_in_the_index_are_no_patterns(store: Store[Any], index: CheckpointIndex) -> None:
    star = save(store, index, "a*", None)
    save(store, index, "ab", None)
    save(store, index, "[ab]", None)
    assert [found.path for found in index.all(name="a*")] == [star]
    assert [found.name for found in index.all(name="[ab]")] == ["[ab]"]
    assert list(index.all(job="a1:train:*")) == []
    assert len(list(index.all(job=JOB))) == 3
