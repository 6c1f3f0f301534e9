"""Products with frozen weights against float64, by oneDNN and without it."""

from __future__ import annotations

import pytest
import torch

from lorry_workers.engine import products
from lorry_workers.engine.products import FrozenLinear, add_linear, linear

N, IN, OUT = 37, 53, 29


@pytest.fixture(params=["as it is", "without oneDNN"], autouse=True)
def library(request, monkeypatch):
    torch.manual_seed(0)
    if request.param == "without oneDNN":
        monkeypatch.setattr(products, "_linear_pointwise", lambda: None)


def layouts(rows: int, columns: int) -> dict[str, torch.Tensor]:
    wide = torch.randn(rows + 5, columns + 7)
    return {
        "plain": torch.randn(rows, columns),
        "transposed": torch.randn(columns, rows).t(),
        "part": wide[2 : rows + 2, 3 : columns + 3],
        "constant": torch.ones(1).expand(rows, columns),
    }


@pytest.mark.parametrize("weight", layouts(1, 1))
@pytest.mark.parametrize("x", layouts(1, 1))
def test_the_products_are_exact_whatever_the_layout(x, weight):
    x, weight = layouts(N, IN)[x], layouts(OUT, IN)[weight]
    bias, into = torch.randn(OUT), torch.randn(N, OUT)
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(linear(x, weight).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(x, weight, bias).double(), exact + bias.double(), rtol=1e-5, atol=1e-5)
    expected = into.double() + exact
    torch.testing.assert_close(add_linear(into, x, weight).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_what_they_are(dtype):
    x, weight = torch.randn(N, IN, dtype=dtype), torch.randn(OUT, IN, dtype=dtype)
    assert linear(x, weight).dtype == dtype
    torch.testing.assert_close(linear(x, weight), x @ weight.t())
    torch.testing.assert_close(add_linear(torch.zeros(N, OUT, dtype=dtype), x, weight), x @ weight.t())


def test_no_rows_give_no_rows():
    assert linear(torch.empty(0, IN), torch.randn(OUT, IN)).shape == (0, OUT)


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_the_input(bias):
    x, weight = torch.randn(N, IN, requires_grad=True), torch.randn(OUT, IN)
    y = FrozenLinear.apply(x, weight, torch.randn(OUT) if bias else None)
    gradient = torch.randn(OUT, N).t()
    y.backward(gradient)
    torch.testing.assert_close(x.grad.double(), gradient.double() @ weight.double(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def untried(library, monkeypatch):
    """As in a process that has not tried oneDNN yet."""
    monkeypatch.undo()
    products._linear_pointwise.cache_clear()
    yield
    products._linear_pointwise.cache_clear()


def test_the_random_numbers_of_others_are_left_alone(untried):
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    linear(torch.ones(2, 2), torch.ones(2, 2))
    assert torch.equal(torch.randn(3), expected)


def test_an_operator_that_gives_something_else_is_not_used(untried, monkeypatch, caplog):
    wrong = lambda x, weight, *options: torch.zeros(len(x), len(weight))  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", wrong)
    x, weight = torch.randn(N, IN), torch.randn(OUT, IN)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert "oneDNN cannot be called" in caplog.text
