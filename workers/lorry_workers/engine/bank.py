"""The adapters of one pass, laid out for it: copies of A and B in the base's dtype, and room for gradients.

A pass over several jobs multiplies with all their adapters at once, so their matrices lie together: per group of
layers that read the same input, [A_q; A_k; A_v] of an adapter is one matrix, and where the adapters have equal
ranks and targets, those of all adapters are one tensor. B carries the adapter's scaling.

Gradients stay here until `add_gradients`: a pass that fails halfway leaves the jobs' own as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .adapter import Adapter


class Segment(NamedTuple):
    """The tokens start:stop of a pass run through adapter number `slot` of the bank. `stop` None: all."""

    slot: int
    start: int
    stop: int | None

    @property
    def length(self) -> int | None:
        return None if self.stop is None else self.stop - self.start


@dataclass(frozen=True)
class Matrices:
    """A and B of a group's layers: A (R, in) of all of them, R = Σ r; B (out, r) by the layer's index, and which
    of the R ranks are its own. Gradients, float32, have the same shapes. With several adapters stacked, all have
    one more dimension in front."""

    a: Tensor
    b: dict[int, Tensor]
    ranks: dict[int, slice]
    grad_a: Tensor | None
    grad_b: dict[int, Tensor]

    def members(self) -> Iterator[tuple[int, slice, Tensor]]:
        """(index of the layer in its group, its ranks, its B)"""
        return ((m, self.ranks[m], b) for m, b in self.b.items())

    def __getitem__(self, slot: int) -> Matrices:
        """One adapter's part of stacked matrices."""
        return Matrices(
            self.a[slot],
            {m: b[slot] for m, b in self.b.items()},
            self.ranks,
            None if self.grad_a is None else self.grad_a[slot],
            {m: grad[slot] for m, grad in self.grad_b.items()},
        )


@dataclass(frozen=True)
class Factors:
    """A group's matrices: of each adapter (None: it trains none of these layers), and stacked if they are alike."""

    of: list[Matrices | None]
    stacked: Matrices | None


class Bank:
    """`factors` by the paths of a group's layers; groups that no adapter trains are not in it."""

    def __init__(
        self,
        adapters: Sequence[Adapter],
        groups: Sequence[Sequence[str]],
        dtype: torch.dtype,
        *,
        gradients: bool,
    ) -> None:
        self.adapters = tuple(adapters)
        self.segments: tuple[Segment, ...] = ()
        self.factors: dict[tuple[str, ...], Factors] = {}
        self._gradients: list[Tensor] = []
        # Per adapter: the bank's views of its A and B, and of their gradients.
        self._copies = [_Copies() for _ in adapters]
        alike = len({_shape(adapter) for adapter in adapters}) == 1
        for group in groups:
            if alike:
                stacked = self._matrices(adapters[0], group, (len(adapters),), dtype, gradients)
                if stacked is None:
                    continue
                of = [stacked[slot] for slot in range(len(adapters))]
            else:
                stacked = None
                of = [self._matrices(adapter, group, (), dtype, gradients) for adapter in adapters]
                if not any(of):
                    continue
            self.factors[tuple(group)] = Factors(of, stacked)
            for copies, adapter, matrices in zip(self._copies, adapters, of, strict=True):
                if matrices is not None:
                    copies.add(adapter, group, matrices)
        self.load()

    def _matrices(
        self, adapter: Adapter, group: Sequence[str], front: tuple[int, ...], dtype: torch.dtype, gradients: bool
    ) -> Matrices | None:
        pairs = {m: adapter.pairs[path] for m, path in enumerate(group) if path in adapter.pairs}
        if not pairs:
            return None
        ranks, start = {}, 0
        for m, (a, _) in pairs.items():
            ranks[m] = slice(start, start + a.shape[0])
            start += a.shape[0]
        device, width = adapter.flat.device, next(iter(pairs.values()))[0].shape[1]
        grad_a, grad_b = None, {}
        if gradients:
            grad_a = torch.zeros(*front, start, width, device=device)
            grad_b = {m: torch.zeros(*front, *b.shape, device=device) for m, (_, b) in pairs.items()}
            self._gradients += [grad_a, *grad_b.values()]
        return Matrices(
            torch.empty(*front, start, width, device=device, dtype=dtype),
            {m: torch.empty(*front, *b.shape, device=device, dtype=dtype) for m, (_, b) in pairs.items()},
            ranks,
            grad_a,
            grad_b,
        )

    @torch.no_grad()
    def load(self) -> None:
        """Take the adapters' present values."""
        for adapter, copies in zip(self.adapters, self._copies, strict=True):
            if copies.a:
                torch._foreach_copy_(copies.a, copies.of_a)
                torch._foreach_copy_(copies.b, copies.of_b)
                torch._foreach_mul_(copies.b, adapter.scaling)

    def zero_gradients(self) -> None:
        if self._gradients:
            torch._foreach_zero_(self._gradients)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add what the pass gave to the gradients of the jobs' own adapters."""
        for adapter, copies in zip(self.adapters, self._copies, strict=True):
            if copies.a:
                adapter.require_gradients()
                torch._foreach_add_([a.grad for a in copies.of_a], copies.grad_a)
                torch._foreach_add_([b.grad for b in copies.of_b], copies.grad_b, alpha=adapter.scaling)


class _Copies:
    """The A and B of one adapter beside the bank's views of them, in the same order."""

    def __init__(self) -> None:
        self.of_a: list[Tensor] = []
        self.of_b: list[Tensor] = []
        self.a: list[Tensor] = []
        self.b: list[Tensor] = []
        self.grad_a: list[Tensor] = []
        self.grad_b: list[Tensor] = []

    def add(self, adapter: Adapter, group: Sequence[str], matrices: Matrices) -> None:
        for m, ranks, b in matrices.members():
            a_of, b_of = adapter.pairs[group[m]]
            self.of_a.append(a_of)
            self.of_b.append(b_of)
            self.a.append(matrices.a[ranks])
            self.b.append(b)
            if matrices.grad_a is not None:
                self.grad_a.append(matrices.grad_a[ranks])
                self.grad_b.append(matrices.grad_b[m])


def _shape(adapter: Adapter) -> tuple[object, ...]:
    return adapter.rank, *adapter.pairs
