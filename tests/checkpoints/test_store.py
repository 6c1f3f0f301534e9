"""One protocol of a store, held by a local disk and by an object store alike."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import CheckpointExists, CheckpointNotFound, ServiceError, UserError
from lorry_workers.engine.opening import open_store
from lorry_workers.engine.store import Store

from .conftest import JOB, PATH, content, everything_in, origin, whole

OTHER = CheckpointPath("b:train:0", "sampler_weights", "two words: ünïcode 🚚?")


def damage(store: Store[Any], ending: str) -> str:
    """Turn one bit of the file that ends so; -> its path."""
    (name,) = [name for name in everything_in(store) if name.endswith(ending)]
    if hasattr(store, "fs"):
        key = f"{store.root}/{name}"
        old = store.fs.cat_file(key)
        store.fs.pipe_file(key, old[:-1] + bytes([old[-1] ^ 1]))
    else:
        file = store.root / name
        old = file.read_bytes()
        file.write_bytes(old[:-1] + bytes([old[-1] ^ 1]))
    return name


def test_save_load_find_and_list(store: Store[Any]) -> None:
    assert list(store.paths()) == []
    saved = store.save(PATH, content(1), origin("op1"))
    store.save(OTHER, content(2), origin("op2"))
    manifest, loaded = store.load(PATH)
    assert manifest == saved == store.find(PATH)
    assert whole(loaded) == 1
    assert set(store.paths()) == {PATH, OTHER}
    assert manifest.metadata.path == str(PATH)
    assert manifest.metadata.size == sum(entry.size for entry in manifest.files.values()) > 8000


def test_duplicates_retries_and_overwriting(store: Store[Any]) -> None:
    first = store.save(PATH, content(1), origin("op1"))
    assert store.save(PATH, content(9), origin("op1")) == first  # the same op again: not a duplicate
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        store.save(PATH, content(2), origin("op2"))
    store.save(CheckpointPath(JOB, "sampler_weights", "one"), content(3), origin("op3"))  # another kind
    assert whole(store.load(PATH)[1]) == 1
    store.save(PATH, content(2), origin("op2"), overwrite=True)
    assert whole(store.load(PATH)[1]) == 2
    names = [name for name in everything_in(store) if "/weights/" in name]
    assert len(names) == 5  # of the old version nothing is left


def test_a_corrupted_file_is_refused_and_named(store: Store[Any]) -> None:
    store.save(PATH, content(1), origin("op1"))
    damage(store, "optimizer.safetensors")
    with pytest.raises(ServiceError, match=r"optimizer\.safetensors is damaged"):
        store.load(PATH)
    damage(store, "manifest.json")
    with pytest.raises(ServiceError, match=r"manifest\.json is damaged"):
        store.load(PATH)


def test_lifetime(store: Store[Any]) -> None:
    store.save(PATH, content(1), origin("op1"), ttl_seconds=3600)
    assert store.change(PATH, set_ttl=True).expires is None
    assert store.manifest(PATH).expires is None
    soon = store.change(PATH, set_ttl=True, ttl_seconds=60).expires
    assert soon - datetime.now(UTC) == pytest.approx(timedelta(seconds=60), abs=timedelta(seconds=5))
    assert store.change(PATH, pinned=True).expires == soon
    assert store.manifest(PATH).pinned
    with pytest.raises(UserError, match="pinned"):
        store.delete(PATH)
    assert store.save(PATH, content(2), origin("op2"), overwrite=True).pinned  # the name stays pinned
    assert store.manifest(PATH).expires is None  # the TTL was the old version's
    store.change(PATH, pinned=False)
    store.delete(PATH)
    assert everything_in(store) == []
    with pytest.raises(CheckpointNotFound):
        store.delete(PATH)


def test_an_expired_checkpoint_cannot_be_read_and_its_name_is_free(store: Store[Any]) -> None:
    store.save(PATH, content(1), origin("op1"), ttl_seconds=1)
    pinned = CheckpointPath(JOB, "weights", "pinned")
    store.save(pinned, content(1), origin("op2"), ttl_seconds=1)
    store.change(pinned, pinned=True)
    time.sleep(1.1)
    assert store.find(PATH) is None
    assert store.find(PATH, expired=True) is not None
    with pytest.raises(CheckpointNotFound, match="expired at"):
        store.load(PATH)
    assert whole(store.load(pinned)[1]) == 1
    store.save(PATH, content(2), origin("op3"))
    assert whole(store.load(PATH)[1]) == 2


def test_only_the_version_that_was_meant_is_deleted(store: Store[Any]) -> None:
    store.save(PATH, content(1.0), origin("op1"), ttl_seconds=1)
    meant = store.manifest(PATH)
    store.save(PATH, content(2.0), origin("op2"), overwrite=True)
    with pytest.raises(UserError, match="saved anew or changed meanwhile; it stays"):
        store.delete(PATH, only=meant)
    assert whole(store.load(PATH)[1]) == 2.0
    store.delete(PATH, only=store.manifest(PATH))
    assert store.find(PATH, expired=True) is None


def test_parts(store: Store[Any]) -> None:
    manifest = store.save(PATH, content(1), origin("op1"))
    size = manifest.files["adapter_model.safetensors"].size
    parts = [store.read_part(PATH, "adapter_model.safetensors", at, 999, "op1") for at in range(0, size, 999)]
    assert sum(len(part) for part in parts) == size
    assert store.read_part(PATH, "adapter_model.safetensors", size, 10) == b""
    assert b'"op_id": "op1"' in store.read_part(PATH, "manifest.json", 0, 10**6)
    for name in ("../one/manifest.json", "/etc/passwd", "nothing"):
        with pytest.raises(UserError, match="has no file"):
            store.read_part(PATH, name, 0, 10)
    store.save(PATH, content(2), origin("op2"), overwrite=True)
    with pytest.raises(UserError, match="replaced while it was read"):
        store.read_part(PATH, "adapter_model.safetensors", 0, 10, "op1")


def test_replaced_again_and_again_while_it_is_read(store: Store[Any]) -> None:
    store.save(PATH, content(0), origin("op0"))
    done, seen, errors = threading.Event(), list[float](), list[Exception]()

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(whole(store.load(PATH)[1]))
            except Exception as error:  # noqa: BLE001  whatever it is, the test shows it
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 60):
        store.save(PATH, content(version), origin(f"op{version}"), overwrite=True)
    done.set()
    reader.join()
    assert not errors
    assert seen
    assert seen == sorted(seen)


def test_a_location_that_cannot_be_opened_says_so() -> None:
    with pytest.raises(UserError, match=r"LORRY_STORE=nosuch://"):
        open_store("nosuch://bucket/store")
    with pytest.raises(UserError, match=r"LORRY_STORE=s3://user:\*\*\*@bucket"):
        open_store("s3://user:secret@bucket")  # s3fs is not installed here
