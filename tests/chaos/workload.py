"""The same ops run two ways: through a cell that is being hurt, and by an engine alone in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

import lorry
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.types import CreateModelRequest, LoraConfig, SaveRequest
from lorry_workers.base_model import load_base_model
from lorry_workers.engine.checkpoints import ADAPTER, OPTIMIZER, CheckpointStore
from lorry_workers.engine.engine import Engine
from tests.chaos.cell import MODEL

RANK = 4
FINAL = "final"


@dataclass(frozen=True)
class Op:
    kind: str
    data: list[lorry.Datum]
    adam: lorry.AdamParams


def make_ops(seed: int, count: int, eps: float = 1e-12) -> list[Op]:
    """forward_backward (once or twice) and optim_step, over and over, with a forward now and then."""
    chance = random.Random(seed)
    ops: list[Op] = []
    while len(ops) < count:
        for _ in range(chance.choice([1, 1, 2])):
            ops.append(Op("forward_backward", _data(chance), lorry.AdamParams()))
        if chance.random() < 0.1:
            ops.append(Op("forward", _data(chance), lorry.AdamParams()))
        ops.append(Op("optim_step", [], lorry.AdamParams(learning_rate=chance.choice([1e-3, 3e-4]), eps=eps)))
    return ops


def _data(chance: random.Random) -> list[lorry.Datum]:
    rows = []
    for _ in range(chance.choice([1, 2])):
        tokens = [chance.randrange(300) for _ in range(chance.randrange(4, 12))]
        rows.append(lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return rows


def submit(client: lorry.TrainingClient, op: Op) -> lorry.APIFuture[object]:
    if op.kind == "optim_step":
        return client.optim_step(op.adam)  # type: ignore[return-value]
    run = client.forward if op.kind == "forward" else client.forward_backward
    return run(op.data)  # type: ignore[return-value]


class Reference:
    """What each job must end in: the ops run one after the other by an engine, nothing around it."""

    def __init__(self, folder: Path, model: Path) -> None:
        torch.set_num_threads(1)  # as the cell's workers
        base = load_base_model(str(model), dtype=torch.float32, device="cpu")
        self._store = CheckpointStore(folder / "reference")
        self._engine = Engine(base, MODEL, self._store)

    def run(self, job: str, seed: int, ops: list[Op], rank: int = RANK) -> tuple[list[float], dict[str, torch.Tensor]]:
        """-> (the losses of the forward(_backward)s, all tensors of the final state)"""
        engine = self._engine
        request = CreateModelRequest(base_model=MODEL, lora=LoraConfig(rank=rank, seed=seed))
        engine.create_model(job, request)
        losses = []
        for op in ops:
            if op.kind == "optim_step":
                engine.optim_step(job, op.adam)
            else:
                run = engine.forward if op.kind == "forward" else engine.forward_backward
                losses.append(run(job, op.data, "cross_entropy").loss)
        saved = engine.save_state(job, SaveRequest(name=FINAL), "reference")
        engine.drop_job(job)
        return losses, tensors_of(self._store.root, saved.path)


def fb(seed: int) -> Op:
    return Op("forward_backward", _data(random.Random(seed)), lorry.AdamParams())


def step(learning_rate: float = 1e-3) -> Op:
    return Op("optim_step", [], lorry.AdamParams(learning_rate=learning_rate))


def final_state(store: Path, client: lorry.TrainingClient) -> dict[str, torch.Tensor]:
    return tensors_of(store, client.save_state(FINAL).result(60).path)


def tensors_of(store: Path, path: str) -> dict[str, torch.Tensor]:
    """The adapter and Adam's moments in a checkpoint."""
    folder = store.joinpath(*CheckpointPath.parse(path).folders)
    adapter = {f"adapter.{name}": tensor for name, tensor in load_file(folder / ADAPTER).items()}
    return {**adapter, **load_file(folder / OPTIMIZER)}


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of a tensor with values beyond 1, second moments above all, relative to its largest."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1)) for name in one)
