"""Both kinds of storage, for tests that must hold on each."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.types import LoraConfig
from lorry_workers.engine.checkpoint_format import Checkpoint, Origin
from lorry_workers.engine.opening import open_store
from lorry_workers.engine.store import Store

JOB = "a1:train:0"
PATH = CheckpointPath(JOB, "weights", "one")


def content(value: float) -> Checkpoint:
    """A training state of which every file tells its version."""
    return Checkpoint(
        {"w": torch.full((1000,), value)}, {"r": value}, {"exp_avg.w": torch.full((1000,), value)}, {"step": value}
    )


def origin(op_id: str) -> Origin:
    return Origin(op_id, "tiny", LoraConfig(rank=1, seed=1), 5, {"who": "me"})


def whole(checkpoint: Checkpoint) -> float:
    """The version of a checkpoint, if all of its parts are of one."""
    values = {
        float(checkpoint.adapter["w"][0]),
        float(checkpoint.adapter_config["r"]),
        float(checkpoint.optimizer["exp_avg.w"][0]),
        float(checkpoint.state["step"]),
    }
    assert len(values) == 1, values
    return values.pop()


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store[Any]:
    return open_store(str(tmp_path / "store") if request.param == "disk" else f"memory://{uuid.uuid4().hex}/store")


def everything_in(store: Store[Any]) -> list[str]:
    """Every file of the store, by its path below it."""
    root = str(getattr(store, "root", ""))
    if hasattr(store, "fs"):
        return sorted(name.removeprefix(root).strip("/") for name in store.fs.find(root))
    return sorted(str(file.relative_to(root)) for file in Path(root).rglob("*") if file.is_file())
