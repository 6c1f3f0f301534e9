"""The head's gradients against autograd in float64, and that it never holds all logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lorry_workers.engine.head import Head

N, HIDDEN, VOCAB, RANK = 37, 16, 101, 3


class Pairs:
    """What the head needs of an adapter, in float64."""

    def __init__(self):
        self.scaling = 1.7
        self.pairs = {
            "lm_head": (
                nn.Parameter(torch.randn(RANK, HIDDEN, dtype=torch.float64)),
                nn.Parameter(torch.randn(VOCAB, RANK, dtype=torch.float64)),
            )
        }


def make(chunk_rows: int, bias: bool = False):
    torch.manual_seed(0)
    linear = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=torch.float64).requires_grad_(False)
    return linear, Head(linear, "lm_head", chunk_elements=chunk_rows * VOCAB)


def quadratic(logprobs, weights):
    """A loss whose derivative depends on the log-probability."""
    return weights * logprobs**2, 2 * weights * logprobs


@pytest.mark.parametrize("chunk_rows", [1, 7, 37, 1000])
@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize("with_adapter", [True, False])
def test_gradients_are_those_of_autograd(chunk_rows, columns, with_adapter):
    linear, head = make(chunk_rows, bias=columns == 4)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCAB, (N, columns))
    weights = torch.randn(N, columns, dtype=torch.float64)
    weights[5:20] = 0  # whole chunks and parts of chunks without a gradient
    adapter = Pairs() if with_adapter else None

    result = head.backward(hidden.detach(), targets, lambda x, rows: quadratic(x, weights[rows]), adapter)

    logits = linear(hidden)
    if adapter is not None:
        a, b = (p.detach().clone().requires_grad_() for p in adapter.pairs["lm_head"])
        logits = logits + adapter.scaling * hidden @ a.t() @ b.t()
    logprobs = torch.log_softmax(logits, -1).gather(1, targets)
    losses, _ = quadratic(logprobs, weights)
    losses.sum().backward()
    torch.testing.assert_close(result.logprobs, logprobs.detach())
    torch.testing.assert_close(result.losses, losses.detach())
    torch.testing.assert_close(result.hidden, hidden.grad)
    torch.testing.assert_close(head.score(hidden, targets, adapter), logprobs.detach())
    if adapter is not None:
        torch.testing.assert_close(adapter.pairs["lm_head"][0].grad, a.grad)
        torch.testing.assert_close(adapter.pairs["lm_head"][1].grad, b.grad)


def test_no_gradient_where_no_coefficient():
    _, head = make(8)
    hidden, targets = torch.randn(N, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (N, 1))
    result = head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.zeros_like(x)), None)
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
            if func is torch.ops.aten.mm.default:
                self.vocabulary_products += VOCAB in args[0].shape or VOCAB in args[1].shape
        return result


def test_no_tensor_of_tokens_times_vocabulary_and_two_products_per_token():
    _, head = make(4)
    hidden, targets = torch.randn(200, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (200, 1))
    with Sizes() as sizes:
        head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.ones_like(x)), None)
    assert sizes.largest <= max(4 * VOCAB, 200 * HIDDEN)
    assert sizes.vocabulary_products == 2 * 200 / 4
    with Sizes() as sizes:
        head.backward(hidden, targets, lambda x, rows: quadratic(x, torch.zeros_like(x)), None)
    assert sizes.vocabulary_products == 200 / 4


def test_top_tokens():
    linear, head = make(5)
    hidden = torch.randn(N, HIDDEN, dtype=torch.float64)
    top = head.top(hidden, 3, None)
    expected = torch.log_softmax(linear(hidden), -1).topk(3)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.logprobs, expected.values)


def test_logits_are_float32_under_bfloat16():
    linear = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    head = Head(linear, "lm_head")
    assert head.logits(torch.randn(2, HIDDEN, dtype=torch.bfloat16), None).dtype == torch.float32
