"""Losses of a target's log-probability, one function each.

A loss takes `logprobs` x = log p(target) and its inputs, all of one shape, and gives two tensors of that
shape: the loss of each position, whose plain sum is the objective, and the derivative d loss / d x. The
head turns the second into gradients, so no autograd graph is needed.

q is the log-probability under the policy that sampled the target (`logprobs` in the datum), A the
advantage, r = exp(x - q). Formulas and default thresholds: the public Tinker documentation of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorry_jobs.errors import UserError

Inputs = Mapping[str, Tensor]
Arrays = Mapping[str, NDArray[np.float32]]
Config = Mapping[str, float]
Terms = tuple[Tensor, Tensor]

SEQUENCE = "sequence"
"""Input of losses over whole sequences, made here and not by users: which datum a position belongs to, counted
from 0 in the tensors at hand."""
SEQUENCE_COUNT = "sequences"
"""How many those are."""


def cross_entropy(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- w · x, with w = `weights` (1 where absent). Derivative: - w."""
    w = inputs["weights"]
    return -w * x, -w


def importance_sampling(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- r · A: the policy gradient, corrected for sampling from another policy. Derivative: - r · A."""
    loss = -torch.exp(x - inputs["logprobs"]) * inputs["advantages"]
    return loss, loss


def ppo(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- min(r·A, clamp(r, low, high)·A) (Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7).

    The thresholds bound the ratio itself (0.8 and 1.2, not an epsilon). Derivative: - r·A where the first
    term is the smaller one, else 0.
    """
    ratio = torch.exp(x - inputs["logprobs"])
    free = ratio * inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]) * inputs["advantages"]
    return -torch.minimum(free, clipped), torch.where(free <= clipped, -free, torch.zeros_like(free))


def cispo(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- sg(clamp(r, low, high)) · A · x, sg = no gradient (MiniMax-M1, https://arxiv.org/abs/2506.13585).

    Derivative: - clamp(r, low, high) · A.
    """
    ratio = torch.exp(x - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    slope = -clipped * inputs["advantages"]
    return slope * x, slope


def dro(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- (A·x - beta/2 · (x - q)²) (Richemond et al. 2024, https://arxiv.org/abs/2405.19107).

    Derivative: - (A - beta · (x - q)).
    """
    gap, beta = x - inputs["logprobs"], config["beta"]
    advantages = inputs["advantages"]
    return -(advantages * x - 0.5 * beta * gap * gap), -(advantages - beta * gap)


def gspo(x: Tensor, inputs: Inputs, config: Config) -> Terms:
    """- min(r·A, clamp(r, low, high)·A) with one ratio for a whole sequence
    (Zheng et al. 2025, https://arxiv.org/abs/2507.18071, the token-level variant of eq. 13 to 15):

        s = exp(mean over the mask of (x - q))          r = s · exp(x - sg(x)), sg = no gradient

    So r = s everywhere, and d r / d x = s at the position itself. Derivative: - s·A where the first term is the
    smaller one, else 0. The mask is `sequence_ratio_mask`; without one, the positions whose advantage is not 0.
    A sequence with nothing in its mask has s = 1. Default thresholds: the paper's 1 - 3e-4 and 1 + 4e-4.
    """
    advantages, sequence = inputs["advantages"], inputs[SEQUENCE].long()
    mask = inputs["sequence_ratio_mask"]
    count = int(inputs[SEQUENCE_COUNT])
    # Where the mask is 0, the log-probabilities have no say, not even if their difference is infinite.
    gaps = torch.where(mask != 0, mask * (x - inputs["logprobs"]), torch.zeros_like(x))
    sums = x.new_zeros(2, count, 1).scatter_add_(1, sequence.expand(2, -1, -1), torch.stack([gaps, mask.to(x.dtype)]))
    means = torch.where(sums[1] != 0, sums[0] / sums[1], torch.zeros_like(sums[0]))
    ratio = torch.exp(means).gather(0, sequence)
    free = ratio * advantages
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]) * advantages
    return -torch.minimum(free, clipped), torch.where(free <= clipped, -free, torch.zeros_like(free))


def _has_advantage(inputs: Arrays) -> NDArray[np.bool_]:
    return inputs["advantages"] != 0


def _everywhere(inputs: Arrays) -> NDArray[np.bool_]:
    return np.ones_like(inputs["advantages"], bool)


@dataclass(frozen=True)
class Loss:
    """A loss and what it needs. `required` inputs must be in each datum; `config` holds every option.

    `weight` gives each position's part in `weights:sum`, by which the reported mean `loss` is divided. It
    has no part in the objective. For policy losses it counts the positions whose advantage is not 0.
    `active` says where the derivative may differ from 0. Both look at the inputs on the host.

    `whole_sequences`: the terms of a position depend on other positions of its datum, so they can only be had
    once all its log-probabilities are there. Its inputs hold SEQUENCE too. `absent` gives optional inputs that a
    datum does not have; without an entry they are 1.
    """

    name: str
    terms: Callable[[Tensor, Inputs, Config], Terms]
    weight: Callable[[Arrays], NDArray[Any]]
    active: Callable[[Arrays], NDArray[np.bool_]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    config: Config = field(default_factory=dict)
    soft_targets: bool = False
    whole_sequences: bool = False
    absent: Mapping[str, Callable[[Arrays], NDArray[Any]]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


_POLICY = ("logprobs", "advantages")

LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            "cross_entropy",
            cross_entropy,
            weight=lambda inputs: inputs["weights"],
            active=lambda inputs: inputs["weights"] != 0,
            optional=("weights",),
            soft_targets=True,
        ),
        Loss("importance_sampling", importance_sampling, _has_advantage, _has_advantage, _POLICY),
        Loss(
            "ppo",
            ppo,
            _has_advantage,
            _has_advantage,
            _POLICY,
            config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        Loss(
            "cispo",
            cispo,
            _has_advantage,
            _has_advantage,
            _POLICY,
            config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ),
        Loss("dro", dro, _has_advantage, _everywhere, _POLICY, config={"beta": 0.05}),
        Loss(
            "gspo",
            gspo,
            _has_advantage,
            _has_advantage,
            _POLICY,
            optional=("sequence_ratio_mask",),
            config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
            whole_sequences=True,
            absent={"sequence_ratio_mask": _has_advantage},
        ),
    )
}


def find_loss(name: str, config: Mapping[str, float | str] | None = None) -> Loss:
    """The loss called `name`, with `config` over its defaults."""
    loss = LOSSES.get(name)
    if loss is None:
        raise UserError(f"unknown loss_fn {name!r}; the losses are: {', '.join(LOSSES)}")
    if not config:
        return loss
    merged = dict(loss.config)
    for key, value in config.items():
        if key not in merged:
            known = ", ".join(merged) or "none"
            raise UserError(f"loss_fn_config: {name} has no option {key!r} (its options: {known})")
        if isinstance(value, str | bool) or not math.isfinite(value):
            raise UserError(f"loss_fn_config: {key} must be a finite number, got {value!r}")
        merged[key] = float(value)
    low, high = merged.get("clip_low_threshold", 0.0), merged.get("clip_high_threshold", math.inf)
    if low > high:
        raise UserError(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return replace(loss, config=merged)
