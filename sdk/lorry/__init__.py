"""Lorry: a training loop on your laptop, the GPU somewhere else, nothing lost between.

import lorry

client = lorry.ServiceClient().create_lora_training_client("smollm2", rank=16)
future = client.forward_backward(batch, "cross_entropy")   # returns at once
client.optim_step(lorry.AdamParams(learning_rate=1e-4))    # runs after it
print(future.result().loss)
"""

from lorry_jobs import errors
from lorry_jobs.errors import (
    AccumulationIncomplete,
    Backpressure,
    CheckpointExists,
    CheckpointNotFound,
    ForkedClient,
    JobFailed,
    LorryError,
    OpCancelled,
    SequenceConflict,
    ServiceError,
    ServiceUnavailable,
    StateRolledBack,
    UnknownModel,
    UserError,
    WaitTimeout,
)

from . import data, types
from .futures import APIFuture, APIFutureResult, Submission
from .local import local
from .sampling_client import SamplingClient
from .service_client import ServiceClient
from .training_client import TrainingClient
from .types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)

__all__ = [
    "APIFuture",
    "APIFutureResult",
    "AccumulationIncomplete",
    "AdamParams",
    "Backpressure",
    "CheckpointExists",
    "CheckpointNotFound",
    "Datum",
    "ForkedClient",
    "ForwardBackwardOutput",
    "JobFailed",
    "LoraConfig",
    "LorryError",
    "ModelInput",
    "OpCancelled",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SequenceConflict",
    "ServiceClient",
    "ServiceError",
    "ServiceUnavailable",
    "StateRolledBack",
    "Submission",
    "TensorData",
    "TrainingClient",
    "UnknownModel",
    "UserError",
    "WaitTimeout",
    "data",
    "errors",
    "local",
    "types",
]
