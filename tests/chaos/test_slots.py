"""More jobs than slots: they take turns, and each state is what it would be alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import lorry
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import RANK, Op, Reference, fb, final_state, largest_gap, step, submit

ENV = {"LORRY_SLOTS": "2", "LORRY_SLOT_IDLE_SECONDS": "0.2", "LORRY_SLOT_SECONDS": "2"}


@pytest.mark.slow
def test_six_jobs_in_two_slots(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    with Cell(tmp_path, tiny_llama, workers=1, env=ENV) as cell:
        service = lorry.ServiceClient(base_url=cell.url)
        clients = [service.create_lora_training_client(MODEL, rank=RANK, seed=7) for _ in range(6)]
        ops: dict[int, list[Op]] = {n: [] for n in range(6)}
        for turn in range(3):
            for n, client in enumerate(clients):
                more = [fb(10 * turn + n), step(), fb(10 * turn + n + 100)]  # ends with gradients in the air
                ops[n] += more
                for future in [submit(client, op) for op in more]:
                    future.result(60)
                assert len(cell.mailbox.jobs_of(cell.mailbox.live_workers()[0])) <= 2
        log = cell.alive()[0].log.read_text()
        print(f"{log.count('leaves its slot')} evictions")
        assert log.count("leaves its slot") >= 12
        # By last use: with one idle for longer than the other, that one goes.
        for n in (4, 5, 4):
            more = [fb(n), step()]
            ops[n] += more
            for op in more:
                submit(clients[n], op).result(60)
        worker = cell.mailbox.live_workers()[0]
        assert cell.mailbox.jobs_of(worker) == {clients[4].model_id, clients[5].model_id}
        submit(clients[0], fb(0)).result(60)
        ops[0].append(fb(0))
        assert cell.mailbox.jobs_of(worker) == {clients[4].model_id, clients[0].model_id}
        for n, client in enumerate(clients):
            _, expected = reference.run(client.model_id, 7, ops[n])
            assert largest_gap(final_state(cell.store, client), expected) == 0
        slots, _ = cell.mailbox.free_places(worker, MODEL)
        assert slots + len(cell.mailbox.jobs_of(worker)) == 2


@pytest.mark.slow
def test_busy_jobs_do_not_starve_those_that_wait(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    with Cell(tmp_path, tiny_llama, workers=1, env={**ENV, "LORRY_SLOTS": "1"}) as cell:
        service = lorry.ServiceClient(base_url=cell.url)
        greedy = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
        stop = threading.Event()
        done: list[Op] = []

        def train() -> None:
            while not stop.is_set():
                pair = [fb(len(done)), step()]
                done.extend(pair)
                futures = [submit(greedy, op) for op in pair]
                if len(done) > 40:
                    futures[-1].result(60)

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        wait_until(lambda: len(done) > 20, 30, "work")
        modest = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
        submit(modest, fb(1)).result(60)
        stop.set()
        thread.join(60)
        _, expected = reference.run(greedy.model_id, 7, done)
        assert largest_gap(final_state(cell.store, greedy), expected) == 0


def test_unplaced_oldest_first(calm_cell: Cell) -> None:
    """Decided by the mailbox alone: a model with a worker that exists only there."""
    mailbox = calm_cell.mailbox
    lease = {"slots": 1, "seats": 1, "lease_seconds": 60, "info": "{}", "model_info": "{}"}
    mailbox.hello("nobody-1", "ghost", **lease)
    for job in ("first", "second", "third"):
        mailbox.create(job, "ghost", "{}", session="s", window=4, max_ops=10, max_bytes=1000)
        mailbox.submit(
            job,
            0,
            envelope="{}",
            payload=b"x",
            digest=b"d" * 16,
            task=f"{job}.0",
            channel="",
            ttl=9,
            max_total_bytes=99,
        )
    assert mailbox.jobs_of("nobody-1") == {"first"}
    placement = mailbox.adopt("first", "nobody-1")
    assert placement is not None
    assert mailbox.yield_job("first", "nobody-1", placement.epoch)  # with work left, so behind the others
    assert mailbox.jobs_of("nobody-1") == {"second"}
    mailbox.close("second")
    assert mailbox.jobs_of("nobody-1") == {"third"}
    mailbox.hello("nobody-2", "ghost", **lease)
    assert mailbox.jobs_of("nobody-2") == {"first"}
    for job in ("first", "third"):
        mailbox.close(job)
    for worker in ("nobody-1", "nobody-2"):
        assert mailbox.free_places(worker, "ghost") == (1, 1)
        mailbox.goodbye(worker)
    calm_cell.client().hdel("lorry:models", "ghost")
