"""Disks that fill up and files that rot: clear errors, exact states, nothing half-written is ever loaded."""

from __future__ import annotations

import resource
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import lorry
from lorry_jobs.checkpoint_paths import folder_name
from lorry_jobs.errors import ServiceError, StateRolledBack
from lorry_workers.engine.checkpoints import ADAPTER, MANIFEST, OPTIMIZER
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import Op, Reference, fb, largest_gap, step, submit, tensors_of

RANK = 64
"""Files much larger than a worker's log, which the same limit would cut."""
ENV = {"LORRY_SNAPSHOT_STEPS": "2", "LORRY_SNAPSHOT_SECONDS": "1000"}


def pairs(first: int, count: int) -> list[Op]:
    return [op for seed in range(first, first + count) for op in (fb(seed), step())]


def run(client: lorry.TrainingClient, ops: list[Op]) -> None:
    for future in [submit(client, op) for op in ops]:
        future.result(60)


def snapshot_of(cell: Cell, job: str) -> int:
    return int(cell.mailbox.job_record(job)["snapshot"])


def folders(cell: Cell, job: str) -> list[Path]:
    """A job's snapshots, the newest last."""
    found = (cell.store / "snapshots" / folder_name(job) / "weights").glob("[!.]*")
    return sorted(found, key=lambda folder: int(folder.name.split("-")[0]))


def new_job(cell: Cell) -> lorry.TrainingClient:
    return lorry.ServiceClient(base_url=cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)


def check(cell: Cell, reference: Reference, client: lorry.TrainingClient, ops: list[Op]) -> None:
    path = client.save_state("final").result(60).path
    _, expected = reference.run(client.model_id, 7, ops, rank=RANK)
    assert largest_gap(tensors_of(cell.store, path), expected) == 0


def grow_two_snapshots(cell: Cell, client: lorry.TrainingClient) -> list[Op]:
    """Ops after which there are two snapshots and a journal since."""
    ops: list[Op] = []
    while len(folders(cell, client.model_id)) < 2 or snapshot_of(cell, client.model_id) == len(ops):
        before = snapshot_of(cell, client.model_id)
        more = pairs(len(ops), 2)
        run(client, more)
        ops += more
        wait_until(lambda at=before: snapshot_of(cell, client.model_id) > at, 20, "a snapshot")
        more = pairs(len(ops), 1)
        run(client, more)
        ops += more
    return ops


def damage(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        file.write_bytes(content[:-100] + bytes([content[-100] ^ 16]) + content[-99:])
    else:
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "how"),
    [(ADAPTER, "truncated"), (OPTIMIZER, "flipped"), (MANIFEST, "flipped"), (MANIFEST, "gone")],
)
def test_a_damaged_snapshot(tmp_path: Path, tiny_llama: Path, reference: Reference, file: str, how: str) -> None:
    """The one before and the longer journal give exactly the same state."""
    with Cell(tmp_path, tiny_llama, workers=1, env=ENV) as cell:
        client = new_job(cell)
        ops = grow_two_snapshots(cell, client)
        damage(folders(cell, client.model_id)[-1] / file, how)
        cell.kill(cell.alive()[0])
        heir = cell.start_worker()
        more = pairs(100, 1)
        run(client, more)
        log = heir.log.read_text()
        assert "cannot be used" in log
        assert "nothing is lost" in log
        # And again: the damaged one is not the last any more.
        more += pairs(101, 4)
        run(client, more[2:])
        cell.kill(heir)
        cell.start_worker()
        check(cell, reference, client, ops + more)


@pytest.mark.slow
def test_both_snapshots_damaged(tmp_path: Path, tiny_llama: Path) -> None:
    """Loud, with both seqs; the job is failed, the worker and its other jobs are not."""
    with Cell(tmp_path, tiny_llama, workers=1, env={**ENV, "LORRY_SLOTS": "2"}) as cell:
        client, other = new_job(cell), new_job(cell)
        ops = grow_two_snapshots(cell, client)
        for folder in folders(cell, client.model_id):
            damage(folder / ADAPTER, "truncated")
        cell.kill(cell.alive()[0])
        worker = cell.start_worker()
        with pytest.raises(StateRolledBack, match="damaged") as error:
            submit(client, fb(1)).result(60)
        assert (error.value.from_seq, error.value.to_seq) == (len(ops), -1)
        with pytest.raises(StateRolledBack):
            submit(client, fb(1)).result(60)
        run(other, pairs(0, 1))
        # Its slot is free again, and nobody tries to restore it over and over.
        run(new_job(cell), pairs(0, 1))
        assert worker.log.read_text().count("cannot be restored") == 1


@pytest.mark.slow
def test_a_replaced_checkpoint_is_not_replayed_silently(tmp_path: Path, tiny_llama: Path) -> None:
    with Cell(tmp_path, tiny_llama, workers=1, env={**ENV, "LORRY_SNAPSHOT_STEPS": "1000"}) as cell:
        client = new_job(cell)
        run(client, pairs(0, 1))
        client.save_state("mine").result(60)
        client.load_state("mine").result(60)
        wait_until(lambda: snapshot_of(cell, client.model_id) == 4, 20, "the snapshot after load_state")
        run(client, pairs(1, 1))
        client.save_state("mine", overwrite=True).result(60)
        damage(folders(cell, client.model_id)[-1] / ADAPTER, "truncated")
        cell.kill(cell.alive()[0])
        cell.start_worker()
        with pytest.raises(StateRolledBack, match="has been replaced") as error:
            submit(client, fb(1)).result(60)
        assert (error.value.from_seq, error.value.to_seq) == (7, 3)


def write_limit(pid: int, size: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_writes_that_fail(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    """Snapshots and saves fail half-way through a file; training goes on, and nothing half-written is left.

    The limit is the process's own, so the worker that comes after it writes again.
    """
    with Cell(tmp_path, tiny_llama, workers=1, env=ENV) as cell:
        worker, client = cell.alive()[0], new_job(cell)
        ops = grow_two_snapshots(cell, client)
        adapter_bytes = (folders(cell, client.model_id)[-1] / ADAPTER).stat().st_size
        at = snapshot_of(cell, client.model_id)
        write_limit(worker.pid, adapter_bytes // 2)
        fail_and_recover(cell, reference, client, ops, at, "File too large", lambda: None)


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    store = tmp_path / "store"
    store.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(store)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        with Cell(tmp_path, tiny_llama, workers=1, env=ENV) as cell:
            client = new_job(cell)
            ops = grow_two_snapshots(cell, client)
            at = snapshot_of(cell, client.model_id)
            filler = store / "filler"
            fill(filler)
            fail_and_recover(cell, reference, client, ops, at, "No space left", filler.unlink)
    finally:
        subprocess.run(["umount", "-l", str(store)], check=True)


def fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(b"x" * 4096)


def fail_and_recover(cell, reference, client, ops, at, reason, repair) -> None:  # type: ignore[no-untyped-def]
    worker = cell.alive()[0]
    more = pairs(100, 4)
    run(client, more)  # training does not need the disk
    with pytest.raises(ServiceError, match=reason) as error:
        client.save_state("full").result(60)
    assert "cannot save lorry://" in str(error.value)
    wait_until(lambda: "trying again later" in worker.log.read_text(), 20, "a snapshot that fails")
    assert snapshot_of(cell, client.model_id) == at
    assert not list(cell.store.rglob(".writing-*"))
    assert not list(cell.store.rglob("full"))

    cell.kill(worker)  # while the disk is full
    heir = cell.start_worker()
    more += pairs(200, 1)
    run(client, more[-2:])
    repair()
    wait_until(lambda: snapshot_of(cell, client.model_id) > at, 30, "a snapshot after the repair")
    saved = client.save_state("full").result(60)
    cell.kill(heir)
    cell.start_worker()
    _, expected = reference.run(client.model_id, 7, ops + more, rank=RANK)
    assert largest_gap(tensors_of(cell.store, saved.path), expected) == 0
    # The op numbers of the two saves count too; they changed nothing.
    check(cell, reference, client, ops + more)
