"""`TrainingClient`: one training run. Ops run on the server in the order of the calls made here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lorry_jobs import ops, wire
from lorry_jobs.errors import UserError
from lorry_jobs.results import Outcome
from lorry_jobs.tensors import LorryModel
from lorry_jobs.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadStateRequest,
    LoadWeightsResponse,
    LossFnType,
    ModelInfo,
    OptimStepRequest,
    OptimStepResponse,
    SaveRequest,
    SaveWeightsResponse,
)

from .background import at_once
from .check import check_batch
from .checkpoint_methods import CheckpointMethods
from .checkpoints import Checkpoints
from .custom_loss import CustomLoss, CustomPass, require_torch, targets_only
from .futures import APIFuture, Submission
from .process import ClientProcess
from .sampling_client import SamplingClient, note_unused

if TYPE_CHECKING:
    from .service_client import ServiceClient

T = TypeVar("T")


class TrainingClient(CheckpointMethods):
    """Made by `ServiceClient.create_lora_training_client`.

    Every op method submits at the call, takes the next place in the job's chain, and returns an `APIFuture` at
    once. Its `_async` twin does the same; awaiting it gives the `APIFuture`, awaiting that the result. Gradients
    of all forward_backward calls since the last optim_step add up.
    """

    def __init__(self, service: ServiceClient, process: ClientProcess, info: GetInfoResponse, model: ModelInfo) -> None:
        self._service, self._process = service, process
        self._info, self._model = info, model
        self._checkpoints = Checkpoints(process, service._session, info.model_id)
        self._lock = threading.RLock()
        self._next_seq = 1  # 0 was create_model

    @property
    def model_id(self) -> str:
        """The job's id."""
        return self._info.model_id

    # --------------------------------------------------------------------------------------------------- training

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Logprobs and loss, without gradients."""
        return self._batch(ops.FORWARD, data, loss_fn, loss_fn_config)

    def forward_async(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Submission[ForwardBackwardOutput]:
        return Submission(self.forward(data, loss_fn, loss_fn_config), levels=2)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Logprobs and loss; the gradient of the summed loss is added to what has accumulated."""
        return self._batch(ops.FORWARD_BACKWARD, data, loss_fn, loss_fn_config)

    def forward_backward_async(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Submission[ForwardBackwardOutput]:
        return Submission(self.forward_backward(data, loss_fn, loss_fn_config), levels=2)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        loss_type_input: str = "logprobs",
        *,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """forward_backward with your own loss, computed here with torch on the log-probabilities of the targets.

        `loss_fn(data, logprobs)` gets one float32 tensor per datum, in the shape of its target_tokens, and returns
        (scalar loss, metrics); with `loss_fn_config` it gets that as third argument. It runs on a thread of this
        process. The result's `loss` is its loss, `metrics` hold its metrics. Costs one forward more.
        """
        if loss_type_input != "logprobs":
            raise UserError(f"loss_type_input can only be 'logprobs', got {loss_type_input!r}")
        require_torch()
        rows = check_batch(data, "cross_entropy", self._model, ops.FORWARD_BACKWARD)
        with self._lock:
            forward = self._batch(ops.FORWARD, targets_only(rows), "cross_entropy", None)
            custom = CustomPass(self._process, self.model_id, self._next_seq, rows, loss_fn, loss_fn_config)
            self._next_seq += 1
        custom.start(forward)
        return custom.future

    def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        loss_type_input: str = "logprobs",
        *,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Submission[ForwardBackwardOutput]:
        custom = self.forward_backward_custom(data, loss_fn, loss_type_input, loss_fn_config=loss_fn_config)
        return Submission(custom, levels=2)

    def optim_step(self, adam_params: AdamParams | None = None) -> APIFuture[OptimStepResponse]:
        """One AdamW step with the accumulated gradients, which are then zero again."""
        if adam_params is not None and not isinstance(adam_params, AdamParams):
            raise UserError(f"optim_step takes AdamParams, not {type(adam_params).__name__}")
        request = OptimStepRequest(adam_params=adam_params or AdamParams())
        return self._json(ops.OPTIM_STEP, request, _optim_response)

    def optim_step_async(self, adam_params: AdamParams | None = None) -> Submission[OptimStepResponse]:
        return Submission(self.optim_step(adam_params), levels=2)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights, optimizer and gradients, to go on from later. The result has `.path`."""
        request = SaveRequest(name=name, ttl_seconds=ttl_seconds, overwrite=overwrite)
        return self._json(ops.SAVE_STATE, request, _saved)

    def save_state_async(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> Submission[SaveWeightsResponse]:
        return Submission(self.save_state(name, ttl_seconds, overwrite), levels=2)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> APIFuture[SamplingClient]:
        """Save the adapter as it is now. The result is a `SamplingClient` of it, with `.path`."""
        request = SaveRequest(name=name, ttl_seconds=ttl_seconds, overwrite=overwrite)
        return self._json(ops.SAVE_WEIGHTS_FOR_SAMPLER, request, self._sampler)

    def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> Submission[SamplingClient]:
        return Submission(self.save_weights_for_sampler(name, ttl_seconds, overwrite), levels=2)

    def load_state(self, path: str, weights_access_token: str | None = None) -> APIFuture[LoadWeightsResponse]:
        """Load weights into this run. The optimizer starts anew; gradients that were not stepped are dropped.

        A bare name is one of this run's own. `weights_access_token` is accepted and not needed: whoever reaches the
        server may read every checkpoint.
        """
        note_unused(weights_access_token=weights_access_token)
        return self._json(ops.LOAD_STATE, LoadStateRequest(path=path), _loaded)

    def load_state_async(self, path: str, weights_access_token: str | None = None) -> Submission[LoadWeightsResponse]:
        return Submission(self.load_state(path, weights_access_token), levels=2)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights, optimizer and accumulated gradients as they were saved."""
        note_unused(weights_access_token=weights_access_token)
        return self._json(ops.LOAD_STATE, LoadStateRequest(path=path, optimizer=True), _loaded)

    def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> Submission[LoadWeightsResponse]:
        return Submission(self.load_state_with_optimizer(path, weights_access_token), levels=2)

    # --------------------------------------------------------------------------------------------------- sampling

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: object | None = None
    ) -> SamplingClient:
        """Save the adapter (under `name`, or one made up from the op's seq) and sample from it. Waits for the save."""
        note_unused(retry_config=retry_config)
        return self._save_for_sampling(name).result()

    def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: object | None = None
    ) -> Submission[SamplingClient]:
        """One await gives the client."""
        note_unused(retry_config=retry_config)
        return Submission(self._save_for_sampling(name), levels=1)

    def _save_for_sampling(self, name: str | None) -> APIFuture[SamplingClient]:
        if name is not None:
            return self.save_weights_for_sampler(name, overwrite=True)
        with self._lock:
            return self.save_weights_for_sampler(f"sampler-{self._next_seq}", overwrite=True)

    def create_sampling_client(self, model_path: str, retry_config: object | None = None) -> SamplingClient:
        """A client that samples from a checkpoint. A bare name is one of this run's own, if it has one."""
        return self._service.create_sampling_client(self._own(model_path), retry_config=retry_config)

    def create_sampling_client_async(
        self, model_path: str, retry_config: object | None = None
    ) -> Submission[SamplingClient]:
        return self._service.create_sampling_client_async(self._own(model_path), retry_config=retry_config)

    def _own(self, model_path: str) -> str:
        return self._checkpoints.find(model_path, ("sampler_weights", "weights")).path

    # ------------------------------------------------------------------------------------------------- information

    def get_info(self) -> GetInfoResponse:
        return self._info

    def get_info_async(self) -> Submission[GetInfoResponse]:
        return at_once(self._process, "get_info", self.get_info)

    def get_tokenizer(self) -> Any:
        """The base model's tokenizer (transformers' own class), from the files that the worker published."""
        return self._service.get_tokenizer(self._info.model_name)

    def get_tokenizer_async(self) -> Submission[Any]:
        return at_once(self._process, "get_tokenizer", self.get_tokenizer)

    def __repr__(self) -> str:
        return f"<TrainingClient {self.model_id} of {self._info.model_name}, rank {self._info.lora_rank}>"

    # -------------------------------------------------------------------------------------------------- submitting

    def _batch(
        self,
        op: str,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        data = check_batch(data, loss_fn, self._model, op)
        return self._submit(
            op,
            lambda seq: wire.encode_batch(
                self.model_id, seq, data, loss_fn, loss_fn_config, forward_only=op == ops.FORWARD
            ),
            _output,
        )

    def _json(self, op: str, request: LorryModel, decode: Callable[[Outcome], T]) -> APIFuture[T]:
        return self._submit(op, lambda seq: request.model_dump_json().encode(), decode)

    def _submit(self, op: str, encode: Callable[[int], bytes], decode: Callable[[Outcome], T]) -> APIFuture[T]:
        # One lock over taking the seq and posting: threads may share a client, and seq order is posting order.
        with self._lock:
            seq = self._next_seq
            payload = encode(seq)
            future = self._process.submit_op(self.model_id, seq, op, payload, decode)
            self._next_seq += 1
            return future

    def _sampler(self, outcome: Outcome) -> SamplingClient:
        saved = _saved(outcome)
        return SamplingClient(self._service, self._process, self._model, checkpoint=saved)


def _output(outcome: Outcome) -> ForwardBackwardOutput:
    assert outcome.output is not None
    output = wire.decode_output(outcome.output, cycle=outcome.info.get("cycle"))
    # PyTRIO's names of the same numbers.
    known = {"loss_sum": "loss:sum", "token_count": "tokens:sum"}
    aliases = {alias: output.metrics[name] for alias, name in known.items() if name in output.metrics}
    return output.model_copy(update={"metrics": {**output.metrics, **aliases, "loss_mean": output.loss}})


def _optim_response(outcome: Outcome) -> OptimStepResponse:
    return OptimStepResponse(metrics=outcome.info.get("metrics", {}), cycle=outcome.info.get("cycle"))


def _fields(model: type[LorryModel], outcome: Outcome) -> dict[str, Any]:
    """What of the record belongs to the result; cycle and timing ride along in every record."""
    return {name: value for name, value in outcome.info.items() if name in model.model_fields}


def _saved(outcome: Outcome) -> SaveWeightsResponse:
    return SaveWeightsResponse(**_fields(SaveWeightsResponse, outcome))


def _loaded(outcome: Outcome) -> LoadWeightsResponse:
    return LoadWeightsResponse(**_fields(LoadWeightsResponse, outcome))
