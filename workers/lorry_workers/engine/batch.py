"""From a list of `Datum` to rectangular micro-batches, and from their results back to one array per datum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import IGNORED_TARGET, Datum

from .losses import Loss

PADDING_TOKEN = 0


@dataclass(frozen=True)
class MicroBatch:
    """Some datums as one padded batch, and the positions whose log-probabilities are wanted.

    Padding is on the right, where causal attention keeps it out of every real position, so no mask is
    needed. Of the `total` real positions, `kept` are those with a target that is not ignored, m of them
    (None: all of them). Of the b·t positions of the batch, those are the ones at `positions` (None: all).
    """

    datums: list[int]
    lengths: list[int]
    tokens: Tensor  # (b, t) int64
    positions: Tensor | None  # (m,) int64
    kept: NDArray[np.int64] | None  # (m,)
    targets: Tensor  # (m, K) int64, 0 where ignored
    ignored: Tensor | None  # (m, K) bool; None if no target is ignored
    inputs: dict[str, Tensor]  # (m, K) each
    total: int

    def per_datum(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Cut (m, K) into one (length, K) array per datum; 0 where every target is ignored."""
        if self.kept is not None:
            full = np.zeros((self.total, values.shape[1]), np.float32)
            full[self.kept] = values
            values = full
        return np.split(values, np.cumsum(self.lengths)[:-1])


def check_data(data: Sequence[Datum], loss: Loss, vocab_size: int, context_length: int) -> None:
    """Raise a `UserError` that names the datum and the field if `data` cannot be run."""
    if not data:
        raise UserError("data is empty: a batch needs at least one datum")
    for index, datum in enumerate(data):
        tokens, targets = datum.model_input.tokens, datum.loss_fn_inputs["target_tokens"].array
        if len(tokens) > context_length:
            raise UserError(
                f"datum {index}: model_input has {len(tokens)} tokens, but the model's context is {context_length}"
            )
        for name, ids in (("model_input", tokens), ("target_tokens", targets)):
            if ids.size and int(ids.max()) >= vocab_size:
                raise UserError(
                    f"datum {index}: {name} has token {int(ids.max())}, but the vocabulary has {vocab_size} tokens"
                )
        if targets.ndim == 2 and not loss.soft_targets:
            raise UserError(f"datum {index}: target_tokens must be one-dimensional for the loss {loss.name}")
        if targets.size == 0:
            raise UserError(f"datum {index}: target_tokens has no column")
        for name in loss.required:
            if name not in datum.loss_fn_inputs:
                raise UserError(f"datum {index}: the loss {loss.name} needs loss_fn_inputs['{name}']")
        for name in loss.inputs:
            given = datum.loss_fn_inputs.get(name)
            if given is not None and given.array.shape != targets.shape:
                raise UserError(
                    f"datum {index}: {name} has shape {given.array.shape}, but target_tokens {targets.shape}"
                )


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group row indices so that rows × longest row ≤ `max_tokens`, longest rows first, like with like.

    A row longer than that gets a micro-batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = []
    for index in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def make_microbatch(data: Sequence[Datum], indices: list[int], loss: Loss, device: torch.device) -> MicroBatch:
    datums = [data[index] for index in indices]
    lengths = [datum.model_input.length for datum in datums]
    longest = max(lengths)
    tokens = np.full((len(datums), longest), PADDING_TOKEN, np.int64)  # (b, t)
    for row, datum in zip(tokens, datums, strict=True):
        row[: datum.model_input.length] = datum.model_input.tokens

    targets = _columns([datum.loss_fn_inputs["target_tokens"].array for datum in datums], IGNORED_TARGET)
    ignored = targets == IGNORED_TARGET  # (n, K)
    inputs = {name: _loss_input(datums, name, ignored.shape[1]) for name in loss.inputs}

    wanted = ~ignored.all(1)  # (n,)
    kept = None if wanted.all() else np.flatnonzero(wanted)
    real = np.arange(longest) < np.asarray(lengths)[:, None]  # (b, t)
    positions = None if kept is None and real.all() else np.flatnonzero(real)
    if kept is not None:
        positions, targets, ignored = positions[kept], targets[kept], ignored[kept]
        inputs = {name: values[kept] for name, values in inputs.items()}
    any_ignored = bool(ignored.any())
    if any_ignored:
        targets = np.where(ignored, 0, targets)

    return MicroBatch(
        datums=indices,
        lengths=lengths,
        tokens=torch.from_numpy(tokens).to(device),
        positions=None if positions is None else torch.from_numpy(positions).to(device),
        kept=kept,
        targets=torch.from_numpy(targets).to(device),
        ignored=torch.from_numpy(ignored).to(device) if any_ignored else None,
        inputs={name: torch.from_numpy(values).to(device) for name, values in inputs.items()},
        total=sum(lengths),
    )


def _loss_input(datums: Sequence[Datum], name: str, columns: int) -> NDArray[np.float32]:
    arrays = []
    for datum in datums:
        given = datum.loss_fn_inputs.get(name)
        shape = datum.loss_fn_inputs["target_tokens"].array.shape
        arrays.append(np.ones(shape, np.float32) if given is None else given.array)
    return _columns(arrays, 0, columns)


def _columns(arrays: Sequence[NDArray], fill: float, columns: int = 1) -> NDArray:
    """(N,) or (N, K) arrays one below the other as (n, K), the narrower ones filled up on the right."""
    tables = [array.reshape(len(array), -1) for array in arrays]
    widest = max(columns, *(table.shape[1] for table in tables))
    if any(table.shape[1] < widest for table in tables):
        tables = [np.pad(table, ((0, 0), (0, widest - table.shape[1])), constant_values=fill) for table in tables]
    return np.concatenate(tables)
