"""A worker that lives and renews its lease, but takes no messages any more: it starts itself anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import lorry
from lorry_jobs.celery_app import create_app
from lorry_jobs.mailbox import queue_name
from lorry_jobs.settings import QueueSettings
from lorry_workers.lease import Ears
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
