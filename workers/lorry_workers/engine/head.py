"""From the last hidden states to token log-probabilities, and back, without holding the logits.

With z = W·h + scaling·B·(A·h) and x_k = z[t_k] - logsumexp(z) for the targets t_k of a position, a loss
with derivatives c_k = d loss / d x_k has

    G = d loss / d z = Σ_k c_k·onehot(t_k) - (Σ_k c_k)·softmax(z)
    d loss / d h = Wᵀ·G + scaling·Aᵀ·(Bᵀ·G)

so one pass over a chunk of positions gives its log-probabilities and its gradients: two products with the
vocabulary matrix per token, and at most `chunk_elements` logits at a time. Positions whose coefficients are
all 0 take no part in the second product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapter import Adapter, Pair

TermsOfRows = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probabilities (c, K), rows) -> (losses (c, K), coefficients (c, K)) of the chunk `rows`."""


@dataclass(frozen=True)
class HeadGradient:
    """What a pass gives for n positions with K targets each. `hidden` is None if no coefficient was not 0."""

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

    def logits(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        """(c, H) -> (c, V), at least float32 whatever the base's dtype."""
        logits = _wide(hidden, self.weight)
        if self.bias is not None:
            logits += self.bias
        pair = self._pair(adapter)
        if pair is not None:
            a, b = pair
            logits.addmm_(hidden.to(a.dtype) @ a.t(), b.t(), alpha=adapter.scaling)
        return logits

    @torch.no_grad()
    def score(self, hidden: Tensor, targets: Tensor, adapter: Adapter | None) -> Tensor:
        """Log-probabilities (n, K) of `targets` (n, K) after the states `hidden` (n, H)."""
        return torch.cat(
            [self._log_softmax(hidden[rows], adapter).gather(1, targets[rows]) for rows in self._chunks(hidden)]
        )

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int, adapter: Adapter | None) -> TopTokens:
        """The k most likely next tokens after each of the states `hidden` (n, H)."""
        found = [self._log_softmax(hidden[rows], adapter).topk(k) for rows in self._chunks(hidden)]
        return TopTokens(torch.cat([ids for _, ids in found]), torch.cat([values for values, _ in found]))

    @torch.no_grad()
    def backward(
        self,
        hidden: Tensor,
        targets: Tensor,
        terms: TermsOfRows,
        adapter: Adapter | None,
    ) -> HeadGradient:
        """Log-probabilities, losses, and d loss / d hidden; adds to the gradients of the adapter's A and B."""
        n, k = targets.shape
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, losses = hidden.new_empty((2, n, k), dtype=dtype)
        gradient: Tensor | None = None
        for rows in self._chunks(hidden):
            h, t = hidden[rows], targets[rows]
            log_p = self._log_softmax(h, adapter)  # (c, V)
            logprobs[rows] = log_p.gather(1, t)
            losses[rows], coefficients = terms(logprobs[rows], rows)
            active = (coefficients != 0).any(1)
            count = int(active.sum())
            if count == 0:
                continue
            if gradient is None:
                gradient = torch.zeros_like(hidden)
            if count == len(active):
                gradient[rows] = self._gradient(h, t, log_p, coefficients, adapter)
            else:
                index = active.nonzero().squeeze(1)
                part = self._gradient(h[index], t[index], log_p[index], coefficients[index], adapter)
                gradient[rows].index_copy_(0, index, part)
        return HeadGradient(logprobs, losses, gradient)

    def _gradient(self, h: Tensor, t: Tensor, log_p: Tensor, c: Tensor, adapter: Adapter | None) -> Tensor:
        """d loss / d h of one chunk. Overwrites `log_p` (c, V)."""
        g = log_p.exp_().mul_(c.sum(1, keepdim=True).neg_())
        g.scatter_add_(1, t, c.to(g.dtype))  # G, (c, V)
        gradient = _wide(g.to(self.weight.dtype), self.weight.t())
        pair = self._pair(adapter)
        if pair is not None:
            a, b = pair
            h = h.to(a.dtype)
            g_b = g @ b  # (c, r)
            gradient.addmm_(g_b, a, alpha=adapter.scaling)
            if a.requires_grad:
                _add_product(a, g_b.t(), h, adapter.scaling)
                _add_product(b, g.t(), h @ a.t(), adapter.scaling)
        return gradient.to(self.weight.dtype)

    def _pair(self, adapter: Adapter | None) -> Pair | None:
        return adapter.pairs.get(self.path) if adapter is not None else None

    def _log_softmax(self, hidden: Tensor, adapter: Adapter | None) -> Tensor:
        return torch.log_softmax(self.logits(hidden, adapter), -1)

    def _chunks(self, hidden: Tensor) -> Iterator[slice]:
        return (slice(i, i + self.chunk_rows) for i in range(0, len(hidden), self.chunk_rows))


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """x·weightᵀ in at least float32. A half-precision product keeps its float32 sums where the device can."""
    if weight.dtype in (torch.bfloat16, torch.float16):
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return F.linear(x, weight).float()
    return F.linear(x, weight)


def _add_product(parameter: nn.Parameter, left: Tensor, right: Tensor, scaling: float) -> None:
    """parameter.grad += scaling · left·right"""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.addmm_(left, right, alpha=scaling)
