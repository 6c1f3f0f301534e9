"""A worker that lives and renews its lease, but takes no messages any more, or hangs in one: it starts itself anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import lorry
from lorry_jobs.celery_app import create_app
from lorry_jobs.errors import WorkerCrashed
from lorry_jobs.mailbox import queue_name
from lorry_jobs.settings import QueueSettings
from lorry_workers.lease import Ears
from tests.chaos import deadly_worker
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import RANK, Reference, fb, final_state, largest_gap, step, submit


def test_ears(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    ears = Ears(10.0)

    def listen(after: float, queued: int, deliveries: int) -> float | None:
        now[0] += after
        return ears.silence(queued, deliveries)

    assert listen(100, queued=0, deliveries=0) is None  # nothing to hear
    assert listen(5, queued=3, deliveries=0) is None
    assert listen(4, queued=3, deliveries=1) is None  # slow is not deaf
    assert listen(9, queued=3, deliveries=1) is None
    assert listen(2, queued=3, deliveries=1) == 11


@pytest.mark.slow
def test_a_deaf_worker(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    with Cell(tmp_path, tiny_llama, workers=1, env={"LORRY_DEAF_SECONDS": "3"}) as cell:
        client = lorry.ServiceClient(base_url=cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
        ops = [fb(1), step(), fb(2), step()]
        for op in ops[:2]:
            submit(client, op).result(60)
        (worker,) = cell.mailbox.live_workers()
        # Celery's own remote control takes its ears away.
        app = create_app(QueueSettings(url=cell.url))
        app.control.cancel_consumer(queue_name(worker), reply=True)
        future = submit(client, ops[2])
        wait_until(lambda: cell.mailbox.queue_length(worker) > 0, 10, "a message that nobody takes")
        submit(client, ops[3]).result(60)
        future.result(1)
        (heir,) = cell.mailbox.live_workers()
        assert heir != worker
        assert "has heard nothing for" in cell.alive()[0].log.read_text()
        _, expected = reference.run(client.model_id, 7, ops)
        assert largest_gap(final_state(cell.store, client), expected) == 0
        assert cell.mailbox.queue_length(worker) == 0


@pytest.mark.slow
def test_an_op_that_hangs_its_worker(tmp_path: Path, tiny_llama: Path, reference: Reference) -> None:
    script = str(Path(deadly_worker.__file__))
    env = {"LORRY_STUCK_SECONDS": "3"}
    with Cell(tmp_path, tiny_llama, workers=2, worker_argv=(script,), env=env) as cell:
        client = lorry.ServiceClient(base_url=cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
        ops = [fb(1), step(), fb(2), step()]
        for op in ops[:2]:
            submit(client, op).result(60)
        hanging = lorry.Datum(lorry.ModelInput.from_ints([1, deadly_worker.HANGING_TOKEN]), {"target_tokens": [1, 2]})
        with pytest.raises(WorkerCrashed, match="two workers died while they ran this op"):
            client.forward([hanging]).result(90)
        for op in ops[2:]:
            submit(client, op).result(60)
        assert len(cell.alive()) == 2, "both started themselves anew"
        logs = [worker.log.read_text() for worker in cell.alive()]
        assert all("has been in one cycle for" in log and "die_of" in log for log in logs)
        _, expected = reference.run(client.model_id, 7, ops)
        assert largest_gap(final_state(cell.store, client), expected) == 0
