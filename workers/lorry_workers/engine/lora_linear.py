"""The linear layer that adds whichever adapters are active to a frozen base weight.

Installed once over every layer that an adapter may target. Which adapters are active is told to all layers
at once, through one `ActiveAdapters` that they share; adding or removing an adapter touches no module.
The output layer is not among them: `head` applies its adapter chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapter import ATTENTION, MLP, Adapter


class Segment(NamedTuple):
    """The batch rows start:stop, and the adapter they run through (None: the base model alone)."""

    adapter: Adapter | None
    start: int
    stop: int


class ActiveAdapters:
    """Which adapter each row of the running batch uses.

    The segments lie in row order and cover the batch. A single segment is the whole batch, whatever its
    size. No segments: the base model alone.
    """

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()

    @contextmanager
    def use(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Inside, forward passes use `segments`. A backward pass that recomputes activations must be
        inside as well."""
        before = self.segments
        self.segments = tuple(segments)
        try:
            yield
        finally:
            self.segments = before

    def use_one(self, adapter: Adapter | None) -> AbstractContextManager[None]:
        """Every row through `adapter`."""
        return self.use([Segment(adapter, 0, 0)] if adapter is not None else [])


class LoraLinear(nn.Module):
    """y = W·x + bias, and for the rows of an active adapter + scaling · B·(A·x).

    The weight keeps the name it had (`<path>.weight`), and is the same tensor. Under a half-precision base
    model the low-rank product runs in the base's dtype on a rounded copy of A and B; the parameters and
    their gradients stay float32.
    """

    def __init__(self, base: nn.Linear, path: str, active: ActiveAdapters) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.path = path
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        segments = self.active.segments
        if not segments:
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])  # (batch, length, in) -> (batch·length, in)
        y = F.linear(rows, self.weight, self.bias)
        if len(segments) == 1:
            y = self._add(segments[0].adapter, rows, y)
        else:
            length = len(rows) // len(x)
            sizes = [(stop - start) * length for _, start, stop in segments]
            parts = zip(segments, rows.split(sizes), y.split(sizes), strict=True)
            y = torch.cat([self._add(segment.adapter, *part) for segment, *part in parts])
        return y.view(*x.shape[:-1], -1)  # (batch, length, out)

    def _add(self, adapter: Adapter | None, rows: Tensor, y: Tensor) -> Tensor:
        """y (n, out) + scaling · (rows·Aᵀ)·Bᵀ, with the sum and the scaling inside the second product.

        A y that is no view of another tensor is overwritten, which saves a copy.
        """
        pair = adapter.pairs.get(self.path) if adapter is not None else None
        if pair is None:
            return y
        a, b = pair
        if a.dtype != rows.dtype:
            a, b = a.to(rows.dtype), b.to(rows.dtype)
        low_rank = F.linear(rows, a)  # (n, r)
        if y._is_view():
            return torch.addmm(y, low_rank, b.t(), alpha=adapter.scaling)
        return y.addmm_(low_rank, b.t(), alpha=adapter.scaling)

    def extra_repr(self) -> str:
        return f"{self.path}, in={self.weight.shape[1]}, out={self.weight.shape[0]}"


def install_lora_linears(model: nn.Module, active: ActiveAdapters) -> None:
    """Replace every attention and MLP projection of `model` by a `LoraLinear` around the same weight."""
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        if name in (*ATTENTION, *MLP) and isinstance(module, nn.Linear):
            setattr(model.get_submodule(parent), name, LoraLinear(module, path, active))
