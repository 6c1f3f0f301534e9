"""A job's training state as the content of a checkpoint, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorry_jobs.errors import ServiceError, UserError

from .adapter import Adapter
from .checkpoints import Checkpoint, Manifest
from .job_state import JobState
from .optimizer import AdamState

_EXP_AVG, _EXP_AVG_SQ, _GRADIENT = "exp_avg.", "exp_avg_sq.", "gradient."


def write_adapter(adapter: Adapter) -> Checkpoint:
    """The adapter alone: a folder that peft and vLLM load."""
    return Checkpoint(adapter.state_dict(), adapter.adapter_config())


def write_state(state: JobState) -> Checkpoint:
    """Everything from which the job goes on exactly as it would have, accumulated gradients included."""
    adapter = state.adapter
    optimizer = {
        **_prefixed(_EXP_AVG, adapter.named_copy(state.adam.exp_avg)),
        **_prefixed(_EXP_AVG_SQ, adapter.named_copy(state.adam.exp_avg_sq)),
    }
    if state.has_gradients:
        optimizer |= _prefixed(_GRADIENT, adapter.named_copy(adapter.require_gradients()))
    fields: dict[str, Any] = {
        "seed": adapter.seed,
        "step": state.step,
        "adam_step": state.adam.step,
        "accumulated_calls": state.accumulated_calls,
        "accumulated_tokens": state.accumulated_tokens,
        "loss_history": list(state.loss_history),
    }
    return Checkpoint(adapter.state_dict(), adapter.adapter_config(), optimizer, fields)


def read_state(state: JobState, checkpoint: Checkpoint, manifest: Manifest, *, optimizer: bool) -> bool:
    """Put `checkpoint` in the place of the job's state; True if unstepped gradients were dropped.

    Without `optimizer` the moments start from zero. Nothing is changed if the checkpoint does not fit.
    """
    _check_fits(state, manifest)
    adapter = state.adapter
    adam, gradient, fields = AdamState.zeros_like(adapter.flat), None, dict[str, Any]()
    if optimizer:
        if checkpoint.optimizer is None or checkpoint.state is None:
            raise UserError(f"{manifest.path} has no optimizer state; load it without, or load a weights checkpoint")
        fields = checkpoint.state
        gradient = _read_optimizer(adapter, adam, checkpoint.optimizer, fields)

    adapter.load_state_dict(checkpoint.adapter)  # the first change, and the last thing that can fail
    dropped = state.drop_gradients()
    if gradient is not None:
        adapter.require_gradients().copy_(gradient)
    state.adam = adam
    state.step = manifest.step
    state.accumulated_calls = fields.get("accumulated_calls", 0)
    state.accumulated_tokens = fields.get("accumulated_tokens", 0)
    state.loss_history.clear()
    state.loss_history.extend(fields.get("loss_history", ()))
    return dropped


def _read_optimizer(
    adapter: Adapter, adam: AdamState, tensors: dict[str, Tensor], fields: dict[str, Any]
) -> Tensor | None:
    """Fill `adam`; the accumulated gradient, if there was one."""
    gradient = torch.zeros_like(adapter.flat) if fields["accumulated_calls"] else None
    try:
        adapter.copy_named(_with_prefix(_EXP_AVG, tensors), adam.exp_avg)
        adapter.copy_named(_with_prefix(_EXP_AVG_SQ, tensors), adam.exp_avg_sq)
        if gradient is not None:
            adapter.copy_named(_with_prefix(_GRADIENT, tensors), gradient)
    except UserError as error:
        raise ServiceError(f"the optimizer state does not belong to its adapter: {error.message}") from error
    adam.step = fields["adam_step"]
    return gradient


def _check_fits(state: JobState, manifest: Manifest) -> None:
    if manifest.base_model != state.base_model:
        raise UserError(f"{manifest.path} is of {manifest.base_model}, but this job trains {state.base_model}")
    for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
        theirs, ours = getattr(manifest.lora, name), getattr(state.lora, name)
        if theirs != ours:
            raise UserError(f"{manifest.path} has {name}={theirs}, but this job has {name}={ours}")


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
