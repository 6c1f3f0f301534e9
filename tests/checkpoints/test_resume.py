"""Resuming, through real workers: with the optimizer it equals never having stopped, byte for byte in what is saved
at the end; without it, the weights go on and Adam starts anew.

Each op is waited for before the next one, so that what runs together is the same every time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lorry
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_workers.engine.checkpoints import ADAPTER, OPTIMIZER
from tests.chaos.cell import MODEL, Cell
from tests.chaos.workload import RANK, Op, fb, make_ops, step, submit

BEFORE = make_ops(1, 14)
AFTER = make_ops(2, 14)
SEED = 5


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Cell]:
    with Cell(tmp_path_factory.mktemp("cell"), tiny_llama, workers=1) as cell:
        yield cell


Files = dict[str, bytes]
Resume = Callable[[lorry.ServiceClient, str], lorry.TrainingClient]


def new_client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(MODEL, rank=RANK, seed=SEED)


def train(client: lorry.TrainingClient, ops: list[Op]) -> list[object]:
    return [submit(client, op).result(60) for op in ops]


def folder_of(cell: Cell, path: str) -> Path:
    return cell.store.joinpath(*CheckpointPath.parse(path).folders)


def end(cell: Cell, client: lorry.TrainingClient, ops: list[Op] = AFTER) -> Files:
    """Train on, and save: adapter, moments and gradients, counters and losses as they lie in the store."""
    train(client, ops)
    folder = folder_of(cell, client.save_state("end").result(60).path)
    return {name: (folder / name).read_bytes() for name in (ADAPTER, OPTIMIZER, "state.json")}


def never_stopped(cell: Cell, service: lorry.ServiceClient, before: list[Op] = BEFORE) -> tuple[str, Files]:
    """-> (the state between `before` and `AFTER`, the end). The end is of a job that never saved in between."""
    saving, plain = new_client(service), new_client(service)
    for client in (saving, plain):
        train(client, before)
    path = saving.save_state("between").result(60).path
    files = end(cell, plain)
    assert end(cell, saving) == files  # a save disturbs nothing
    return path, files


def into_a_used_client(service: lorry.ServiceClient, path: str) -> lorry.TrainingClient:
    client = service.create_lora_training_client(MODEL, rank=RANK, seed=SEED)
    train(client, [*make_ops(3, 6), fb(4)])
    assert client.load_state_with_optimizer(path).result(60).dropped_gradients
    return client


RESUMES: dict[str, Resume] = {
    "with_optimizer": lambda service, path: service.create_training_client_from_state_with_optimizer(path),
    "seed 004": lambda service, path: service.create_lora_training_client_from_state(checkpoint_state=path).result(),
    "load_state_with_optimizer": into_a_used_client,
}


@pytest.mark.parametrize("how", RESUMES)
@pytest.mark.parametrize("unstepped", [False, True], ids=["after a step", "between forward_backward and step"])
def test_on_the_same_worker(cell: Cell, how: str, unstepped: bool) -> None:
    with lorry.ServiceClient(base_url=cell.url) as service:
        before = [*BEFORE, fb(9)] if unstepped else BEFORE
        path, files = never_stopped(cell, service, before)
        assert any(name.startswith("gradient.") for name in load_file(folder_of(cell, path) / OPTIMIZER)) == (unstepped)
        assert end(cell, RESUMES[how](service, path)) == files


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["killed", "stopped"])
def test_on_another_worker(tmp_path: Path, tiny_llama: Path, leaves: str) -> None:
    with Cell(tmp_path, tiny_llama, workers=1) as cell, lorry.ServiceClient(base_url=cell.url) as service:
        path, files = never_stopped(cell, service)
        (first,) = cell.alive()
        cell.start_worker()
        cell.wait_ready()
        cell.kill(first) if leaves == "killed" else cell.stop(first)
        resumed = RESUMES["with_optimizer"](service, path)
        assert end(cell, resumed) == files


@pytest.mark.slow
def test_after_the_server_was_started_again(tmp_path: Path, tiny_llama: Path) -> None:
    with Cell(tmp_path, tiny_llama, workers=1) as cell, lorry.ServiceClient(base_url=cell.url) as service:
        path, files = never_stopped(cell, service)
        cell.restart_redis()
        assert end(cell, RESUMES["with_optimizer"](service, path)) == files
    with Cell(tmp_path, tiny_llama, workers=1) as cell, lorry.ServiceClient(base_url=cell.url) as service:
        assert end(cell, RESUMES["with_optimizer"](service, path)) == files


@pytest.mark.slow
def test_after_redis_lost_everything(tmp_path: Path, tiny_llama: Path) -> None:
    """The store is enough: a new Redis, the index rebuilt from the folders."""
    with Cell(tmp_path, tiny_llama, workers=1) as cell, lorry.ServiceClient(base_url=cell.url) as service:
        path, files = never_stopped(cell, service)
    (tmp_path / "redis").rename(tmp_path / "lost")
    with Cell(tmp_path, tiny_llama, workers=1) as cell, lorry.ServiceClient(base_url=cell.url) as service:
        assert path in service.reindex_checkpoints().added
        assert end(cell, RESUMES["with_optimizer"](service, path)) == files


def test_without_the_optimizer_the_moments_start_anew(cell: Cell) -> None:
    with lorry.ServiceClient(base_url=cell.url) as service:
        client = new_client(service)
        train(client, [*BEFORE, fb(9)])
        path = client.save_state("between").result(60).path
        saved = folder_of(cell, path)
        assert any(tensor.any() for tensor in load_file(saved / OPTIMIZER).values())

        train(client, [step(), *AFTER, fb(8)])
        loaded = client.load_state(path).result(60)
        assert (loaded.optimizer, loaded.dropped_gradients) == (False, True)
        fresh = service.create_training_client_from_state(path)
        for each in (client, fresh):
            again = folder_of(cell, each.save_state("again").result(60).path)
            assert (again / ADAPTER).read_bytes() == (saved / ADAPTER).read_bytes()
            moments = load_file(again / OPTIMIZER)
            assert {name.partition(".")[0] for name in moments} == {"exp_avg", "exp_avg_sq"}  # and no gradient
            assert not any(tensor.any() for tensor in moments.values())
            fields = json.loads((again / "state.json").read_text())
            assert (fields["adam_step"], fields["accumulated_calls"]) == (0, 0)

        ends = [end(cell, each) for each in (client, fresh)]
        assert ends[0][ADAPTER] == ends[1][ADAPTER]
        assert ends[0][OPTIMIZER] == ends[1][OPTIMIZER]
        kept = service.create_training_client_from_state_with_optimizer(path)
        kept.load_state_with_optimizer(path).result(60)
        assert end(cell, kept)[ADAPTER] != ends[0][ADAPTER]


def test_the_first_step_after_it_is_adams_first(cell: Cell) -> None:
    """With moments of zero and its bias correction, the first step moves every weight that has a gradient by the
    learning rate, whatever came before."""
    with lorry.ServiceClient(base_url=cell.url) as service:
        client = new_client(service)
        train(client, BEFORE)
        path = client.save_state("between").result(60).path
        fresh = service.create_training_client_from_state(path)
        train(fresh, [fb(9), step(1e-3)])
        before = load_file(folder_of(cell, path) / ADAPTER)
        saved = folder_of(cell, fresh.save_state("one").result(60).path)
        after, moments = load_file(saved / ADAPTER), load_file(saved / OPTIMIZER)
        checked = 0
        for name, tensor in before.items():
            gradient = moments[f"exp_avg.{name}"].abs() > 1e-6  # far above Adam's epsilon
            moved = (after[name] - tensor).abs()[gradient]
            torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=1e-2, atol=1e-7)
            checked += len(moved)
        assert checked > 100
