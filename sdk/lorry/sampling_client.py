"""`SamplingClient`: sample from a base model, or from an adapter as it was when it was saved."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lorry_jobs import ops, wire
from lorry_jobs.errors import UserError
from lorry_jobs.results import Outcome
from lorry_jobs.types import (
    CheckpointMetadata,
    ModelInfo,
    ModelInput,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)

from .background import at_once
from .check import check_prompt
from .futures import APIFuture, Submission
from .process import ClientProcess

if TYPE_CHECKING:
    from datetime import datetime

    from .service_client import ServiceClient

log = logging.getLogger("lorry")


class SamplingClient:
    """Made by `ServiceClient.create_sampling_client` and the `save_weights_*` methods of a training client.

    The weights are frozen: training on changes nothing here. `path` is the checkpoint's, None for a base model.
    """

    def __init__(
        self,
        service: ServiceClient,
        process: ClientProcess,
        model: ModelInfo,
        *,
        checkpoint: SaveWeightsResponse | CheckpointMetadata | None = None,
    ) -> None:
        self._service, self._process, self._model = service, process, model
        self._saved = checkpoint
        self.path: str | None = checkpoint.path if checkpoint else None

    @property
    def name(self) -> str | None:
        """The checkpoint's name."""
        return self._saved.name if self._saved else None

    @property
    def size(self) -> int | None:
        """The checkpoint's bytes."""
        return self._saved.size if self._saved else None

    @property
    def created(self) -> datetime | None:
        return self._saved.created if self._saved else None

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        return_text: bool = True,
    ) -> APIFuture[SampleResponse]:
        """Sample `num_samples` continuations. Requests of one client may run in any order and at the same time.

        `return_text` is PyTRIO's; here each sequence has its `text` whatever it says.
        """
        if not isinstance(prompt, ModelInput):
            prompt = ModelInput.from_ints(prompt)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise UserError(f"sampling_params must be SamplingParams, not {type(sampling_params).__name__}")
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        if topk_prompt_logprobs < 0:
            raise UserError(f"topk_prompt_logprobs must not be negative, got {topk_prompt_logprobs}")
        check_prompt(prompt, self._model, "sample")
        request = wire.SampleRequest(
            base_model=self._model.name,
            model_path=self.path,
            prompt=prompt,
            num_samples=num_samples,
            params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
        )
        payload = wire.encode_sample_request(request)
        return self._process.submit_request(self._model.name, ops.SAMPLE, payload, _response)

    def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        return_text: bool = True,
    ) -> Submission[SampleResponse]:
        """One await gives the response; a second one does no harm."""
        future = self.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs, return_text
        )
        return Submission(future, levels=1)

    def compute_logprobs(self, prompt: ModelInput) -> APIFuture[list[float | None]]:
        """The log-probability of each prompt token given those before it; None for the first."""
        params = SamplingParams(max_tokens=1)
        return self.sample(prompt, 1, params, include_prompt_logprobs=True).map(_prompt_logprobs)

    def compute_logprobs_async(self, prompt: ModelInput) -> Submission[list[float | None]]:
        return Submission(self.compute_logprobs(prompt), levels=1)

    def get_base_model(self) -> str:
        return self._model.name

    def get_base_model_async(self) -> Submission[str]:
        return at_once(self._process, "get_base_model", self.get_base_model)

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer (transformers' own class)."""
        return self._service.get_tokenizer(self._model.name)

    def get_tokenizer_async(self) -> Submission[Any]:
        return at_once(self._process, "get_tokenizer", self.get_tokenizer)

    def __repr__(self) -> str:
        return f"<SamplingClient of {self.path or self._model.name}>"


def note_unused(**arguments: object | None) -> None:
    """Other services need these arguments. Code that has them runs, and is told that they do nothing here."""
    for name, value in arguments.items():
        if value is not None:
            log.warning("%s does nothing here: see the documentation of the method that takes it", name)


def _response(outcome: Outcome) -> SampleResponse:
    assert outcome.output is not None
    return wire.decode_sample_response(outcome.output, outcome.info.get("texts"))


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    return response.prompt_logprobs or []
