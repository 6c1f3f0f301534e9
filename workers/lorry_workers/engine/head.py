"""From the last hidden states to token log-probabilities, and back, without holding the logits.

With z = W·h + scaling·B·(A·h) and x_k = z[t_k] - logsumexp(z) for the targets t_k of a position, a loss
with derivatives c_k = d loss / d x_k has

    G = d loss / d z = Σ_k c_k·onehot(t_k) - (Σ_k c_k)·softmax(z)
    d loss / d h = Wᵀ·G + scaling·Aᵀ·(Bᵀ·G)

so one pass over a chunk of positions gives its log-probabilities and its gradients: two products with the
vocabulary matrix per token, and at most `chunk_elements` logits at a time. Positions that are known to have no
gradient take no part in the second product.

On a CPU the vocabulary is gone through in tiles, whose logits are used while they are in the cache; the maximum and
the sum of logsumexp are carried along from tile to tile.

Positions of several adapters may follow one another; each `LowRank` says which are its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .adapter import Adapter
from .products import add_linear, linear

TermsOfRows = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probabilities (c, K), rows) -> (losses (c, K), coefficients (c, K)) of the chunk `rows`."""


TILE_COLUMNS = 2048


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

    def __init__(self, linear: nn.Linear, path: str, chunk_elements: int = 2**24, tile: int | None = None) -> None:
        """`tile`: how many tokens of the vocabulary are gone through at a time. None: 2048 on a CPU, else all."""
        self.weight = linear.weight  # (V, H)
        self.bias = linear.bias
        self.path = path
        vocabulary = linear.weight.shape[0]
        self.chunk_rows = max(1, chunk_elements // vocabulary)
        tile = tile or (TILE_COLUMNS if linear.weight.device.type == "cpu" else vocabulary)
        self._tiles = [slice(i, min(i + tile, vocabulary)) for i in range(0, vocabulary, tile)]

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
        found = [self._scores(hidden[c], targets[c], c, low_ranks).logprobs for c in self._chunks(hidden, rows)]
        return torch.cat(found)

    @torch.no_grad()
    def top(self, hidden: Tensor, k: int, low_ranks: Sequence[LowRank] = ()) -> TopTokens:
        """The k most likely next tokens after each of the states `hidden` (n, H)."""
        found = [
            torch.log_softmax(self._logits(hidden[rows], rows, low_ranks), -1).topk(k) for rows in self._chunks(hidden)
        ]
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
            scores = self._scores(h, t, rows, low_ranks, keep=True)
            logprobs[rows] = scores.logprobs
            losses[rows], coefficients = terms(scores.logprobs, rows)
            chosen = None if active is None or active[rows].all() else np.flatnonzero(active[rows])
            if chosen is not None and len(chosen) == 0:
                continue
            if gradient is None:
                gradient = torch.zeros_like(hidden)
            if chosen is None:
                places = [(low, low.within(rows)) for low in low_ranks]
                gradient[rows] = self._gradient(h, t, scores, coefficients, places)
            else:
                index = torch.from_numpy(chosen).to(hidden.device, non_blocking=True)
                places = [(low, _among(chosen, low.within(rows))) for low in low_ranks]
                part = self._gradient(h[index], t[index], scores, coefficients[index], places, index)
                gradient[rows].index_copy_(0, index, part)
        return HeadGradient(logprobs, losses, gradient)

    def _scores(
        self, h: Tensor, t: Tensor, rows: slice, low_ranks: Sequence[LowRank], *, keep: bool = False
    ) -> _Scores:
        """Of the chunk `rows`: the log-probabilities of its targets, and with `keep` all its logits."""
        dtype = torch.promote_types(h.dtype, torch.float32)
        highest = h.new_full((len(h), 1), -torch.inf, dtype=dtype)
        total, of_targets = torch.zeros_like(highest), h.new_zeros(t.shape, dtype=dtype)
        products = [
            (low, place, h[place].to(low.a.dtype) @ low.a.t())
            for low in low_ranks
            if (place := low.within(rows)) is not None
        ]
        kept = []
        for columns in self._tiles:
            z = _wide(h, self.weight[columns])
            if self.bias is not None:
                z += self.bias[columns]
            for low, place, product in products:
                z[place].addmm_(product, low.b[columns].t(), alpha=low.scaling)
            before, highest = highest, torch.maximum(highest, z.amax(1, keepdim=True))
            total.mul_((before - highest).exp_()).add_((z - highest).exp_().sum(1, keepdim=True))
            place_in, inside = _in_tile(t, columns)
            of_targets = torch.where(inside, z.gather(1, place_in), of_targets)
            if keep:
                kept.append(z)
        return _Scores((of_targets - highest) - total.log(), highest, total, kept)

    def _gradient(
        self,
        h: Tensor,
        t: Tensor,
        scores: _Scores,
        c: Tensor,
        places: Sequence[tuple[LowRank, slice | None]],
        index: Tensor | None = None,
    ) -> Tensor:
        """d loss / d h of one chunk, or of its positions `index`."""
        highest, total = scores.highest, scores.total
        if index is not None:
            highest, total = highest[index], total[index]
        share = c.sum(1, keepdim=True).neg_() / total
        gradient = torch.zeros(h.shape, dtype=scores.highest.dtype, device=h.device)
        own = [
            _LowRankGradient(low, place, h[place].to(low.a.dtype) @ low.a.t())
            for low, place in places
            if place is not None
        ]
        for columns, z in zip(self._tiles, scores.logits, strict=True):
            chosen = z if index is None else z[index]
            g = (chosen - highest).exp_().mul_(share)  # G, (c, columns)
            place_in, inside = _in_tile(t, columns)
            g.scatter_add_(1, place_in, torch.where(inside, c, 0.0).to(g.dtype))
            weight = self.weight[columns]
            if weight.dtype == g.dtype:
                gradient = add_linear(gradient, g, weight.t())
            else:
                gradient.add_(_wide(g.to(weight.dtype), weight.t()))
            for low_rank in own:
                low_rank.add(g, columns)
        for low_rank in own:
            low_rank.finish(h, gradient)
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

    def _chunks(self, hidden: Tensor, rows: slice = slice(None)) -> Iterator[slice]:
        start, stop, _ = rows.indices(len(hidden))
        return (slice(i, min(i + self.chunk_rows, stop)) for i in range(start, stop, self.chunk_rows))


@dataclass(frozen=True)
class _Scores:
    """Of c positions: log-probabilities of the targets (c, K), the highest logit and Σ exp(logit - highest) (c, 1),
    and the logits by tile."""

    logprobs: Tensor
    highest: Tensor
    total: Tensor
    logits: list[Tensor]


class _LowRankGradient:
    """What the positions `place` of a chunk give for an adapter on the output layer, summed up tile by tile."""

    def __init__(self, low: LowRank, place: slice, product: Tensor) -> None:
        """`product`: A·h, (p, r)"""
        self.low, self.place, self.product = low, place, product
        self.of_product = torch.zeros_like(product)

    def add(self, g: Tensor, columns: slice) -> None:
        own = g[self.place]
        self.of_product.addmm_(own, self.low.b[columns])
        if self.low.grad_b is not None:
            self.low.grad_b[columns].addmm_(own.t(), self.product, alpha=self.low.scaling)

    def finish(self, h: Tensor, gradient: Tensor) -> None:
        gradient[self.place].addmm_(self.of_product, self.low.a, alpha=self.low.scaling)
        if self.low.grad_a is not None:
            states = h[self.place].to(self.low.a.dtype)
            self.low.grad_a.addmm_(self.of_product.t(), states, alpha=self.low.scaling)


def _in_tile(t: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(places of the targets among these columns, which of them are there at all), (c, K) both."""
    places = t - columns.start
    inside = (places >= 0) & (places < columns.stop - columns.start)
    return places.where(inside, 0), inside


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
        return linear(x, weight).float()
    return linear(x, weight)
