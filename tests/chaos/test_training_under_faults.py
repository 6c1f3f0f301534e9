"""Real training while workers are killed and frozen, connections are cut and Redis is restarted.

Every op must be applied exactly once: each job's final adapter and Adam moments equal those of an undisturbed run,
bit for bit where batches are computed one by one, and closely where many jobs share a pass.
The seed is printed; LORRY_CHAOS_SEED=N replays a run's faults and ops.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

import lorry
from lorry_jobs.errors import ServiceUnavailable
from lorry_jobs.mailbox import Mailbox
from tests.chaos.cell import LEASE_SECONDS, MODEL, Cell, wait_until
from tests.chaos.workload import FINAL, RANK, Op, Reference, largest_gap, make_ops, submit, tensors_of

FAULTS = ("kill", "freeze", "cut", "redis")


BATCHING = pytest.mark.parametrize("together", [False, True], ids=["one-by-one", "together"])


@BATCHING
def test_short(tmp_path: Path, tiny_llama: Path, together: bool) -> None:
    run_chaos(tmp_path, tiny_llama, workers=2, jobs=4, ops_per_job=40, faults=4, together=together)


@pytest.mark.slow
@pytest.mark.timeout(900)
@BATCHING
def test_long(tmp_path: Path, tiny_llama: Path, together: bool) -> None:
    run_chaos(tmp_path, tiny_llama, workers=3, jobs=12, ops_per_job=90, faults=14, together=together)


def run_chaos(
    folder: Path, model: Path, *, workers: int, jobs: int, ops_per_job: int, faults: int, together: bool
) -> None:
    seed = int(os.environ.get("LORRY_CHAOS_SEED") or random.randrange(10**6))
    print(f"\nchaos seed {seed}")
    # Where Adam divides by a gradient of almost nothing, it makes much of the last bit; a larger eps does not.
    eps = 1e-5 if together else 1e-12
    work = {number: make_ops(seed * 1000 + number, ops_per_job, eps=eps) for number in range(jobs)}
    env = {"LORRY_MAX_TOKENS_PER_CYCLE": "100000"} if together else {}
    with Cell(folder, model, workers=workers, env=env) as cell:
        service = lorry.ServiceClient(base_url=cell.url)
        clients = [service.create_lora_training_client(MODEL, rank=RANK, seed=number + 1) for number in range(jobs)]
        losses: dict[int, list[float]] = {}
        problems: list[str] = []

        def train_one(number: int) -> None:
            try:
                losses[number] = train(clients[number], work[number], faults)
            except lorry.LorryError as error:  # first of all the reason: what follows from it would hide it
                problems.append(f"job {number}: {error}")

        threads = [threading.Thread(target=train_one, args=(n,), daemon=True) for n in range(jobs)]
        for thread in threads:
            thread.start()
        deaths, restarts = hurt(cell, random.Random(seed), faults, lambda: any(t.is_alive() for t in threads))
        resubmit_everything(service)
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), "a job did not end"
        assert problems == [], f"seed {seed}"
        paths = [patient(lambda c=c: c.save_state(FINAL), c).path for c in clients]
        report_recovery(cell.mailbox, [c.model_id for c in clients], deaths, restarts)
        check_ledgers(cell.mailbox, clients, work)
        found = [tensors_of(cell.store, path) for path in paths]

    reference = Reference(folder, model)
    for number, client in enumerate(clients):
        expected_losses, expected = reference.run(client.model_id, number + 1, work[number])
        assert losses[number] == pytest.approx(expected_losses, rel=0, abs=2e-5 if together else 0)
        gap = largest_gap(found[number], expected)
        print(f"job {number}: largest difference {gap:.1e}")
        assert gap <= (1e-5 if together else 0), f"job {number} ends in another state (seed {seed})"


def train(client: lorry.TrainingClient, ops: list[Op], faults: int) -> list[float]:
    """Submit everything, a few ops ahead, and read every result; waits are interrupted now and then."""
    losses = []
    ahead: list[lorry.APIFuture[object]] = []
    for op in ops:
        ahead.append(submit(client, op))
        # Spread the ops over the time of the faults.
        time.sleep(faults * 2.0 / len(ops))
        if len(ahead) > 6:
            losses += loss_of(ahead.pop(0))
    for future in ahead:
        losses += loss_of(future)
    return losses


def loss_of(future: lorry.APIFuture[object]) -> list[float]:
    result = wait_for(future)
    return [result.loss] if isinstance(result, lorry.ForwardBackwardOutput) else []


def wait_for(future: lorry.APIFuture[object]) -> object:
    while True:
        try:
            return future.result(200)
        except ServiceUnavailable:  # a word about the server, not about the op
            time.sleep(0.2)


def patient(call, client):  # type: ignore[no-untyped-def]
    return wait_for(call())


def hurt(  # type: ignore[no-untyped-def]
    cell: Cell, chance: random.Random, count: int, working
) -> tuple[list[tuple[str, float]], list[float]]:
    """`count` faults, one after the other. -> (worker, time of its death in ms) of those killed; times of restarts.

    No worker is killed or frozen while another tries an op that the one before died with: two deaths with the
    same op would rightly be laid at its door (test_deadly_op.py).
    """
    deaths: list[tuple[str, float]] = []
    restarts: list[float] = []
    for number in range(count):
        if not working():
            break
        # Every kind at least once, then as it comes.
        kind = FAULTS[number] if number < len(FAULTS) else chance.choice(FAULTS)
        victim = chance.choice(cell.alive())
        print(f"{kind} ({victim.name})", flush=True)
        if kind in ("kill", "freeze"):
            wait_until(lambda: not suspects(cell), 60, "ops that a worker died with to run")
        if kind == "kill":
            name = cell.name_of(victim)
            cell.kill(victim)
            if name is not None:
                deaths.append((name, time.time() * 1000))
            cell.start_worker()
        elif kind == "freeze":
            cell.freeze(victim)
            time.sleep(LEASE_SECONDS * 1.8)
            cell.thaw(victim)
        elif kind == "cut":
            cell.cut_connections(chance)
        else:
            restarts.append(time.time() * 1000)
            cell.restart_redis()
        time.sleep(chance.uniform(0.5, 2.0))
    return deaths, restarts


def suspects(cell: Cell) -> list[bytes]:
    client = cell.mailbox.redis
    return [job for job in client.zrange("lorry:jobs", 0, -1) if client.hget(b"lorry:job:" + job, "suspect")]


def resubmit_everything(service: lorry.ServiceClient) -> None:
    """A client that is unsure sends its ops again: all that are open here, as they were."""
    process = service._process
    for lane, letter, _future in list(process._letters.values()):
        process._outbox.post(lane, letter)


def check_ledgers(mailbox: Mailbox, clients: list[lorry.TrainingClient], work: dict[int, list[Op]]) -> None:
    """Each op is in the ledger once, done, in order."""
    for number, client in enumerate(clients):
        ledger = mailbox.ledger(client.model_id)
        kinds = ["create_model", *(op.kind for op in work[number]), "save_state"]
        assert [ledger[seq]["op"] for seq in range(len(kinds))] == kinds
        assert all(entry["status"] == "ok" for entry in ledger.values())
        committed = [ledger[seq]["committed"] for seq in range(len(kinds))]
        assert committed == sorted(committed)


def report_recovery(mailbox: Mailbox, jobs: list[str], deaths: list[tuple[str, float]], restarts: list[float]) -> None:
    """How long the jobs of a worker that was killed stood still. A Redis restart meanwhile counts apart: it gives
    every lease new time, since nobody could renew one."""
    pauses: dict[str, list[float]] = {"": [], " and a restart of Redis": []}
    for job in jobs:
        entries = [e for e in mailbox.ledger(job).values() if "worker" in e]
        for worker, at in deaths:
            before = [e for e in entries if e["committed"] <= at]
            after = [e["committed"] for e in entries if e["committed"] > at]
            if before and after and before[-1]["worker"] == worker:
                back = min(after)
                kind = " and a restart of Redis" if any(at < restart < back for restart in restarts) else ""
                pauses[kind].append((back - at) / 1000)
    for kind, found in pauses.items():
        if found:
            found.sort()
            median, most = found[len(found) // 2], found[-1]
            print(f"recovery after a death{kind}: p50 {median:.2f} s, max {most:.2f} s, n {len(found)}")
