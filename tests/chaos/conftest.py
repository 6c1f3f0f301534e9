"""One cell for the chaos tests that leave it as they found it: starting workers takes most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cell import Cell
from tests.chaos.workload import Reference


@pytest.fixture(scope="session")
def shared_cell(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Cell]:
    with Cell(tmp_path_factory.mktemp("cell"), tiny_llama, workers=1) as cell:
        yield cell


@pytest.fixture
def calm_cell(shared_cell: Cell) -> Cell:
    """A cell with at least one live worker. A test that kills it need not start another."""
    if not shared_cell.alive():
        shared_cell.start_worker()
    shared_cell.wait_ready()
    return shared_cell


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), tiny_llama)
