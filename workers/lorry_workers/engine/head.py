"""From the last hidden states to token log-probabilities, and back, without holding the logits.

With z = W·h + scaling·B·(A·h) and x_k = z[t_k] - logsumexp(z) for the targets t_k of a position, a loss
with derivatives c_k = d loss / d x_k has

    G = d loss / d z = Σ_k c_k·onehot(t_k) - (Σ_k c_k)·softmax(z)
    d loss / d h = Wᵀ·G + scaling·Aᵀ·(Bᵀ·G)

so one pass over a chunk of positions gives its log-probabilities and its gradients: two products with the
vocabulary matrix per token, and at most `chunk_elements` logits at a time. Positions that are known to have no
gradient take no part in the second product.

Positions of several adapters may follow one another; each `LowRank` says which are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from .adapter import Adapter

TermsOfRows = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probabilities (c, K), rows) -> (losses (c, K), coefficients (c, K)) of the chunk `rows`."""


@dataclass(frozen=True)
class LowRank:
    """The A (r, H) and B (V, r) of the positions start:stop. What they give is added to their gradients."""

    start: int
    stop: int
    a: Tensor
    b: Tensor
    scaling: float
    grad_a: Tensor | None = None
    grad_b: Tensor | None = None

    def within(self, rows: slice) -> slice | None:
        """Where its positions are in the chunk `rows`, counted from the chunk's first; None: nowhere."""
        start, stop = max(self.start, rows.start), min(self.stop, rows.stop)
        return slice(start - rows.start, stop - rows.start) if start < stop else None


@dataclass(frozen=True)
class HeadGradient:
    """What a pass gives for n positions with K targets each. `hidden` is None if no position was active."""

    logprobs: Tensor  # (n, K)
    losses: Tensor  # (n, K)
    hidden: Tensor | None  # (n, H)


@dataclass(frozen=True)
class TopTokens:
    """The k most likely tokens of n positions."""

    ids: Tensor  # (n, k)
    logprobs: Tensor  # (n, k)


class Head:
    """The output layer. `path` is its name in the base model, under which adapters hold its A and B."""

    def __init__(self, linear: nn.Linear, path: str, chunk_elements: int = 2**24) -> None:
        self.weight = linear.weight  # (V, H)
        self.bias = linear.bias
        self.path = path
        self.chunk_rows = max(1, chunk_elements // linear.weight.shape[0])

    def everywhere(self, adapter: Adapter | None) -> list[LowRank]:
        """All positions through `adapter`."""
        pair = adapter.pairs.get(self.path) if adapter is not None else None
        return [LowRank(0, sys.maxsize, *pair, adapter.scaling)] if pair is not None else []

    def logits(self, hidden: Tensor, low_ranks: Sequence[LowRank] = ()) -> Tensor:
        """(c, H) -> (c, V), at least float32 whatever the base's dtype."""
        return self._logits(hidden, slice(0, len(hidden)), low_ranks)

    @torch.no_grad()
    def score(
        self, hidden: Tensor, targets: Tensor, low_ranks: Sequence[LowRank] = (), rows: slice = slice(None)
    ) -> Tensor:
        """Log-probabilities (n, K) of `targets` (N, K) after the states `hidden` (N, H); n of them with `rows`."""
        found = [self._log_softmax(hidden[c], c, low_ranks).gather(1, targets[c]) for c in self._chunks(hidden, rows)]
        return torch.cat(found)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int, low_ranks: Sequence[LowRank] = ()) -> TopTokens:
        """The k most likely next tokens after each of the states `hidden` (n, H)."""
        found = [self._log_softmax(hidden[rows], rows, low_ranks).topk(k) for rows in self._chunks(hidden)]
        return TopTokens(torch.cat([ids for _, ids in found]), torch.cat([values for values, _ in found]))

    @torch.no_grad()
    def backward(
        self,
        hidden: Tensor,
        targets: Tensor,
        terms: TermsOfRows,
        low_ranks: Sequence[LowRank] = (),
        active: NDArray[np.bool_] | None = None,
    ) -> HeadGradient:
        """Log-probabilities, losses, and d loss / d hidden; adds to the gradients of every A and B.

        `active` (n,) says at which positions a coefficient may differ from 0 (None: at all). It lies on the
        host, so that nothing waits for the device.
        """
        n, k = targets.shape
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, losses = hidden.new_empty((2, n, k), dtype=dtype)
        gradient: Tensor | None = None
        for rows in self._chunks(hidden):
            h, t = hidden[rows], targets[rows]
            log_p = self._log_softmax(h, rows, low_ranks)  # (c, V)
            logprobs[rows] = log_p.gather(1, t)
            losses[rows], coefficients = terms(logprobs[rows], rows)
            chosen = None if active is None or active[rows].all() else np.flatnonzero(active[rows])
            if chosen is not None and len(chosen) == 0:
                del log_p
                continue
            if gradient is None:
                gradient = torch.zeros_like(hidden)
            if chosen is None:
                places = [(low, low.within(rows)) for low in low_ranks]
                gradient[rows] = self._gradient(h, t, log_p, coefficients, places)
            else:
                index = torch.from_numpy(chosen).to(hidden.device, non_blocking=True)
                places = [(low, _among(chosen, low.within(rows))) for low in low_ranks]
                part = self._gradient(h[index], t[index], log_p[index], coefficients[index], places)
                gradient[rows].index_copy_(0, index, part)
            del log_p  # before the next chunk's are made: they are the largest tensors of a pass
        return HeadGradient(logprobs, losses, gradient)

    def _gradient(
        self, h: Tensor, t: Tensor, log_p: Tensor, c: Tensor, places: Sequence[tuple[LowRank, slice | None]]
    ) -> Tensor:
        """d loss / d h of one chunk. Overwrites `log_p` (c, V)."""
        g = log_p.exp_().mul_(c.sum(1, keepdim=True).neg_())
        g.scatter_add_(1, t, c.to(g.dtype))  # G, (c, V)
        gradient = _wide(g.to(self.weight.dtype), self.weight.t())
        for low, place in places:
            if place is None:
                continue
            own, states = g[place], h[place].to(low.a.dtype)
            g_b = own @ low.b  # (p, r)
            gradient[place].addmm_(g_b, low.a, alpha=low.scaling)
            if low.grad_a is not None and low.grad_b is not None:
                low.grad_a.addmm_(g_b.t(), states, alpha=low.scaling)
                low.grad_b.addmm_(own.t(), states @ low.a.t(), alpha=low.scaling)
        return gradient.to(self.weight.dtype)

    def _logits(self, hidden: Tensor, rows: slice, low_ranks: Sequence[LowRank]) -> Tensor:
        logits = _wide(hidden, self.weight)
        if self.bias is not None:
            logits += self.bias
        for low in low_ranks:
            place = low.within(rows)
            if place is not None:
                logits[place].addmm_(hidden[place].to(low.a.dtype) @ low.a.t(), low.b.t(), alpha=low.scaling)
        return logits

    def _log_softmax(self, hidden: Tensor, rows: slice, low_ranks: Sequence[LowRank]) -> Tensor:
        return torch.log_softmax(self._logits(hidden, rows, low_ranks), -1)

    def _chunks(self, hidden: Tensor, rows: slice = slice(None)) -> Iterator[slice]:
        start, stop, _ = rows.indices(len(hidden))
        return (slice(i, min(i + self.chunk_rows, stop)) for i in range(start, stop, self.chunk_rows))


def _among(chosen: NDArray[np.intp], place: slice | None) -> slice | None:
    """Where the positions `place` of a chunk are among those `chosen` from it (ascending); None: nowhere."""
    if place is None:
        return None
    start, stop = np.searchsorted(chosen, [place.start, place.stop]).tolist()
    return slice(start, stop) if start < stop else None


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """x·weightᵀ in at least float32. A half-precision product keeps its float32 sums where the device can."""
    if weight.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x, weight).float()
    return F.linear(x, weight)
