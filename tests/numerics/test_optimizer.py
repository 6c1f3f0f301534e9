"""AdamW and clipping against torch's own."""

from __future__ import annotations

import pytest
import torch

from lorry_jobs.types import AdamParams
from lorry_workers.engine.optimizer import AdamState, adamw_step, grad_norms, take_steps
from tests.new_tensors import NewTensors


def test_fifty_steps_of_two_jobs_with_changing_parameters_equal_torch():
    torch.manual_seed(0)
    ours = [torch.randn(501), torch.randn(77)]
    theirs = [torch.nn.Parameter(p.clone()) for p in ours]
    states = [AdamState.zeros_like(p) for p in ours]
    optimizers = [torch.optim.AdamW([p]) for p in theirs]
    for step in range(50):
        hyper = [
            AdamParams(learning_rate=1e-2 / (step + 1), weight_decay=0.1, grad_clip_norm=0.5 * (step % 2), eps=1e-8),
            AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.99, grad_clip_norm=20.0),
        ]
        gradients = [torch.randn_like(p) for p in ours]
        for parameter, gradient, params, optimizer in zip(theirs, gradients, hyper, optimizers, strict=True):
            parameter.grad = gradient.clone()
            if params.grad_clip_norm:
                torch.nn.utils.clip_grad_norm_([parameter], params.grad_clip_norm)
            optimizer.param_groups[0].update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
            optimizer.step()
        norms = grad_norms(gradients)
        assert norms == pytest.approx([g.norm().item() for g in gradients])
        adamw_step(ours, gradients, states, hyper, norms)
    for mine, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, parameter.data, rtol=1e-6, atol=1e-6)
    assert [state.step for state in states] == [50, 50]


def test_a_gradient_that_was_always_zero_changes_nothing_even_without_eps():
    flat = torch.ones(4)
    gradient = torch.tensor([0.0, 0.0, 1.0, -1.0])
    adamw_step([flat], [gradient], [AdamState.zeros_like(flat)], [AdamParams(eps=0, learning_rate=0.1)], [1.0])
    torch.testing.assert_close(flat, torch.tensor([1.0, 1.0, 0.9, 1.1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_is_refused_alone(value):
    torch.manual_seed(1)
    jobs = [torch.randn(5), torch.randn(9), torch.randn(3)]
    expected = [p.clone() for p in jobs]
    states, theirs = ([AdamState.zeros_like(p) for p in jobs] for _ in range(2))
    gradients = [torch.randn_like(p) for p in jobs]
    hyper = [AdamParams(grad_clip_norm=1.0), AdamParams(grad_clip_norm=1.0), AdamParams(weight_decay=0.5)]
    good = [0, 2]
    adamw_step(
        [expected[i] for i in good],
        [gradients[i].clone() for i in good],
        [theirs[i] for i in good],
        [hyper[i] for i in good],
        grad_norms([gradients[i] for i in good]),
    )
    gradients[1][4] = value
    steps = take_steps(jobs, gradients, states, hyper)
    assert [step.refused is None for step in steps] == [True, False, True]
    assert "the gradient's norm is" in steps[1].refused
    for i in range(3):
        assert torch.equal(jobs[i], expected[i])
        assert torch.equal(states[i].exp_avg_sq, theirs[i].exp_avg_sq)
    assert [state.step for state in states] == [1, 0, 1]
    assert take_steps([], [], [], []) == []


def test_every_parameter_may_change_at_every_step():
    random = torch.Generator().manual_seed(2)
    mine = torch.randn(301, generator=random)
    theirs = torch.nn.Parameter(mine.clone())
    state, optimizer = AdamState.zeros_like(mine), torch.optim.AdamW([theirs])
    for step in range(50):
        a, b, c, d, e, f = torch.rand(6, generator=random, dtype=torch.float64).tolist()
        params = AdamParams(
            learning_rate=0.01 * a,
            beta1=0.95 * b,
            beta2=0.9 + 0.0999 * c,
            eps=10 ** (-9 + 5 * d),
            weight_decay=0.3 * e,
            grad_clip_norm=30 * f if step % 3 else 0.0,  # the norm is about 17
        )
        theirs.grad = torch.randn(301, generator=random)
        [taken] = take_steps([mine], [theirs.grad.clone()], [state], [params])
        norm = torch.nn.utils.clip_grad_norm_([theirs], params.grad_clip_norm or float("inf"))
        optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        optimizer.step()
        assert taken.grad_norm == pytest.approx(norm.item())
        torch.testing.assert_close(mine, theirs.data, rtol=1e-6, atol=1e-6)


class NoRoom(NewTensors):
    """A device without memory for anything larger than a few numbers."""

    def made(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() > 64:
            raise torch.OutOfMemoryError(f"no room for {storage.nbytes()} bytes")


def test_a_step_that_does_not_fit_into_memory_changes_nothing():
    torch.manual_seed(0)
    parameters, gradients = [torch.randn(501), torch.randn(77)], [torch.randn(501), torch.randn(77)]
    states = [AdamState.zeros_like(p) for p in parameters]
    hyper = [AdamParams(learning_rate=0.1, weight_decay=0.1, grad_clip_norm=1.0)] * 2
    take_steps(parameters, [g.clone() for g in gradients], states, hyper)  # moments that are not 0
    before = [t.clone() for t in (*parameters, *(s.exp_avg for s in states), *(s.exp_avg_sq for s in states))]
    with pytest.raises(torch.OutOfMemoryError), NoRoom():
        take_steps(parameters, gradients, states, hyper)
    after = (*parameters, *(s.exp_avg for s in states), *(s.exp_avg_sq for s in states))
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert [state.step for state in states] == [1, 1]
