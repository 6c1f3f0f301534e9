"""Every loss and its derivative against the formula written out in float64 for autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.errors import UserError
from lorry_workers.engine.losses import LOSSES, SEQUENCE, SEQUENCE_COUNT, find_loss

LENGTHS = [1, 7, 30, 2, 13]
CONFIGS = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}],
    "cispo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}],
    "dro": [{}, {"beta": 0.7}, {"beta": 0.0}],
    "gspo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2}],
}
DEFAULTS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (1 - 3e-4, 1 + 4e-4)}


def reference(name: str, x, inputs, config):
    """One sequence's losses, as the documentation of each writes them."""
    if name == "cross_entropy":
        return -inputs["weights"] * x
    q, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = torch.exp(x - q)
    low, high = DEFAULTS.get(name, (0.0, 0.0))
    low, high = config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "ppo":
        return -torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
    if name == "cispo":
        return -torch.clamp(ratio, low, high).detach() * x * advantages
    if name == "dro":
        return -(x * advantages - 0.5 * config.get("beta", 0.05) * (x - q) ** 2)
    mask = inputs["sequence_ratio_mask"]
    log_s = (mask * (x.detach() - q)).sum() / mask.sum() if mask.sum() else torch.zeros(())
    r = torch.exp(log_s + x - x.detach())
    return -torch.min(r * advantages, torch.clamp(r, low, high) * advantages)


def sequences(spread: float, seed: int):
    """Ragged sequences whose log-probabilities differ from the sampling ones by about `spread`."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for length in LENGTHS:
        q = -torch.rand(length, generator=random, dtype=torch.float64) * 10
        x = q + spread * torch.randn(length, generator=random, dtype=torch.float64)
        advantages = torch.randn(length, generator=random, dtype=torch.float64)
        weights = torch.rand(length, generator=random, dtype=torch.float64)
        mask = (torch.rand(length, generator=random, dtype=torch.float64) < 0.6).double()
        for values in (advantages, weights, mask):
            values[: length // 4] = 0  # a prompt
        inputs = {"logprobs": q, "advantages": advantages, "weights": weights, "sequence_ratio_mask": mask}
        made.append((x, inputs))
    made[-1][1]["sequence_ratio_mask"][:] = 0
    return made


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.3, 30.0])
@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_and_derivatives(name, spread):
    for number, config in enumerate(CONFIGS[name]):
        loss = find_loss(name, config)
        made = sequences(spread, seed=number)
        x = torch.cat([x for x, _ in made])[:, None].requires_grad_()
        inputs = {key: torch.cat([i[key] for _, i in made])[:, None] for key in made[0][1]}
        expected = torch.cat(
            [reference(name, part[:, 0], i, config) for part, (_, i) in zip(x.split(LENGTHS), made, strict=True)]
        )
        (slope,) = torch.autograd.grad(expected.sum(), x)

        inputs[SEQUENCE] = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[:, None]
        inputs[SEQUENCE_COUNT] = torch.tensor(len(LENGTHS))
        losses, coefficients = loss.terms(x.detach(), inputs, loss.config)
        torch.testing.assert_close(losses[:, 0], expected.detach())
        # At spread 0 a ratio lies on no threshold, but both terms of a minimum are equal, where the derivative
        # is any between theirs: autograd takes the mean, of two equal ones.
        torch.testing.assert_close(coefficients, slope)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cispo", "gspo"}))
def test_the_derivative_is_that_of_the_loss_itself(name):
    """gradcheck: losses as functions of x. (cispo and gspo hold a part of theirs constant.)"""
    loss = LOSSES[name]
    x = torch.tensor([-0.5, -1.9, -3.0], dtype=torch.float64)
    inputs = {
        "weights": torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
        "logprobs": torch.tensor([-0.55, -0.4, -3.4], dtype=torch.float64),
        "advantages": torch.tensor([1.3, -0.7, 0.4], dtype=torch.float64),
    }

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            losses, ctx.coefficients = loss.terms(x, inputs, loss.config)
            return losses

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.coefficients

    assert torch.autograd.gradcheck(Function.apply, x.requires_grad_())


@pytest.mark.parametrize("name", list(LOSSES))
def test_extreme_log_probabilities_with_no_say_give_no_nan(name):
    """An impossible target (-inf), or a ratio beyond float32, at positions that do not count."""
    x = torch.tensor([[-float("inf")], [-1.0], [-1e30]])
    inputs = {
        "weights": torch.tensor([[1e-3], [1.0], [1.0]]),
        "logprobs": torch.tensor([[-2.0], [-1.0], [-3.0]]),
        "advantages": torch.tensor([[0.0], [1.0], [0.5]]),
        "sequence_ratio_mask": torch.tensor([[0.0], [1.0], [0.0]]),
        SEQUENCE: torch.zeros(3, 1, dtype=torch.long),
        SEQUENCE_COUNT: torch.tensor(1),
    }
    loss = LOSSES[name]
    losses, coefficients = loss.terms(x, inputs, loss.config)
    assert not losses[1:].isnan().any()
    assert not coefficients[1:].isnan().any()


def test_active_positions_are_all_that_have_a_derivative():
    for name, loss in LOSSES.items():
        for spread in (0.0, 0.5):
            for x, inputs in sequences(spread, seed=3):
                rows = {key: value[:, None] for key, value in inputs.items()}
                rows |= {SEQUENCE: torch.zeros(len(x), 1, dtype=torch.long), SEQUENCE_COUNT: torch.tensor(1)}
                _, coefficients = loss.terms(x[:, None], rows, loss.config)
                active = loss.active({key: value.numpy() for key, value in inputs.items()})
                assert not (coefficients[:, 0].numpy() != 0)[~active].any(), name
                assert active.dtype == np.bool_


@pytest.mark.parametrize("name", list(LOSSES))
def test_unknown_options_are_refused(name):
    with pytest.raises(UserError, match=f"{name} has no option 'kl_coeff'"):
        find_loss(name, {"kl_coeff": 0.1})
