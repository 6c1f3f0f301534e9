"""From a delivered request to the engine's method and back to what the client reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from lorry_jobs import ops, wire
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import UserError
from lorry_jobs.types import (
    ChangeCheckpointRequest,
    CheckpointMetadata,
    CreateModelRequest,
    DeleteCheckpointRequest,
    ForwardBackwardOutput,
    LoadStateRequest,
    LorryModel,
    MergeCheckpointRequest,
    OptimStepRequest,
    OptimStepResponse,
    ReadCheckpointRequest,
    ReindexRequest,
    SaveRequest,
)

from .engine.engine import Batch, Engine
from .lanes import Delivery

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reply:
    """`info` goes into the JSON record, `output` beside it, `summary` is what Flower shows."""

    info: dict[str, Any] = field(default_factory=dict)
    output: bytes = b""
    summary: dict[str, Any] = field(default_factory=dict)
    version: str | None = None
    """Of the checkpoint that this op read: a replay must find the same one."""
    checkpoint: CheckpointMetadata | None = None
    """That this op saved, for the index."""


def decode_request(op: str, payload: bytes) -> Any:
    """The typed request in a payload. Runs on a pool thread, so that the clock's thread only computes."""
    if op in (ops.FORWARD, ops.FORWARD_BACKWARD):
        return wire.decode_batch(payload)
    if op == ops.SAMPLE:
        return wire.decode_sample_request(payload)
    model = _JSON_REQUESTS.get(op)
    if model is None:
        raise UserError(f"this worker does not know the op '{op}'")
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        raise UserError(f"the request of {op} is not valid: {error}") from None


def token_count(request: Any) -> int:
    """How many tokens a decoded request puts through the model; 0 if it is not a batch."""
    return sum(datum.model_input.length for datum in request.data) if isinstance(request, wire.TrainingBatch) else 0


_JSON_REQUESTS: dict[str, type[LorryModel]] = {
    ops.CREATE_MODEL: CreateModelRequest,
    ops.OPTIM_STEP: OptimStepRequest,
    ops.SAVE_STATE: SaveRequest,
    ops.SAVE_WEIGHTS_FOR_SAMPLER: SaveRequest,
    ops.LOAD_STATE: LoadStateRequest,
    ops.CHECKPOINT_CHANGE: ChangeCheckpointRequest,
    ops.CHECKPOINT_DELETE: DeleteCheckpointRequest,
    ops.CHECKPOINT_READ: ReadCheckpointRequest,
    ops.CHECKPOINT_MERGE: MergeCheckpointRequest,
    ops.CHECKPOINT_REINDEX: ReindexRequest,
}


def execute(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    if isinstance(delivery.request, Exception):  # its bytes could not be read; said here, in the op's turn
        raise delivery.request
    return _EXECUTORS[delivery.op](engine, job, delivery, cycle)


def _create_model(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    version = checkpoint_version(engine, job, delivery.request)
    info = engine.create_model(job, delivery.request)
    summary = {"base_model": info.model_name, "rank": info.lora_rank}
    return Reply(info=info.model_dump(mode="json"), summary=summary, version=version)


def _forward(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    [output] = engine.run_batches([as_batch(job, delivery)])
    return batch_reply(_checked(output), cycle)


def as_batch(job: str, delivery: Delivery) -> Batch:
    request = delivery.request
    backward = delivery.op == ops.FORWARD_BACKWARD
    return Batch(job, request.data, request.loss_fn, request.loss_fn_config, backward)


def batch_reply(output: ForwardBackwardOutput, cycle: int) -> Reply:
    summary = {"loss": round(output.loss, 6), "tokens": int(output.metrics["tokens:sum"]), "cycle": cycle}
    return Reply(output=wire.encode_output(output), summary=summary)


def _optim_step(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    [response] = engine.optim_steps([(job, delivery.request.adam_params)])
    return step_reply(_checked(response), cycle)


def step_reply(response: OptimStepResponse, cycle: int) -> Reply:
    return Reply(info={"metrics": response.metrics}, summary={**response.metrics, "cycle": cycle})


def _checked(result: Result | Exception) -> Result:
    if isinstance(result, Exception):
        raise result
    return result


def _save(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    save = engine.save_state if delivery.op == ops.SAVE_STATE else engine.save_weights_for_sampler
    saved = save(job, delivery.request, delivery.task)
    return Reply(info=saved.model_dump(mode="json"), summary={"path": saved.path}, checkpoint=saved)


def _load_state(engine: Engine, job: str, delivery: Delivery, cycle: int) -> Reply:
    version = checkpoint_version(engine, job, delivery.request)
    loaded = engine.load_state(job, delivery.request)
    return Reply(info=loaded.model_dump(mode="json"), summary={"path": loaded.path}, version=version)


def checkpoint_version(engine: Engine, job: str, request: Any) -> str | None:
    """Which version of a checkpoint this request would read now; None if it reads none."""
    if isinstance(request, LoadStateRequest):
        path = CheckpointPath.parse(request.path, job=job)
    elif isinstance(request, CreateModelRequest) and request.from_checkpoint:
        path = CheckpointPath.parse(request.from_checkpoint)
    else:
        return None
    manifest = engine.store.manifest(path)
    return f"{manifest.op_id} {manifest.created.isoformat()}"


_EXECUTORS: dict[str, Callable[[Engine, str, Delivery, int], Reply]] = {
    ops.CREATE_MODEL: _create_model,
    ops.FORWARD: _forward,
    ops.FORWARD_BACKWARD: _forward,
    ops.OPTIM_STEP: _optim_step,
    ops.SAVE_STATE: _save,
    ops.SAVE_WEIGHTS_FOR_SAMPLER: _save,
    ops.LOAD_STATE: _load_state,
}
