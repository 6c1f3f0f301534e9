"""All workers are replaced, one by one, under load: no client sees an error, and every state is as undisturbed."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import lorry
from lorry_jobs.mailbox import Mailbox
from tests.chaos.cell import MODEL, Cell, wait_until
from tests.chaos.workload import RANK, Op, Reference, fb, final_state, largest_gap, step, submit


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGTERM", "lorry drain"])
def test_every_worker_is_replaced(
    tmp_path: Path, tiny_llama: Path, reference: Reference, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    workers, jobs = 2, 8
    with Cell(tmp_path, tiny_llama, workers=workers) as cell, caplog.at_level(logging.WARNING, "lorry"):
        service = lorry.ServiceClient(base_url=cell.url)
        clients = [service.create_lora_training_client(MODEL, rank=RANK, seed=7) for _ in range(jobs)]
        sampler = service.create_sampling_client(base_model=MODEL)
        load = Load(clients, sampler)
        wait_until(lambda: load.done > 40, 30, "load")
        for worker in cell.alive():
            cell.start_worker()
            cell.wait_ready()
            name = cell.name_of(worker)
            assert name is not None
            if way == "SIGTERM":
                worker.ask_to_stop()
            else:
                run_cli(cell.url, "drain", name)
            wait_until(lambda w=worker: not w.is_running, 40, f"{name} to leave")
            assert worker.exit_code == 0, worker.obituary()
            assert name not in cell.mailbox.live_workers()
            log = worker.log.read_text()
            assert "was handed on" in log
            assert "CRITICAL" not in log
            assert "Traceback" not in log, log
            at = load.done
            wait_until(lambda at=at: load.done > at + 40, 30, "the load to go on")
        load.stop()
        complaints = [record.getMessage() for record in caplog.records if record.name.startswith("lorry")]
        assert not complaints
        assert all(
            entry["attempt"] == 1 for client in clients for entry in cell.mailbox.ledger(client.model_id).values()
        )
        pauses = sorted(longest_pause(cell.mailbox, client.model_id) for client in clients)
        print(f"{way}: longest pause p50 {pauses[len(pauses) // 2]:.2f} s, max {pauses[-1]:.2f} s over {jobs} jobs")
        for number, client in enumerate(clients):
            _, expected = reference.run(client.model_id, 7, load.ops[number])
            assert largest_gap(final_state(cell.store, client), expected) == 0


def longest_pause(mailbox: Mailbox, job: str) -> float:
    """For how many seconds ops of this job were queued while none was committed, at most."""
    entries = list(mailbox.ledger(job).values())
    gaps = [
        entry["committed"] - max(before["committed"], entry["queued"]) for before, entry in itertools.pairwise(entries)
    ]
    return max(gaps) / 1000


class Load:
    """Every job always has a few ops under way, and samples now and then. Any error fails the test."""

    def __init__(self, clients: list[lorry.TrainingClient], sampler: lorry.SamplingClient) -> None:
        self.ops: list[list[Op]] = [[] for _ in clients]
        self.done = 0
        self._clients, self._sampler = clients, sampler
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(len(clients))]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                ops = [fb(len(self.ops[number])), step()] * 2
                self.ops[number] += ops
                futures: list[lorry.APIFuture] = [submit(self._clients[number], op) for op in ops]
                prompt = lorry.ModelInput.from_ints([1, 2, number])
                futures.append(self._sampler.sample(prompt, 1, lorry.SamplingParams(max_tokens=1)))
                for future in futures:
                    future.result(60)
                    self.done += 1
                self._stop.wait(0.1)
        except BaseException as error:  # noqa: BLE001
            self._errors.append(error)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._errors


def run_cli(url: str, *argv: str) -> str:
    command = [sys.executable, "-m", "lorry", *argv, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
