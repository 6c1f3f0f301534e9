"""From the data of many jobs to packed micro-batches, and from their results back to one array per datum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import IGNORED_TARGET, Datum, ModelInput

from .attention import Run, runs_of
from .bank import Segment
from .losses import SEQUENCE, SEQUENCE_COUNT, Loss


@dataclass(frozen=True)
class Row:
    """One datum on its way through the model: number `index` of the data of part number `part`, whose adapter
    is number `adapter` of the run."""

    part: int
    index: int
    adapter: int
    datum: Datum
    loss: Loss

    @property
    def length(self) -> int:
        return self.datum.model_input.length

    def cut(self, length: int) -> Row:
        """The same with the first `length` tokens only."""
        inputs = {name: tensor.array[:length] for name, tensor in self.datum.loss_fn_inputs.items()}
        return replace(self, datum=Datum(ModelInput(tokens=self.datum.model_input.tokens[:length]), inputs))


@dataclass(frozen=True)
class LossSlice:
    """Positions start:stop of a micro-batch, which share a loss. `inputs`: (stop - start, K) each, and for a
    loss of whole sequences what `losses.SEQUENCE` and `SEQUENCE_COUNT` say."""

    loss: Loss
    start: int
    stop: int
    inputs: dict[str, Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows packed into one, T tokens in all, and the positions whose log-probabilities are wanted.

    Rows of one adapter lie side by side: `segments` in tokens, `head_segments` in wanted positions. Of the T
    positions, the m at `positions` have a target that is not ignored (None: all have).
    """

    rows: list[Row]
    adapters: list[int]  # numbers in the run, in the order of the segments' slots
    tokens: Tensor  # (1, T) int64
    position_ids: Tensor  # (1, T) int64
    runs: tuple[Run, ...]
    segments: tuple[Segment, ...]
    head_segments: tuple[Segment, ...]
    positions: Tensor | None  # (m,) int64
    kept: NDArray[np.int64] | None  # (m,)
    targets: Tensor  # (m, K) int64, 0 where ignored
    ignored: Tensor | None  # (m, K) bool; None if no target is ignored
    active: NDArray[np.bool_]  # (m,): where the loss has a derivative
    losses: list[LossSlice]
    weights: list[float]  # per row: its part in weights:sum

    @property
    def length(self) -> int:
        """T"""
        return self.tokens.shape[1]

    def per_row(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Cut (m, K) into one (length, K) array per row; 0 where every target is ignored."""
        if self.kept is not None:
            full = np.zeros((self.length, values.shape[1]), np.float32)
            full[self.kept] = values
            values = full
        return np.split(values, np.cumsum([row.length for row in self.rows])[:-1])


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


def plan_microbatches(rows: Sequence[Row], max_tokens: int, *, one_by_one: bool = False) -> list[list[Row]]:
    """Group rows so that each group has at most `max_tokens` tokens; a longer row gets a group of its own.

    Rows stay together by adapter, so that few groups hold many adapters, and by length within one, so that
    attention runs over few different lengths.
    """
    order = sorted(rows, key=lambda row: (row.adapter, -row.length))
    groups: list[list[Row]] = []
    tokens = 0
    for row in order:
        tokens += row.length
        if not groups or tokens > max_tokens or one_by_one:
            groups.append([])
            tokens = row.length
        groups[-1].append(row)
    return groups


def make_microbatch(rows: list[Row], device: torch.device) -> MicroBatch:
    lengths = [row.length for row in rows]
    tables = [row.datum.loss_fn_inputs["target_tokens"].array for row in rows]
    targets = _columns(tables, IGNORED_TARGET)  # (T, K)
    ignored = targets == IGNORED_TARGET
    wanted = ~ignored.all(1)  # (T,)
    kept = None if wanted.all() else np.flatnonzero(wanted)
    kept_of_row = np.add.reduceat(wanted, np.cumsum([0, *lengths[:-1]]), dtype=np.int64)  # (rows,)

    active = np.zeros(len(targets), bool)
    weights: list[float] = []
    slices: list[LossSlice] = []
    start = first = 0
    for loss, group in _by_loss(rows):
        tokens = sum(row.length for row in group)
        place = slice(start, start + tokens)
        inputs = {name: _loss_input(group, name, targets.shape[1]) for name in loss.inputs}
        sequence = np.repeat(np.arange(len(group)), [row.length for row in group])[:, None]
        active[place] = (loss.active(inputs) & ~ignored[place]).any(1)
        counted = np.where(ignored[place], 0, loss.weight(inputs)).sum(1, dtype=np.float64)
        ends = np.cumsum([row.length for row in group])
        weights += [float(part.sum()) for part in np.split(counted, ends[:-1])]
        count = int(wanted[place].sum())
        if count:
            chosen = slice(None) if kept is None else wanted[place]
            tensors = {name: torch.from_numpy(values[chosen]).to(device) for name, values in inputs.items()}
            if loss.whole_sequences:
                tensors[SEQUENCE] = torch.from_numpy(sequence[chosen]).to(device)
                tensors[SEQUENCE_COUNT] = torch.tensor(len(group))
            slices.append(LossSlice(loss, first, first + count, tensors))
        start, first = place.stop, first + count

    if kept is not None:
        targets, ignored, active = targets[kept], ignored[kept], active[kept]
    any_ignored = bool(ignored.any())
    adapters, segments = _segments(rows, lengths)
    return MicroBatch(
        rows=rows,
        adapters=adapters,
        tokens=torch.from_numpy(np.concatenate([row.datum.model_input.tokens for row in rows])[None]).to(device),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])[None]).to(device),
        runs=runs_of(lengths),
        segments=segments,
        head_segments=_segments(rows, kept_of_row.tolist())[1],
        positions=None if kept is None else torch.from_numpy(kept).to(device),
        kept=kept,
        targets=torch.from_numpy(np.where(ignored, 0, targets) if any_ignored else targets).to(device),
        ignored=torch.from_numpy(ignored).to(device) if any_ignored else None,
        active=active,
        losses=slices,
        weights=weights,
    )


def _by_loss(rows: Sequence[Row]) -> list[tuple[Loss, list[Row]]]:
    """Neighbours with the same loss and options together."""
    groups: list[tuple[Loss, list[Row]]] = []
    for row in rows:
        if groups and (groups[-1][0] is row.loss or groups[-1][0] == row.loss):
            groups[-1][1].append(row)
        else:
            groups.append((row.loss, [row]))
    return groups


def _segments(rows: Sequence[Row], sizes: Sequence[int]) -> tuple[list[int], tuple[Segment, ...]]:
    """(adapters in the order of their slots, one segment each), where row i takes `sizes[i]` places."""
    adapters: list[int] = []
    segments: list[Segment] = []
    start = 0
    for row, size in zip(rows, sizes, strict=True):
        if not adapters or adapters[-1] != row.adapter:
            adapters.append(row.adapter)
            segments.append(Segment(len(segments), start, start))
        start += size
        segments[-1] = segments[-1]._replace(stop=start)
    return adapters, tuple(segments)


def _loss_input(rows: Sequence[Row], name: str, columns: int) -> NDArray[np.float32]:
    arrays = []
    for row in rows:
        given = row.datum.loss_fn_inputs.get(name)
        if given is not None:
            arrays.append(given.array)
        elif name in row.loss.absent:
            others = {key: tensor.array for key, tensor in row.datum.loss_fn_inputs.items()}
            arrays.append(row.loss.absent[name](others).astype(np.float32))
        else:
            arrays.append(np.ones(row.datum.loss_fn_inputs["target_tokens"].array.shape, np.float32))
    return _columns(arrays, 0, columns)


def _columns(arrays: Sequence[NDArray], fill: float, columns: int = 1) -> NDArray:
    """(N,) or (N, K) arrays one below the other as (n, K), the narrower ones filled up on the right."""
    tables = [array.reshape(len(array), -1) for array in arrays]
    widest = max(columns, *(table.shape[1] for table in tables))
    if any(table.shape[1] < widest for table in tables):
        tables = [np.pad(table, ((0, 0), (0, widest - table.shape[1])), constant_values=fill) for table in tables]
    return np.concatenate(tables)
