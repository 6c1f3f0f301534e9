"""A worker whose engine does nothing, or sleeps: everything around the engine is the real thing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lorry.stack import ProcessSpec
from lorry.stack.programs import PYTHON, holds_a_lease
from lorry_jobs.types import (
    AdamParams,
    CreateModelRequest,
    ForwardBackwardOutput,
    GetInfoResponse,
    ModelData,
    ModelInfo,
    OptimStepResponse,
)
from lorry_workers.engine.engine import Batch
from lorry_workers.engine.opening import open_store
from lorry_workers.runtime import Runtime, new_worker_id
from lorry_workers.settings import WorkerSettings
from lorry_workers.worker import serve

MODEL = "nothing"


def worker_spec(number: int, *, sleep_seconds: float = 0.0, slots: int = 32, snapshot_steps: int = 50) -> ProcessSpec:
    """One such worker, to be run by a Stack."""
    return ProcessSpec(
        name=f"null-{number}",
        argv=(*PYTHON, str(Path(__file__)), "--name", f"null-{number}", "--sleep", str(sleep_seconds)),
        env={"LORRY_SLOTS": str(slots), "LORRY_SNAPSHOT_STEPS": str(snapshot_steps)},
        ready=holds_a_lease,
    )


class NullEngine:
    """The methods of `lorry_workers.engine.Engine` that a chain of training ops needs, without a model."""

    name = MODEL

    def __init__(self, sleep_seconds: float, settings: WorkerSettings) -> None:
        self.sleep_seconds = sleep_seconds
        self.store = open_store(settings.store_location)
        self.jobs: dict[str, object] = {}  # always empty: there is no state to snapshot

    def create_model(self, job: str, request: CreateModelRequest) -> GetInfoResponse:
        data = ModelData(model_id=job, model_name=MODEL, lora_rank=request.lora.rank)
        return GetInfoResponse(model_id=job, model_name=MODEL, lora_rank=request.lora.rank, model_data=data)

    def run_batches(self, batches: Sequence[Batch]) -> list[ForwardBackwardOutput]:
        if self.sleep_seconds:
            time.sleep(self.sleep_seconds * len(batches))
        metrics = {"loss:sum": 0.0, "tokens:sum": 0.0}
        return [ForwardBackwardOutput(loss_fn_outputs=[], metrics=metrics, loss=0.0) for _ in batches]

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]]) -> list[OptimStepResponse]:
        return [OptimStepResponse(metrics={}) for _ in steps]

    def drop_job(self, job: str) -> None:
        self.jobs.pop(job, None)

    def drop_gradients(self, job: str) -> bool:
        return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--sleep", type=float, default=0.0)
    args = parser.parse_args()
    settings = WorkerSettings(log_level="WARNING")
    worker = new_worker_id(args.name)
    info = ModelInfo(
        name=MODEL, vocab_size=1000, context_length=1000, arch="none", parameters=0, tokenizer_sha256="none"
    )
    engine = NullEngine(args.sleep, settings)
    return serve(worker, lambda: Runtime(worker, engine, info, b"", settings), settings)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
