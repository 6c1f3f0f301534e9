"""AdamW for many adapters at once.

Every list has one entry per job: each job's parameters are one flat tensor (see `adapter`), with its own
hyperparameters. The update is that of `torch.optim.AdamW` (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101), with t the job's step:

    θ ← θ · (1 - lr·λ)
    m ← β1·m + (1 - β1)·g           v ← β2·v + (1 - β2)·g²
    θ ← θ - lr / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorry_jobs.types import AdamParams

_SMALLEST_EPS = 1e-30
"""ε = 0 would make 0/0 where a gradient was always 0 (LoRA's A in the first step). This much changes no
other quotient: the smallest √v that float32 can hold is 3.7e-23."""

_LARGEST = torch.finfo(torch.float32).max


@dataclass
class AdamState:
    """The moments m and v, laid out as the adapter's flat tensor, and the number of steps in them."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0

    @classmethod
    def zeros_like(cls, flat: Tensor) -> AdamState:
        return cls(torch.zeros_like(flat), torch.zeros_like(flat))


@dataclass(frozen=True)
class Step:
    """What became of a job's step. `refused` says why it was not taken, if so."""

    grad_norm: float
    refused: str | None = None


def take_steps(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[AdamState],
    hyper: Sequence[AdamParams],
) -> list[Step]:
    """One step of each job, in place, except of those whose gradient is not finite: their parameters and
    moments stay as they were. (A gradient beyond 1.8e19 counts as infinite: its square has no float32.) The
    gradients may be changed."""
    if not parameters:
        return []
    norms = grad_norms(gradients)
    finite = [i for i, norm in enumerate(norms) if norm < float("inf")]
    if finite:
        theta, grads, m_v, params, sizes = (
            [values[i] for i in finite] for values in (parameters, gradients, states, hyper, norms)
        )
        adamw_step(theta, grads, m_v, params, sizes)
    return [Step(norm, None if norm < float("inf") else f"the gradient's norm is {norm}") for norm in norms]


def grad_norms(gradients: Sequence[Tensor]) -> list[float]:
    """The global L2 norm of each job's gradient, with one wait for the device."""
    return torch.stack(torch._foreach_norm(list(gradients))).tolist()


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[AdamState],
    hyper: Sequence[AdamParams],
    norms: Sequence[float],
) -> None:
    """One step of each job, in place. `norms`, from `grad_norms`, must be finite.

    `grad_clip_norm` > 0 scales a gradient down to that norm as `torch.nn.utils.clip_grad_norm_` does:
    g · min(1, clip / (norm + 1e-6)). The gradients may be changed by it.

    All memory is asked for before the first change: a step that does not fit leaves parameters and moments as they
    were.
    """
    theta, grads = list(parameters), list(gradients)
    m, v = [s.exp_avg for s in states], [s.exp_avg_sq for s in states]
    denominators = [torch.empty_like(moment) for moment in v]
    if any(p.grad_clip_norm for p in hyper):
        torch._foreach_mul_(grads, [_clip(p, norm) for p, norm in zip(hyper, norms, strict=True)])
    for state in states:
        state.step += 1
    if any(p.weight_decay for p in hyper):
        torch._foreach_mul_(theta, [_float32(1 - p.learning_rate * p.weight_decay) for p in hyper])
    torch._foreach_lerp_(m, grads, [1 - p.beta1 for p in hyper])
    torch._foreach_mul_(v, [p.beta2 for p in hyper])
    torch._foreach_addcmul_(v, grads, grads, [1 - p.beta2 for p in hyper])
    for moment, room in zip(v, denominators, strict=True):
        torch.sqrt(moment, out=room)
    corrections = [math.sqrt(1 - p.beta2**s.step) for p, s in zip(hyper, states, strict=True)]
    torch._foreach_div_(denominators, corrections)
    torch._foreach_add_(denominators, [_float32(max(p.eps, _SMALLEST_EPS)) for p in hyper])
    sizes = [_float32(-p.learning_rate / (1 - p.beta1**s.step)) for p, s in zip(hyper, states, strict=True)]
    torch._foreach_addcdiv_(theta, m, denominators, sizes)


def _float32(value: float) -> float:
    """torch raises for a number that its float32 cannot hold, when parts of all jobs' updates are done already."""
    return max(-_LARGEST, min(_LARGEST, value))


def _clip(params: AdamParams, norm: float) -> float:
    return min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm else 1.0
