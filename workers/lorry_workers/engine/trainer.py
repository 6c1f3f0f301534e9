"""forward and forward_backward: a batch of data through the base model, an adapter and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lorry_jobs.errors import UserError
from lorry_jobs.types import Datum, ForwardBackwardOutput, TensorData
from lorry_jobs.wire import mean_loss

from .batch import MicroBatch, check_data, make_microbatch, plan_microbatches
from .head import Head
from .job_state import JobState
from .lora_linear import ActiveAdapters
from .losses import Loss, find_loss

if TYPE_CHECKING:
    from ..base_model import BaseModel

Config = Mapping[str, float | str] | None


class Trainer:
    """Runs batches through one base model, whose projections share `active`.

    `max_tokens_per_microbatch` counts padded tokens. `activation_checkpointing` keeps only each layer's
    input for the backward pass and computes the rest again.
    """

    def __init__(
        self,
        base: BaseModel,
        active: ActiveAdapters,
        head: Head,
        *,
        max_tokens_per_microbatch: int = 4096,
        activation_checkpointing: bool = False,
    ) -> None:
        self.base = base
        self.active = active
        self.head = head
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self.device = head.weight.device
        self.body = base.model.base_model
        self.checkpointed: list[GradientCheckpointingLayer] = []
        if activation_checkpointing:
            model = base.model
            # transformers 5.24 renamed the method and warns about the old name.
            new_name = hasattr(model, "activation_checkpointing_enable")
            enable = model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            model.disable_input_require_grads()  # needed by re-entrant checkpointing only
            self.checkpointed = [m for m in self.body.modules() if isinstance(m, GradientCheckpointingLayer)]

    def forward(
        self, state: JobState, data: Sequence[Datum], loss_fn: str, config: Config = None
    ) -> ForwardBackwardOutput:
        """Log-probabilities and losses. The job's state and gradients stay as they are."""
        loss = self._check(data, loss_fn, config)
        results = _Results(data, loss)
        with torch.no_grad(), self.active.use_one(state.adapter):
            for batch in self._microbatches(data, loss):
                if len(batch.targets):
                    hidden = self._wanted(self._hidden(batch), batch)
                    logprobs = self.head.score(hidden, batch.targets, state.adapter)
                    losses, _ = _terms(loss, batch, logprobs, slice(None))
                    results.add(batch, logprobs, losses)
        return results.output()

    def forward_backward(
        self, state: JobState, data: Sequence[Datum], loss_fn: str, config: Config = None
    ) -> ForwardBackwardOutput:
        """As `forward`, and the gradient of the summed loss is added to that of the job's adapter.

        After an exception that gradient is undefined: the caller must drop the whole accumulation.
        """
        loss = self._check(data, loss_fn, config)
        results = _Results(data, loss)
        state.adapter.require_gradients()
        # The backward pass is inside: activation checkpointing runs the layers once more.
        with self.active.use_one(state.adapter), self._checkpointing():
            for batch in self._microbatches(data, loss):
                self._run_backward(state, batch, loss, results)
        output = results.output()
        if not np.isfinite(output.metrics["loss:sum"]):
            raise UserError(f"the loss is not finite ({results.first_not_finite()}); no gradient was kept")
        state.add_accumulation(int(output.metrics["tokens:sum"]), output.loss)
        return output

    def _run_backward(self, state: JobState, batch: MicroBatch, loss: Loss, results: _Results) -> None:
        if len(batch.targets) == 0:  # every target is ignored
            return
        states = self._hidden(batch)  # (b, t, H)
        gradient = self.head.backward(
            self._wanted(states.detach(), batch),  # (m, H)
            batch.targets,
            lambda logprobs, rows: _terms(loss, batch, logprobs, rows),
            state.adapter,
        )
        results.add(batch, gradient.logprobs, gradient.losses)
        if gradient.hidden is None or not states.requires_grad:
            return
        incoming = gradient.hidden
        if batch.positions is not None:
            incoming = incoming.new_zeros(states.shape[0] * states.shape[1], incoming.shape[1])
            incoming.index_copy_(0, batch.positions, gradient.hidden)  # (m, H) -> (b·t, H)
        states.backward(incoming.view(states.shape))

    def _check(self, data: Sequence[Datum], loss_fn: str, config: Config) -> Loss:
        loss = find_loss(loss_fn, config)
        check_data(data, loss, self.base.vocab_size, self.base.context_length)
        return loss

    def _microbatches(self, data: Sequence[Datum], loss: Loss) -> Iterator[MicroBatch]:
        lengths = [datum.model_input.length for datum in data]
        for indices in plan_microbatches(lengths, self.max_tokens_per_microbatch):
            yield make_microbatch(data, indices, loss, self.device)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """The last hidden states, (b, t, H)."""
        return self.body(input_ids=batch.tokens, use_cache=False).last_hidden_state

    def _wanted(self, states: Tensor, batch: MicroBatch) -> Tensor:
        """(b, t, H) -> (m, H): the states whose targets count."""
        flat = states.flatten(0, 1)
        return flat if batch.positions is None else flat.index_select(0, batch.positions)

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        # transformers checkpoints a layer only in training mode. The flag of the layer itself decides that and
        # nothing else; the modules below it stay in eval mode.
        for layer in self.checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self.checkpointed:
                layer.training = False


def _terms(loss: Loss, batch: MicroBatch, logprobs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Losses and coefficients of some of a micro-batch's positions, 0 at ignored targets."""
    inputs = {name: values[rows] for name, values in batch.inputs.items()}
    losses, coefficients = loss.terms(logprobs, inputs, loss.config)
    if batch.ignored is not None:
        ignored = batch.ignored[rows]
        losses, coefficients = losses.masked_fill(ignored, 0.0), coefficients.masked_fill(ignored, 0.0)
    return losses, coefficients


class _Results:
    """Gathers what the micro-batches give, and puts it in the order of the data."""

    def __init__(self, data: Sequence[Datum], loss: Loss) -> None:
        self.shapes = [datum.loss_fn_inputs["target_tokens"].array.shape for datum in data]
        self.logprobs: list[NDArray[np.float32]] = [np.zeros(shape, np.float32) for shape in self.shapes]
        self.losses = [0.0] * len(data)
        self.weights = 0.0
        self.loss = loss

    def add(self, batch: MicroBatch, logprobs: Tensor, losses: Tensor) -> None:
        weights = self.loss.weight(batch.inputs)
        if batch.ignored is not None:
            logprobs, weights = logprobs.masked_fill(batch.ignored, 0.0), weights.masked_fill(batch.ignored, 0.0)
        self.weights += float(weights.sum(dtype=torch.float64))
        found = torch.stack([logprobs, losses]).float().cpu().numpy()
        for index, array in zip(batch.datums, batch.per_datum(found[0]), strict=True):
            shape = self.shapes[index]
            columns = shape[1] if len(shape) == 2 else 1
            self.logprobs[index] = np.ascontiguousarray(array[:, :columns]).reshape(shape)
        for index, array in zip(batch.datums, batch.per_datum(found[1]), strict=True):
            self.losses[index] = float(array.sum(dtype=np.float64))

    def first_not_finite(self) -> str:
        index = next(i for i, value in enumerate(self.losses) if not np.isfinite(value))
        return f"datum {index}: {self.losses[index]}"

    def output(self) -> ForwardBackwardOutput:
        """`weights:sum` is Σ weight for cross_entropy, and for policy losses the number of positions whose
        advantage is not 0; `loss` is `loss:sum` divided by it."""
        metrics = {
            "loss:sum": float(sum(self.losses)),
            "weights:sum": self.weights,
            "tokens:sum": float(sum(shape[0] for shape in self.shapes)),
        }
        return ForwardBackwardOutput(
            loss_fn_outputs=[{"logprobs": TensorData(array)} for array in self.logprobs],
            metrics=metrics,
            loss=mean_loss(metrics),
        )
