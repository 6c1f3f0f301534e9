"""Clients that are killed mid-run: their ops are done, and after the reaper ran nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.cell import MODEL, Cell, new_service, wait_until
from tests.chaos.workload import RANK, fb, step, submit

SESSION_SECONDS = 6.0
ENV = {"LORRY_SESSION_SECONDS": str(SESSION_SECONDS), "LORRY_SNAPSHOT_STEPS": "3"}
KEPT = ("lorry:worker", "lorry:queue:", "lorry:models", "lorry:tokenizer:", "lorry:checkpoints:lock:", "_kombu.binding")
"""What belongs to workers and models, not to clients."""
RESULTS = ("celery-task-meta-", "lorry:output:")


def keys(cell: Cell) -> set[str]:
    with cell.client() as client:
        if client.get("lorry:bytes") == b"0":
            client.delete("lorry:bytes")
        return {key.decode() for key in client.scan_iter() if not key.decode().startswith((*KEPT, *RESULTS))}


def snapshot_files(cell: Cell) -> list[Path]:
    return list((cell.store / "snapshots").rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "kill_a_worker"), [(10, False), (3, True)])
def test_nothing_is_left(tmp_path: Path, tiny_llama: Path, clients: int, kill_a_worker: bool) -> None:
    with Cell(tmp_path, tiny_llama, workers=2, env=ENV) as cell:
        before = keys(cell)
        survivor = new_service(cell.url, session_seconds=SESSION_SECONDS)
        assert not snapshot_files(cell)
        processes = [start_client(cell) for _ in range(clients)]
        jobs = [process.stdout.readline().strip() for process in processes if process.stdout]
        assert all(jobs)
        time.sleep(0.3)
        dead_worker = ""
        if kill_a_worker:
            dead_worker = str(cell.name_of(cell.alive()[0]))
            cell.kill(cell.alive()[0])
            cell.start_worker()
        for process in processes:
            process.kill()
            process.wait()
        killed = time.monotonic()
        accepted = {job: max(cell.mailbox.ledger(job)) for job in jobs}
        unfinished = sum(int(cell.mailbox.job_record(job)["committed"]) < accepted[job] for job in jobs)
        print(f"{clients} clients killed, {unfinished} of their jobs had ops left; {len(keys(cell) - before)} keys")

        ended: dict[str, int] = {}

        def all_gone() -> bool:
            for job in jobs:
                record = cell.mailbox.job_record(job)
                ended[job] = int(record["committed"]) if record else ended.get(job, -1)
            return not cell.mailbox.jobs()

        wait_until(all_gone, 90, "the reaper")
        assert time.monotonic() - killed > SESSION_SECONDS - 3
        with cell.client() as client:
            for job in jobs:  # the last op that was accepted has its result, for a day
                assert 0 < client.ttl(f"celery-task-meta-{job}.{accepted[job]}") <= 86400
            assert all(0 < client.ttl(key) <= 86400 for prefix in RESULTS for key in client.scan_iter(f"{prefix}*"))
            results = sum(1 for _ in client.scan_iter("celery-task-meta-*"))
        # The survivor's session is one that lives.
        deadline = time.monotonic() + 20
        while left := keys(cell) - before - {"lorry:sessions"}:
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        wait_until(lambda: not snapshot_files(cell), 20, "the snapshots to go")
        for worker in cell.mailbox.live_workers():
            wait_until(lambda w=worker: cell.mailbox.free_places(w, MODEL) == (32, 16), 10, "free places")
            assert cell.mailbox.queue_length(worker) == 0
        if dead_worker:  # it left its name, as a fence, and nothing else
            with cell.client() as client:
                assert not list(client.scan_iter(f"*{dead_worker}*"))
                assert client.zscore("lorry:workers:dead", dead_worker)
        print(f"left: 0 keys, 0 snapshot files; {results} results with a day to live")

        # A client that lives keeps its jobs, however long it thinks.
        job = survivor.create_lora_training_client(MODEL, rank=RANK)
        time.sleep(SESSION_SECONDS * 1.5)
        for op in (fb(1), step()):
            submit(job, op).result(60)
        survivor.close()
        wait_until(lambda: not cell.mailbox.jobs(), 20, "the jobs of a client that said goodbye")


def start_client(cell: Cell) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("dying_client.py")
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    env["LORRY_SESSION_SECONDS"] = str(SESSION_SECONDS)
    return subprocess.Popen([sys.executable, str(script), cell.url], env=env, stdout=subprocess.PIPE, text=True)
