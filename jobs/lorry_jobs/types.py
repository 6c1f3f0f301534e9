"""Requests and results that clients and workers exchange, beside `tensors`."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from .checkpoint_paths import CheckpointPath, Kind, check_name
from .tensors import Datum, LorryModel, ModelInput, TensorData, TensorDtype

__all__ = [
    "AdamParams",
    "ChangeCheckpointRequest",
    "CheckpointFile",
    "CheckpointMetadata",
    "CreateModelRequest",
    "Datum",
    "DeleteCheckpointRequest",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "LoadStateRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnType",
    "MergeCheckpointRequest",
    "MergedModel",
    "ModelData",
    "ModelInfo",
    "ModelInput",
    "OptimStepRequest",
    "OptimStepResponse",
    "ReadCheckpointRequest",
    "ReindexRequest",
    "ReindexResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveRequest",
    "SaveWeightsResponse",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
]

LossFnType = str
StopReason = Literal["stop", "length"]


class LoraConfig(LorryModel):
    """Which LoRA adapter to train. `alpha` / `rank` scales the adapter's output, as in peft."""

    rank: int = Field(32, ge=1, le=1024)
    seed: int | None = Field(None, ge=0)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _something_to_train(self) -> LoraConfig:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")
        return self


class AdamParams(LorryModel):
    """AdamW with decoupled weight decay; `grad_clip_norm` 0 means no clipping (global norm)."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class SamplingParams(LorryModel):
    """How to sample.

    `max_tokens` None: up to the model's context. `temperature` 0: greedy. `top_k` -1: off. `stop`: a string, or
    strings, or token ids; None stops at the model's end-of-text tokens, an empty list at nothing.
    `stop_token_ids` adds to `stop`. The tokens that complete a stop string are part of the result's tokens and
    not of its text. `seed`: the same request with the same seed gives the same tokens.
    """

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0)
    stop: str | list[int] | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("top_k must be -1 (off) or at least 1")
        return value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: Any) -> Any:
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("a stop string must not be empty")
        return value

    @property
    def stop_strings(self) -> list[str]:
        if isinstance(self.stop, str):
            return [self.stop]
        return [item for item in self.stop or [] if isinstance(item, str)]

    @property
    def all_stop_token_ids(self) -> list[int]:
        return [item for item in self.stop or [] if isinstance(item, int)] + (self.stop_token_ids or [])

    @property
    def ignore_eos(self) -> bool:
        return self.stop == []


class CreateModelRequest(LorryModel):
    """`from_checkpoint`: start from this checkpoint's weights (and optimizer); its own LoRA shape is used then."""

    base_model: str
    lora: LoraConfig = LoraConfig()
    from_checkpoint: str | None = None
    with_optimizer: bool = False
    user_metadata: dict[str, str] | None = None


class OptimStepRequest(LorryModel):
    adam_params: AdamParams = AdamParams()


class SaveRequest(LorryModel):
    """Save under `name`. `ttl_seconds` None: kept for ever."""

    name: str
    ttl_seconds: int | None = Field(None, ge=1)
    overwrite: bool = False

    @field_validator("name")
    @classmethod
    def _stays_in_the_store(cls, name: str) -> str:
        return check_name(name)


class LoadStateRequest(LorryModel):
    path: str
    optimizer: bool = False

    @field_validator("path")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        CheckpointPath.parse(path, job="-")
        return path


class ForwardBackwardOutput(LorryModel):
    """What a forward or forward_backward gives.

    `loss` is the weighted mean per token, Σ weight·loss / Σ weight, in nats (for cross_entropy). The objective
    whose gradient is accumulated is the plain sum: `metrics["loss:sum"]`. `loss_fn_outputs[i]["logprobs"]` has
    the shape of datum i's target_tokens.
    """

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = {}
    loss: float = math.nan
    cycle: int | None = None


class OptimStepResponse(LorryModel):
    metrics: dict[str, float] = {}
    cycle: int | None = None


class SaveWeightsResponse(LorryModel):
    """Where a checkpoint went. `size` is in bytes."""

    path: str
    name: str
    size: int
    created: datetime
    expires: datetime | None = None
    type: str = "save_weights"


class LoadWeightsResponse(LorryModel):
    """`dropped_gradients` says that gradients without an optim_step were there and are gone."""

    path: str
    optimizer: bool
    dropped_gradients: bool = False
    type: str = "load_weights"


class CheckpointFile(LorryModel):
    """`size` is in bytes."""

    size: int
    sha256: str


class CheckpointMetadata(LorryModel):
    """What is known of a checkpoint without opening it. `size` is in bytes, times are in UTC.

    `kind`: "weights" is training state (`save_state`), "sampler_weights" an adapter (`save_weights_for_sampler`).
    `expires` None: it stays for ever. A pinned one neither expires nor can be deleted. `step`: optimizer steps taken.
    """

    path: str
    job: str
    kind: Kind
    name: str
    size: int
    created: datetime
    expires: datetime | None = None
    pinned: bool = False
    base_model: str
    lora_rank: int
    step: int
    user_metadata: dict[str, str] = {}
    files: dict[str, CheckpointFile] = {}
    op_id: str = ""

    @property
    def ttl(self) -> timedelta | None:
        """The time left, never less than zero; None: it does not expire."""
        if self.expires is None or self.pinned:
            return None
        return max(self.expires - datetime.now(UTC), timedelta(0))

    @property
    def expired(self) -> bool:
        return self.ttl == timedelta(0)


class ChangeCheckpointRequest(LorryModel):
    """`ttl_seconds` counts from now; with `set_ttl` and None the checkpoint stays for ever. `pinned` None: as it is."""

    path: str
    set_ttl: bool = False
    ttl_seconds: int | None = Field(None, ge=1)
    pinned: bool | None = None


class DeleteCheckpointRequest(LorryModel):
    path: str


class ReadCheckpointRequest(LorryModel):
    """`size` bytes of one file from `offset` on. `op_id`: of the checkpoint that was meant, should it be replaced
    meanwhile. `merged`: the file is one of a merged model, under this id."""

    path: str
    file: str
    offset: int = Field(0, ge=0)
    size: int = Field(ge=1, le=8 * 2**20)
    op_id: str | None = None
    merged: str | None = None


class MergeCheckpointRequest(LorryModel):
    path: str


class MergedModel(LorryModel):
    """A base model with an adapter's weights added, as files that wait to be fetched."""

    id: str
    files: dict[str, CheckpointFile]


class ReindexRequest(LorryModel):
    pass


class ReindexResponse(LorryModel):
    """`added` were in the store and not in the index, `removed` the other way round."""

    checkpoints: int
    added: list[str]
    removed: list[str]
    unreadable: list[str] = []


class ModelData(LorryModel):
    model_id: str
    model_name: str
    lora_rank: int
    arch: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(LorryModel):
    model_id: str
    model_name: str
    lora_rank: int
    is_lora: bool = True
    model_data: ModelData


class SampledSequence(LorryModel):
    """`logprobs[i]` is the model's own log-probability of `tokens[i]` (at temperature 1). `text` has no stop string."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str | None = None

    @property
    def tokens_np(self) -> NDArray[np.int64]:
        return np.asarray(self.tokens, np.int64)

    @property
    def logprobs_np(self) -> NDArray[np.float32]:
        return np.asarray(self.logprobs, np.float32)


class SampleResponse(LorryModel):
    """`prompt_logprobs[0]` is None: nothing comes before the first token."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class SupportedModel(LorryModel):
    model_name: str
    max_context_length: int
    workers: int


class GetServerCapabilitiesResponse(LorryModel):
    supported_models: list[SupportedModel]


class ModelInfo(LorryModel):
    """What a worker says of the base model it serves."""

    name: str
    vocab_size: int
    context_length: int
    arch: str
    parameters: int
    tokenizer_sha256: str
    eos_token_ids: list[int] = []
