"""The head's gradients against autograd in float64, and that it never holds all logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorry_workers.engine.head import Head, LowRank

N, HIDDEN, VOCAB, RANK = 37, 16, 101, 3


def make_low_rank(start: int, stop: int, rank: int, scaling: float) -> LowRank:
    a = torch.randn(rank, HIDDEN, dtype=torch.float64)
    b = torch.randn(VOCAB, rank, dtype=torch.float64)
    return LowRank(start, stop, a, b, scaling, torch.zeros_like(a), torch.zeros_like(b))


def make(chunk_rows: int, bias: bool = False, tile: int | None = None):
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=torch.float64).requires_grad_(False)
    return linear, Head(linear, "lm_head", chunk_elements=chunk_rows * VOCAB, tile=tile)


def quadratic(logprobs, weights):
    """A loss whose derivative depends on the log-probability."""
    return weights * logprobs**2, 2 * weights * logprobs


@pytest.mark.parametrize("chunk_rows", [1, 7, 37, 1000])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("adapters", [0, 1, 3])
@pytest.mark.parametrize("tile", [None, 10])
def test_gradients_are_those_of_autograd(chunk_rows, columns, adapters, tile):
    linear, head = make(chunk_rows, bias=columns == 4, tile=tile)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (N, columns))
    weights = torch.randn(N, columns, dtype=torch.float64)
    weights[5:20] = 0  # whole chunks and parts of chunks without a gradient
    active = (weights != 0).any(1).numpy()
    # The positions 9 to 14 have no adapter; the second of three lies within the part without a gradient.
    spans = {0: [], 1: [(0, N)], 3: [(0, 9), (14, 16), (16, N)]}[adapters]
    low_ranks = [make_low_rank(*span, RANK + i, 1.7 + i) for i, span in enumerate(spans)]

    result = head.backward(hidden.detach(), targets, lambda x, rows: quadratic(x, weights[rows]), low_ranks, active)

    logits = linear(hidden)
    pairs = [(low.a.clone().requires_grad_(), low.b.clone().requires_grad_()) for low in low_ranks]
    for low, (a, b) in zip(low_ranks, pairs, strict=True):
        added = torch.zeros(N, VOCAB, dtype=torch.float64)
        added[low.start : low.stop] = low.scaling * hidden[low.start : low.stop] @ a.t() @ b.t()
        logits = logits + added
    logprobs = torch.log_softmax(logits, -1).gather(1, targets)
    losses, _ = quadratic(logprobs, weights)
    losses.sum().backward()
    torch.testing.assert_close(result.logprobs, logprobs.detach())
    torch.testing.assert_close(result.losses, losses.detach())
    torch.testing.assert_close(result.hidden, hidden.grad)
    torch.testing.assert_close(head.score(hidden, targets, low_ranks), logprobs.detach())
    torch.testing.assert_close(head.score(hidden, targets, low_ranks, slice(11, 30)), logprobs.detach()[11:30])
    for low, (a, b) in zip(low_ranks, pairs, strict=True):
        torch.testing.assert_close(low.grad_a, a.grad)
        torch.testing.assert_close(low.grad_b, b.grad)


def test_no_gradient_where_no_coefficient():
    _, head = make(8)
    hidden, targets = torch.randn(N, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (N, 1))
    none = np.zeros(N, bool)
    result = head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.zeros_like(x)), [], none)
    assert result.hidden is None


class Sizes(TorchDispatchMode):
    largest = 0
    vocabulary_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            # Not the transposed view of the weight: only what has memory of its own.
            if not result._is_view():
                self.largest = max(self.largest, result.numel())
            if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm_.default):
                self.vocabulary_products += any(VOCAB in factor.shape for factor in args)
        return result


def test_no_tensor_of_tokens_times_vocabulary_and_two_products_per_token():
    _, head = make(4)
    hidden, targets = torch.randn(200, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (200, 1))
    with Sizes() as sizes:
        head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.ones_like(x)))
    assert sizes.largest <= max(4 * VOCAB, 200 * HIDDEN)
    assert sizes.vocabulary_products == 2 * 200 / 4
    none = np.zeros(200, bool)
    with Sizes() as sizes:
        head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.zeros_like(x)), [], none)
    assert sizes.vocabulary_products == 200 / 4


def test_top_tokens():
    linear, head = make(5)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float64)
    top = head.top(hidden, 3)
    expected = torch.log_softmax(linear(hidden), -1).topk(3)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.logprobs, expected.values)


def test_logits_are_float32_under_bfloat16():
    linear = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    head = Head(linear, "lm_head")
    assert head.logits(torch.randn(2, HIDDEN, dtype=torch.bfloat16)).dtype == torch.float32
