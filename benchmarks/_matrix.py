"""How fast this machine multiplies matrices, and how much of that a training loop makes use of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def matrix_rate(
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    size: int = 2048,
    times: int = 3,
    product: Callable[[Tensor, Tensor], Tensor] = torch.mm,
) -> float:
    """Floating-point operations per second of a product of two square matrices; the best of a few."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product(left, right)
    best = float("inf")
    for _ in range(times):
        synchronize(device)
        started = time.perf_counter()
        product(left, right)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def product_parameters(model: Any) -> int:
    """The parameters of a base model that each token is multiplied with: all but an embedding table of its own."""
    total = sum(p.numel() for p in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is head else total - embedding.numel()


def base_flops(parameters: int, tokens: int) -> int:
    """Of a forward and backward pass over a frozen base: 2 per parameter and token forward, 2 for the gradient of
    the input, none for that of the weights."""
    return 4 * parameters * tokens


def adapter_flops(parameters: int, tokens: int) -> int:
    """Of an adapter, which is trained: 2 forward, 2 for the gradient of the input, 2 for that of the weights."""
    return 6 * parameters * tokens


def utilisation(flops: float, seconds: float, rate: float) -> float:
    """The share of the time that the products would take at the matrix rate (model FLOP utilisation)."""
    return flops / seconds / rate


def synchronize(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
