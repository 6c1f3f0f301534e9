"""Bounds on what is queued: the SDK waits, says so, and everything is done in the end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import lorry
from tests.chaos.cell import MODEL, Cell, new_service
from tests.chaos.workload import RANK, Reference, fb, final_state, largest_gap, step, submit


def long_rows(length: int = 100) -> list[lorry.Datum]:
    tokens = [n % 250 for n in range(length)]
    return [lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]


def test_few_ops_may_be_queued(calm_cell: Cell, reference: Reference, caplog: pytest.LogCaptureFixture) -> None:
    service = new_service(calm_cell.url, max_queued_ops=4)
    client = service.create_lora_training_client(MODEL, rank=RANK, seed=7)
    ops = [op for seed in range(15) for op in (fb(seed), step())]
    with caplog.at_level(logging.WARNING, "lorry"):
        futures = [submit(client, op) for op in ops]
        for future in futures:
            future.result(60)
    notices = [record.getMessage() for record in caplog.records if "wait here" in record.getMessage()]
    assert notices
    assert client.model_id in notices[0]
    _, expected = reference.run(client.model_id, 7, ops)
    assert largest_gap(final_state(calm_cell.store, client), expected) == 0


def test_few_bytes_may_be_queued(calm_cell: Cell) -> None:
    """Snapshots free the journal in time: a run of any length stays under the bound."""
    bound = 12_000
    service = new_service(calm_cell.url, max_queued_bytes=bound)
    client = service.create_lora_training_client(MODEL, rank=RANK)
    most = 0
    for _ in range(12):
        futures = []
        for _ in range(6):
            futures += [client.forward_backward(long_rows()), client.optim_step()]
        for future in futures:
            future.result(60)
            most = max(most, int(calm_cell.mailbox.job_record(client.model_id)["queued_bytes"]))
    print(f"at most {most} of {bound} bytes")
    assert most <= bound


@pytest.mark.slow
def test_all_jobs_together(tmp_path: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    bound = 60_000
    env = {"LORRY_MAX_TOTAL_BYTES": str(bound), "LORRY_SNAPSHOT_STEPS": "1000", "LORRY_SNAPSHOT_BYTES": "80000"}
    with Cell(tmp_path, tiny_llama, workers=1, env=env) as cell:
        service = new_service(cell.url, max_total_bytes=bound)
        clients = [service.create_lora_training_client(MODEL, rank=RANK) for _ in range(4)]
        sampler = service.create_sampling_client(base_model=MODEL)
        most, futures = 0, []
        with caplog.at_level(logging.WARNING, "lorry"):
            for _ in range(60):
                for client in clients:
                    futures += [client.forward_backward(long_rows()), client.optim_step()]
                futures.append(
                    sampler.sample(lorry.ModelInput.from_ints([1] * 50), 1, lorry.SamplingParams(max_tokens=1))
                )
            for future in futures:
                future.result(120)
                most = max(most, cell.mailbox.total_bytes())
        assert any("wait here" in record.getMessage() for record in caplog.records)
        print(f"at most {most} of {bound} bytes")
        # The next op of each job is always taken, so that no bound can wedge one.
        assert most <= bound + 5 * 1000
