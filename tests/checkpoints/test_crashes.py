"""A save that dies at any of its writes: afterwards the old or the new checkpoint is whole, and the rest is removed."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorry_jobs.errors import CheckpointNotFound
from lorry_workers.engine import checkpoints
from lorry_workers.engine.object_store import ObjectStore
from lorry_workers.engine.opening import open_store
from lorry_workers.engine.store import Store

from .conftest import PATH, content, everything_in, origin, whole

EXIT = 77
FILES = ("adapter_config.json", "adapter_model.safetensors", "manifest.json", "optimizer.safetensors", "state.json")


class Killed(BaseException):
    """Nothing runs after it, as nothing does after SIGKILL."""


def killer(step: int, die: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps functions; the `step`-th call of any of them dies instead, half-way where it can."""
    calls = iter(range(step + 1))

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) == step:
                if function.__name__ == "_write_file":
                    args[0].write_bytes(args[1][: len(args[1]) // 2])
                die()
            return function(*args, **kwargs)

        return call

    return wrap


def save_and_die(root: Path, step: int, act: Callable[[Store[Any]], object]) -> bool:
    """`act` in a process that dies at its `step`-th write; False: it had fewer."""
    pid = os.fork()
    if pid == 0:
        wrap = killer(step, lambda: os._exit(EXIT))
        for module, name in (
            (checkpoints, "_write_file"),
            (checkpoints, "_flush_folder"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
        ):
            setattr(module, name, wrap(getattr(module, name)))
        try:
            act(open_store(str(root)))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT


def overwrite(store: Store[Any]) -> object:
    return store.save(PATH, content(2), origin("op2"), overwrite=True)


def test_overwriting_on_a_disk(tmp_path: Path) -> None:
    outcomes, step = set(), 0
    while True:
        root = tmp_path / f"{step}"
        store = open_store(str(root))
        store.save(PATH, content(1), origin("op1"))
        if not save_and_die(root, step, overwrite):
            break
        outcomes.add(version := whole(store.load(PATH)[1]))
        assert list(store.paths()) == [PATH]
        store.tidy(age_seconds=0)
        assert whole(store.load(PATH)[1]) == version
        assert [name.rpartition("/")[2] for name in everything_in(store)] == sorted(FILES)
        overwrite(store)  # the op runs again, on another worker
        assert whole(store.load(PATH)[1]) == 2
        step += 1
    assert outcomes == {1, 2}
    assert step > 10


def test_a_first_save_on_a_disk(tmp_path: Path) -> None:
    step = 0
    while save_and_die(root := tmp_path / f"{step}", step, lambda store: store.save(PATH, content(1), origin("op1"))):
        store = open_store(str(root))
        found = store.find(PATH)
        if found is None:
            with pytest.raises(CheckpointNotFound):
                store.load(PATH)
        else:
            assert whole(store.load(PATH)[1]) == 1
        store.tidy(age_seconds=0)
        assert len(everything_in(store)) == (5 if found else 0)
        step += 1
    assert step > 8


def test_deleting_and_changing_on_a_disk(tmp_path: Path) -> None:
    for name, act in (
        ("delete", lambda store: store.delete(PATH)),
        ("change", lambda store: store.change(PATH, set_ttl=True, ttl_seconds=60)),
    ):
        step = 0
        while True:
            root = tmp_path / f"{name}{step}"
            store = open_store(str(root))
            store.save(PATH, content(1), origin("op1"))
            if not save_and_die(root, step, act):
                break
            if store.find(PATH) is not None:
                assert whole(store.load(PATH)[1]) == 1
            store.tidy(age_seconds=0)
            if store.find(PATH) is None:
                assert everything_in(store) == []
            shutil.rmtree(root)
            step += 1
        assert step >= 3


@pytest.mark.parametrize("first", [True, False])
def test_an_object_store(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, step = set(), 0
    while True:
        store = ObjectStore(f"memory://{uuid.uuid4().hex}")
        if not first:
            store.save(PATH, content(1), origin("op1"))

        def die() -> None:
            raise Killed

        with monkeypatch.context() as patch:
            wrap = killer(step, die)
            for name in ("pipe_file", "rm"):
                patch.setattr(store.fs, name, wrap(getattr(store.fs, name)))
            try:
                overwrite(store)
                break
            except Killed:
                pass
        found = store.find(PATH)
        outcomes.add(version := whole(store.load(PATH)[1]) if found else 0)
        store.tidy(age_seconds=0)
        assert len(everything_in(store)) == (5 if found else 0)
        assert (whole(store.load(PATH)[1]) if store.find(PATH) else 0) == version
        step += 1
    assert outcomes == ({0} if first else {1, 2})
    assert step == (5 if first else 6)


def test_a_young_leftover_stays(tmp_path: Path) -> None:
    """It may be a save that another worker is at."""
    root = tmp_path / "store"
    assert save_and_die(root, 8, lambda store: store.save(PATH, content(1), origin("op1")))
    store = open_store(str(root))
    before = everything_in(store)
    assert before
    assert store.tidy(age_seconds=3600) == 0
    assert everything_in(store) == before
    assert store.tidy(age_seconds=0) == 1
    assert everything_in(store) == []
