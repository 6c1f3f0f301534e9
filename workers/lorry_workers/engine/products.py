"""Matrix products with frozen weights, by the faster of the libraries that torch brings along.

On a CPU torch gives float32 products to MKL, which keeps to half of the vector width of AMD's processors. oneDNN uses
all of it: twice as fast there, and with less to do before small products, at the same float32 precision. Torch has it
for half precision and for compiled code; the operator here is the one that compiled code calls. It belongs to torch's
insides, so it is tried once, and where it is missing or differs, torch's usual product is used.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (n, in) · weight (out, in)ᵀ + bias (out,) -> (n, out). Without a gradient; weights may be transposed views."""
    if _for_onednn(x):
        return _linear_pointwise()(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def add_linear(into: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """into (n, out) + x (n, in) · weight (out, in)ᵀ; `into` may be changed, and must not be used any more."""
    if _for_onednn(x):
        return _linear_pointwise().binary(x, into, weight, None, "add")
    return into.addmm_(x, weight.t())


class FrozenLinear(torch.autograd.Function):
    """`linear` with the gradient of x, and none of the weight and the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return linear(gradient.contiguous(), ctx.weight.t()), None, None


def _for_onednn(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0 and _linear_pointwise() is not None


@functools.cache
def _linear_pointwise() -> Any | None:
    """torch's own oneDNN operator, if it is there and works."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return None  # without AVX2, which MKL makes up for; on ARM, oneDNN is what torch uses anyway
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        numbers = torch.linspace(-1, 1, 59)
        x, weight, bias = numbers[:35].view(5, 7), numbers[35:56].view(7, 3), numbers[56:]
        expected = torch.addmm(bias, x, weight)
        found = operator(x, weight.t(), bias, "none", [], "")
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(operator.binary(x, found, weight.t(), None, "add"), expected + x @ weight)
    except (AttributeError, RuntimeError, TypeError, AssertionError) as error:
        log.warning("float32 products are slower than they could be: oneDNN cannot be called (%s)", error)
        return None
    return operator
