"""What is trained in a benchmark: jobs with their adapters' ranks and one batch each, for both contenders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

import lorry
from benchmarks._bare import IGNORED, pad

RANK = 16
RAGGED_LENGTHS = (16, 256)
RAGGED_RANKS = (4, 8, 8, 16, 16, 32, 64, 64)
RAGGED_ROWS = 2  # sequences per job


@dataclass(frozen=True)
class Case:
    """Jobs that train at the same time.

    `batches[j]` are the sequences of job j, token ids (length + 1,) each: every position predicts the next.
    `ranks[j]` is its adapter's rank. The first `masked` of each sequence's positions is a prompt: it has no say in
    the loss.
    """

    batches: list[list[NDArray[np.int64]]]
    ranks: tuple[int, ...]
    masked: float = 0.0

    @property
    def tokens(self) -> int:
        """Of one update of all jobs, without padding."""
        return sum(len(row) - 1 for rows in self.batches for row in rows)

    def prompt(self, row: NDArray[np.int64]) -> int:
        """How many positions of a sequence are masked."""
        return int(self.masked * (len(row) - 1))

    def data(self, job: int) -> list[lorry.Datum]:
        """The job's batch for the service: weight 0 in the prompt, 1 behind it."""
        made = []
        for row in self.batches[job]:
            weights = np.ones(len(row) - 1, np.float32)
            weights[: self.prompt(row)] = 0
            inputs = {"target_tokens": row[1:], "weights": weights}
            made.append(lorry.Datum(lorry.ModelInput.from_ints(row[:-1]), inputs))
        return made

    def padded(self, job: int) -> tuple[Tensor, Tensor]:
        """The job's batch for the bare loop: inputs and labels, (rows, longest) each."""
        rows = []
        for row in self.batches[job]:
            labels = row[1:].copy()
            labels[: self.prompt(row)] = IGNORED
            rows.append((row[:-1], labels))
        return pad(rows)


def rectangular(jobs: int, rows: int, length: int, vocabulary: int, *, masked: float = 0.0) -> Case:
    """`jobs` jobs of rank `RANK`, each with `rows` sequences of `length` tokens."""
    random = np.random.default_rng(0)
    batches = [list(random.integers(0, vocabulary, (rows, length + 1))) for _ in range(jobs)]
    return Case(batches, (RANK,) * jobs, masked)


def ragged(vocabulary: int, seed: int = 0) -> Case:
    """Eight jobs with ranks 4 to 64 and sequences of 16 to 256 tokens, both ends among them."""
    random = np.random.default_rng(seed)
    shortest, longest = RAGGED_LENGTHS
    lengths = random.integers(shortest, longest + 1, (len(RAGGED_RANKS), RAGGED_ROWS))
    lengths.flat[random.choice(lengths.size, 2, replace=False)] = RAGGED_LENGTHS
    batches = [[random.integers(0, vocabulary, length + 1) for length in own] for own in lengths]
    return Case(batches, tuple(int(rank) for rank in random.permutation(RAGGED_RANKS)))
