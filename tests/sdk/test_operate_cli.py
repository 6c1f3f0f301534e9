"""`lorry workers`, `lorry jobs` and `lorry drain`, as an operator types them, beside real work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorry
from tests.chaos.cell import MODEL, Cell, wait_until


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Cell]:
    with Cell(tmp_path_factory.mktemp("cell"), tiny_llama, workers=1) as cell:
        yield cell


@pytest.fixture(scope="module")
def client(cell: Cell) -> lorry.TrainingClient:
    client = lorry.ServiceClient(base_url=cell.url).create_lora_training_client(MODEL, rank=4)
    client.forward_backward([lorry.Datum(lorry.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]).result(60)
    client.optim_step().result(60)
    assert client.optim_step().exception(60)  # nothing is accumulated
    return client


def run_cli(cell: Cell, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lorry", *argv, "--url", cell.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=None)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_workers(cell: Cell, client: lorry.TrainingClient) -> None:
    (worker,) = cell.mailbox.live_workers()
    shown = run_cli(cell, "workers").stdout
    header, row = (next(line for line in shown.splitlines() if word in line) for word in ("free slots", worker))
    for column in ("model", "lease", "jobs", "requests", "queue", "cycle", "version"):
        assert column in header
    assert MODEL in row
    assert f"({cell.alive()[0].pid})" in row
    assert " 31 " in row  # one of 32 slots is taken


def test_jobs_list(cell: Cell, client: lorry.TrainingClient) -> None:
    shown = run_cli(cell, "jobs", "list").stdout
    row = next(line for line in shown.splitlines() if client.model_id in line)
    assert "active" in row
    assert MODEL in row


def test_jobs_show_with_ledger(cell: Cell, client: lorry.TrainingClient) -> None:
    (worker,) = cell.mailbox.live_workers()
    shown = run_cli(cell, "jobs", "show", client.model_id, "--ledger").stdout
    lines = shown.splitlines()
    assert next(line for line in lines if line.startswith("committed")).split()[-1] == "3"
    ops = [(op, next(line for line in lines if f" {op} " in line)) for op in ("create_model", "forward_backward")]
    for _, line in ops:
        assert " ok " in line
        assert worker in line
        assert " ms" in line
    assert [line.split()[2] for line in lines if " optim_step " in line] == ["ok", "failed"]
    assert client.model_id not in run_cli(cell, "jobs", "show", client.model_id, "--ledger", "--last", "1").stderr


def test_names_are_whole_in_a_narrow_terminal_and_in_a_pipe(
    cell: Cell, client: lorry.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = client.save_state("a-name-of-some-length-as-people-give-them").result(60).path
    (worker,) = cell.mailbox.live_workers()
    monkeypatch.setenv("COLUMNS", "80")
    for command, wanted in ((("workers",), worker), (("jobs", "list"), client.model_id)):
        lines = run_cli(cell, *command).stdout.splitlines()
        assert max(len(line) for line in lines) <= 80
        assert any(line.startswith(f"{wanted} ") for line in lines)
    monkeypatch.delenv("COLUMNS")
    for command in (("list",), ("show", saved)):
        assert saved in run_cli(cell, "checkpoints", *command).stdout
    assert "…" not in run_cli(cell, "checkpoints", "show", saved).stdout


def test_unknown_names_are_errors(cell: Cell) -> None:
    for argv in (("jobs", "show", "nothing"), ("drain", "nobody")):
        done = run_cli(cell, *argv)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert "lorry:" in done.stderr
    assert "live are: w" in run_cli(cell, "drain", "nobody").stderr


def test_drain(cell: Cell, client: lorry.TrainingClient) -> None:
    (name,) = cell.mailbox.live_workers()
    worker = cell.alive()[0]
    done = run_cli(cell, "drain", name)
    assert done.returncode == 0
    assert name in done.stdout
    wait_until(lambda: not worker.is_running, 30, "the worker to leave")
    assert worker.exit_code == 0
    assert "No worker has a live lease" in run_cli(cell, "workers").stdout
    cell.start_worker()
    client.forward([lorry.Datum(lorry.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]).result(60)
