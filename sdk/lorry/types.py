"""All request and result types, as `lorry.types.X`; the common ones are at `lorry.X` too."""

from lorry_jobs.tensors import Datum, LorryModel, ModelInput, TensorData, TensorDtype
from lorry_jobs.types import (
    AdamParams,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    LossFnType,
    ModelData,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    SupportedModel,
)

__all__ = [
    "AdamParams",
    "Datum",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "LoadWeightsResponse",
    "LoraConfig",
    "LorryModel",
    "LossFnType",
    "ModelData",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsResponse",
    "SupportedModel",
    "TensorData",
    "TensorDtype",
]
