"""An op that kills its worker is tried on two workers, then fails alone; it never takes worker after worker down."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorry
from lorry_jobs.errors import AccumulationIncomplete, UserError, WorkerCrashed
from tests.chaos import deadly_worker
from tests.chaos.cell import MODEL, Cell
from tests.chaos.workload import RANK, Op, Reference, fb, final_state, largest_gap, step, submit

SCRIPT = str(Path(deadly_worker.__file__))
DEADLY = [lorry.Datum(lorry.ModelInput.from_ints([1, deadly_worker.MAGIC_TOKEN, 2]), {"target_tokens": [1, 2, 3]})]


@pytest.fixture
def cell(tmp_path: Path, tiny_llama: Path) -> Iterator[Cell]:
    with Cell(tmp_path, tiny_llama, workers=3, worker_argv=(SCRIPT,)) as cell:
        yield cell


class Others:
    """Two more jobs of the same workers, training all the while."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        service = lorry.ServiceClient(base_url=cell.url)
        self.clients = [service.create_lora_training_client(MODEL, rank=RANK, seed=7) for _ in range(2)]
        self.done: list[list[Op]] = [[] for _ in self.clients]
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._train, args=(n,), daemon=True) for n in range(2)]
        for thread in self._threads:
            thread.start()

    def _train(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                ops = [fb(len(self.done[number])), step()]
                self.done[number] += ops
                for future in [submit(self.clients[number], op) for op in ops]:
                    future.result(60)
                time.sleep(0.05)
        except BaseException as error:  # noqa: BLE001
            self._failures.append(error)

    def check(self, reference: Reference) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self._failures
        for client, ops in zip(self.clients, self.done, strict=True):
            _, expected = reference.run(client.model_id, 7, ops)
            assert largest_gap(final_state(self.cell.store, client), expected) == 0


@pytest.mark.slow
def test_a_deadly_forward_backward_and_a_deadly_step(cell: Cell, reference: Reference) -> None:
    others = Others(cell)
    client = lorry.ServiceClient(base_url=cell.url).create_lora_training_client(MODEL, rank=RANK, seed=7)
    good = [fb(1), step(), fb(2), step(), fb(4), step()]
    before = [submit(client, op) for op in good[:2]]
    failing = client.forward_backward(DEADLY)
    refused = submit(client, step())
    after = [submit(client, op) for op in good[2:4]]
    with pytest.raises(WorkerCrashed, match="two workers died while they ran this op") as error:
        failing.result(60)
    assert (error.value.op, error.value.seq, error.value.job) == ("forward_backward", failing.seq, client.model_id)
    with pytest.raises(AccumulationIncomplete):
        refused.result(60)
    for future in [*before, *after]:
        future.result(60)
    assert len(cell.alive()) == 1
    entry = cell.mailbox.ledger(client.model_id)[failing.seq]
    assert (entry["status"], entry["op"], entry["attempt"]) == ("worker_crashed", "forward_backward", 2)

    cell.start_worker()
    cell.wait_ready()
    survivors = len(cell.alive())
    submit(client, fb(3)).result(60)
    deadly_step = submit(client, step(float(deadly_worker.MAGIC_TOKEN)))
    cell.start_worker()
    with pytest.raises(WorkerCrashed):
        deadly_step.result(60)
    assert len(cell.alive()) == survivors + 1 - 2
    with pytest.raises(UserError, match="nothing is accumulated"):
        submit(client, step()).result(60)  # the gradients went with the step, as with any step that fails
    for op in good[4:]:
        submit(client, op).result(60)
    others.check(reference)
    _, expected = reference.run(client.model_id, 7, good)
    assert largest_gap(final_state(cell.store, client), expected) == 0


@pytest.mark.slow
def test_a_deadly_sampling_request(cell: Cell, reference: Reference) -> None:
    others = Others(cell)
    sampler = lorry.ServiceClient(base_url=cell.url).create_sampling_client(base_model=MODEL)
    params = lorry.SamplingParams(max_tokens=1)
    harmless = [sampler.sample(lorry.ModelInput.from_ints([1, 2, n]), 1, params) for n in range(20)]
    deadly = sampler.sample(lorry.ModelInput.from_ints([deadly_worker.MAGIC_TOKEN]), 1, params)
    harmless += [sampler.sample(lorry.ModelInput.from_ints([1, 2, n]), 1, params) for n in range(20)]
    with pytest.raises(WorkerCrashed, match="two workers died while they sampled this request"):
        deadly.result(60)
    for future in harmless:
        assert len(future.result(60).sequences) == 1
    assert len(cell.alive()) == 1
    others.check(reference)
