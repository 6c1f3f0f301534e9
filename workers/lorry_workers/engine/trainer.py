"""forward and forward_backward: the data of many jobs through the base model, each row with its job's adapter."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lorry_jobs.errors import LorryError, UserError
from lorry_jobs.types import Datum, ForwardBackwardOutput, TensorData
from lorry_jobs.wire import mean_loss

from .adapter import Adapter
from .attention import Packing
from .bank import Bank
from .batch import MicroBatch, Row, check_data, make_microbatch, plan_microbatches
from .head import Head, LowRank
from .job_state import JobState
from .lora_linear import ActiveAdapters
from .losses import Loss, find_loss

if TYPE_CHECKING:
    from ..base_model import BaseModel

log = logging.getLogger(__name__)

Config = Mapping[str, float | str] | None

KEPT_BANKS = 4
MICROBATCHES_UNTIL_MORE = 50


@dataclass(frozen=True)
class Part:
    """One forward, or with `backward` one forward_backward, of a job."""

    state: JobState
    data: Sequence[Datum]
    loss_fn: str
    config: Config = None
    backward: bool = True


Result = ForwardBackwardOutput | Exception


class Trainer:
    """Runs parts of many jobs through one base model, whose projections share `active`.

    `activation_checkpointing` keeps only each layer's input for the backward pass and computes the rest again.
    """

    def __init__(
        self,
        base: BaseModel,
        active: ActiveAdapters,
        head: Head,
        *,
        max_tokens_per_microbatch: int = 4096,
        activation_checkpointing: bool = False,
    ) -> None:
        self.base = base
        self.active = active
        self.head = head
        self.max_tokens_per_microbatch = max_tokens_per_microbatch
        self._allowed_tokens = max_tokens_per_microbatch
        self._fitted = 0  # micro-batches since one did not fit
        self.device = head.weight.device
        self.body = base.model.base_model
        self.packing = Packing(base.model)
        self._banks: OrderedDict[tuple[int, ...], Bank] = OrderedDict()
        self._loaded: set[tuple[int, ...]] = set()  # banks that have this run's values
        self.checkpointed: list[GradientCheckpointingLayer] = []
        if activation_checkpointing:
            model = base.model
            # transformers 5.24 renamed the method and warns about the old name.
            new_name = hasattr(model, "activation_checkpointing_enable")
            enable = model.activation_checkpointing_enable if new_name else model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            model.disable_input_require_grads()  # needed by re-entrant checkpointing only
            self.checkpointed = [m for m in self.body.modules() if isinstance(m, GradientCheckpointingLayer)]

    def run(self, parts: Sequence[Part]) -> list[Result]:
        """Run all parts together; for each of them, in order, what it gives or the error it failed with.

        Log-probabilities and losses of every part. Of those with `backward`, the gradient of the summed loss is
        added to that of the job's adapter; several parts of one job add up. Parts without leave the job's state
        and gradients as they are.

        A part that fails does so alone. If it had `backward`, all that its job has accumulated is dropped, that
        of earlier calls and of other parts of this call included.
        """
        run = _Run(parts)
        for number, part in enumerate(parts):
            try:
                loss = find_loss(part.loss_fn, part.config)
                check_data(part.data, loss, self.base.vocab_size, self.base.context_length)
            except LorryError as error:
                run.failed[number] = error
            else:
                run.add(number, loss)
        self._loaded.clear()
        # Rows without backward have micro-batches of their own: among the others, half of their time would go
        # into a backward pass of zeros.
        for backward in (False, True):
            self._run_rows(run, run.rows(backward=backward), backward)
        return run.finish()

    def forward(
        self, state: JobState, data: Sequence[Datum], loss_fn: str, config: Config = None
    ) -> ForwardBackwardOutput:
        """`run` of one part without `backward`; raises its error."""
        return _only(self.run([Part(state, data, loss_fn, config, backward=False)]))

    def forward_backward(
        self, state: JobState, data: Sequence[Datum], loss_fn: str, config: Config = None
    ) -> ForwardBackwardOutput:
        """`run` of one part with `backward`; raises its error."""
        return _only(self.run([Part(state, data, loss_fn, config)]))

    def _run_rows(self, run: _Run, rows: Sequence[Row], backward: bool) -> None:
        groups = self._plan(rows)
        while groups:
            group = [row for row in groups.pop(0) if row.part not in run.failed]
            if not group:
                continue
            error = self._attempt(run, group, backward)
            if error is None:
                self._try_more()
                continue
            if not out_of_memory(error):
                # Whatever it is, only the part that it is about may fail of it.
                parts = sorted({row.part for row in group})
                if len(parts) == 1:
                    run.failed[parts[0]] = error
                else:
                    groups = [[row for row in group if row.part == part] for part in parts] + groups
            elif len(group) == 1:
                run.failed[group[0].part] = self._too_long(run, group[0], backward)
            else:
                tokens = sum(row.length for row in group)
                self.max_tokens_per_microbatch = max(1, tokens // 2)
                self._fitted = 0
                log.warning(
                    "%d tokens at once do not fit into memory: for now at most %d",
                    tokens,
                    self.max_tokens_per_microbatch,
                )
                groups = self._plan([row for rest in (group, *groups) for row in rest])

    def _try_more(self) -> None:
        """What did not fit once may fit later: jobs leave, and other processes give back what they had."""
        self._fitted += 1
        if self._fitted >= MICROBATCHES_UNTIL_MORE and self.max_tokens_per_microbatch < self._allowed_tokens:
            self.max_tokens_per_microbatch = min(2 * self.max_tokens_per_microbatch, self._allowed_tokens)
            self._fitted = 0

    def _attempt(self, run: _Run, rows: list[Row], backward: bool, *, keep: bool = True) -> Exception | None:
        """Run one micro-batch. Either it has its whole effect (none without `keep`), or none and this is why."""
        try:
            batch = make_microbatch(rows, self.device)
            if len(batch.targets) == 0:  # every target is ignored
                found = _Found(batch, None, None)
            else:
                found = (self._backward if backward else self._score)(run, batch, keep)
        except Exception as error:
            if not out_of_memory(error) and not isinstance(error, LorryError):
                log.exception("a micro-batch of %d rows", len(rows))
            # The frames that it came through hold the tensors that did not fit.
            failure = error.with_traceback(None)
        else:
            if keep:
                run.found.append(found)
            return None
        self._banks.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return failure

    def _too_long(self, run: _Run, row: Row, backward: bool) -> UserError:
        """The error of a datum that does not fit into memory even alone; it says what would, which is tried."""
        low, high = 0, row.length
        while high - low > max(1, row.length // 16):
            middle = (low + high) // 2
            if self._attempt(run, [row.cut(middle)], backward, keep=False) is None:
                low = middle
            else:
                high = middle
        fits = f"up to {low} tokens of it would" if low else "not even a few tokens of it would"
        return UserError(
            f"datum {row.index} has {row.length} tokens, which do not fit into this worker's memory at once; {fits}. "
            "Cut it up, or ask for a worker with more memory or with activation checkpointing"
        )

    def _plan(self, rows: Sequence[Row]) -> list[list[Row]]:
        return plan_microbatches(rows, self.max_tokens_per_microbatch, one_by_one=self.packing.one_by_one)

    def _score(self, run: _Run, batch: MicroBatch, keep: bool) -> _Found:
        bank = self._bank(batch, run.adapters)
        with torch.no_grad(), self.active.use(bank), self.packing.use(batch.runs):
            hidden = self._wanted(self._hidden(batch), batch)
            logprobs = self.head.score(hidden, batch.targets, self._low_ranks(batch, run.adapters))
            losses, _ = _Terms(batch, lambda rows: logprobs[rows])(logprobs, slice(0, len(logprobs)))
        return _Found(batch, logprobs, losses)

    def _backward(self, run: _Run, batch: MicroBatch, keep: bool) -> _Found:
        bank = self._bank(batch, run.adapters)
        bank.zero_gradients()
        # The backward pass is inside: activation checkpointing runs the layers once more.
        with self.active.use(bank), self.packing.use(batch.runs), self._checkpointing():
            states = self._hidden(batch)  # (T, H)
            low_ranks = self._low_ranks(batch, run.adapters, gradients=True)
            wanted = self._wanted(states.detach(), batch)  # (m, H)
            gradient = self.head.backward(
                wanted,
                batch.targets,
                _Terms(batch, lambda rows: self.head.score(wanted, batch.targets, low_ranks, rows)),
                low_ranks,
                batch.active,
            )
            if gradient.hidden is not None and states.requires_grad:
                incoming = gradient.hidden
                if batch.positions is not None:
                    incoming = torch.zeros_like(states)
                    incoming.index_copy_(0, batch.positions, gradient.hidden)  # (m, H) -> (T, H)
                states.backward(incoming)
        if gradient.hidden is not None and keep:
            self._keep_gradients(batch, run.adapters, bank, low_ranks)
        return _Found(batch, gradient.logprobs, gradient.losses)

    def _keep_gradients(
        self, batch: MicroBatch, adapters: Sequence[Adapter], bank: Bank, low_ranks: Sequence[LowRank]
    ) -> None:
        """Only now, when nothing of the micro-batch can fail any more, it has an effect."""
        for number in batch.adapters:
            adapters[number].require_gradients()
        bank.add_gradients()
        with torch.no_grad():
            for low in low_ranks:
                low.a.grad.add_(low.grad_a)
                low.b.grad.add_(low.grad_b)

    def _bank(self, batch: MicroBatch, adapters: Sequence[Adapter]) -> Bank:
        """The bank of the micro-batch's adapters, with their present values. The last used ones are kept: jobs come
        in company that changes from cycle to cycle and returns, and the memory of a new bank takes longer to get
        than its values."""
        chosen = [adapters[number] for number in batch.adapters]
        key = tuple(id(adapter) for adapter in chosen)
        bank = self._banks.pop(key, None)
        if bank is None:
            while len(self._banks) >= KEPT_BANKS:
                self._banks.popitem(last=False)
            bank = self.active.make_bank(chosen, gradients=True)
        elif key not in self._loaded:
            bank.load()
        self._banks[key] = bank
        self._loaded.add(key)
        bank.segments = batch.segments
        return bank

    def forget(self, adapter: Adapter) -> None:
        """Its job is gone."""
        for key in [key for key in self._banks if id(adapter) in key]:
            del self._banks[key]

    def _low_ranks(self, batch: MicroBatch, adapters: Sequence[Adapter], *, gradients: bool = False) -> list[LowRank]:
        """What the adapters add to the output layer, with gradients of the micro-batch's own."""
        found = []
        for segment in batch.head_segments:
            adapter = adapters[batch.adapters[segment.slot]]
            pair = adapter.pairs.get(self.head.path)
            if pair is not None and segment.length:
                grads = [torch.zeros_like(matrix, requires_grad=False) for matrix in pair] if gradients else []
                found.append(LowRank(segment.start, segment.stop, *pair, adapter.scaling, *grads))
        return found

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """The last hidden states, (T, H)."""
        return self.packing.hidden(batch.tokens, batch.position_ids, batch.runs)

    def _wanted(self, states: Tensor, batch: MicroBatch) -> Tensor:
        """(T, H) -> (m, H): the states whose targets count."""
        return states if batch.positions is None else states.index_select(0, batch.positions)

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        # transformers checkpoints a layer only in training mode. The flag of the layer itself decides that and
        # nothing else; the modules below it stay in eval mode.
        for layer in self.checkpointed:
            layer.training = True
        try:
            yield
        finally:
            for layer in self.checkpointed:
                layer.training = False


class _Terms:
    """Losses and coefficients of some of a micro-batch's positions, each by its own loss; 0 at ignored targets.

    A loss of whole sequences needs all log-probabilities of a datum before it has the first coefficient, so
    its positions are scored beforehand, which costs them a third product with the vocabulary matrix. (Scaling
    gradients afterwards would save it, but not for an adapter on the output layer: its gradients are sums over
    positions.)
    """

    def __init__(self, batch: MicroBatch, score: Callable[[slice], Tensor]) -> None:
        """`score` gives the log-probabilities (n, K) of n positions."""
        self.batch = batch
        self._known: dict[int, tuple[Tensor, Tensor]] = {}
        for number, part in enumerate(batch.losses):
            if part.loss.whole_sequences:
                x = score(slice(part.start, part.stop))
                self._known[number] = part.loss.terms(x, part.inputs, part.loss.config)

    def __call__(self, logprobs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """(c, K) log-probabilities of the positions `rows` -> losses (c, K), coefficients (c, K)."""
        found = []
        for number, part in enumerate(self.batch.losses):
            start, stop = max(part.start, rows.start), min(part.stop, rows.stop)
            if start >= stop:
                continue
            own = slice(start - part.start, stop - part.start)
            if number in self._known:
                losses, coefficients = self._known[number]
                found.append((losses[own], coefficients[own]))
            else:
                inputs = {name: values[own] for name, values in part.inputs.items()}
                found.append(
                    part.loss.terms(logprobs[start - rows.start : stop - rows.start], inputs, part.loss.config)
                )
        losses, coefficients = (terms[0] if len(terms) == 1 else torch.cat(terms) for terms in zip(*found, strict=True))
        if self.batch.ignored is not None:
            ignored = self.batch.ignored[rows]
            losses, coefficients = losses.masked_fill(ignored, 0.0), coefficients.masked_fill(ignored, 0.0)
        return losses, coefficients


@dataclass(frozen=True)
class _Found:
    """What a micro-batch gives, (m, K) each, still on the device; None if every target is ignored."""

    batch: MicroBatch
    logprobs: Tensor | None
    losses: Tensor | None

    def per_row(self) -> Iterator[tuple[Row, NDArray[np.float32], NDArray[np.float32], float]]:
        """(row, log-probabilities (length, K), losses (length, K), weight) of each row, on the host."""
        batch = self.batch
        if self.logprobs is None or self.losses is None:
            values = np.zeros((2, 0, batch.targets.shape[1]), np.float32)
        else:
            ignored = batch.ignored
            logprobs = self.logprobs if ignored is None else self.logprobs.masked_fill(ignored, 0.0)
            values = torch.stack([logprobs, self.losses]).float().cpu().numpy()
        return zip(batch.rows, batch.per_row(values[0]), batch.per_row(values[1]), batch.weights, strict=True)


class _Run:
    """One call of `Trainer.run`: its rows, the adapters they use, and what each part has given so far."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.failed: dict[int, Exception] = {}
        self.adapters: list[Adapter] = []
        self._rows: list[Row] = []
        self._results: dict[int, _Results] = {}
        self.found: list[_Found] = []

    def add(self, number: int, loss: Loss) -> None:
        """Part `number` takes part."""
        part = self.parts[number]
        if not any(part.state.adapter is adapter for adapter in self.adapters):
            self.adapters.append(part.state.adapter)
        adapter = next(i for i, each in enumerate(self.adapters) if each is part.state.adapter)
        self._rows += [Row(number, i, adapter, datum, loss) for i, datum in enumerate(part.data)]
        self._results[number] = _Results(part.data)

    def rows(self, *, backward: bool) -> list[Row]:
        return [row for row in self._rows if self.parts[row.part].backward == backward]

    def finish(self) -> list[Result]:
        """Only here does anything wait for the device."""
        for found in self.found:
            for row, logprobs, losses, weight in found.per_row():
                self._results[row.part].add(row.index, logprobs, losses, weight)
        outputs = [self._finish(number) for number in range(len(self.parts))]
        broken = [number for number in self.failed if self.parts[number].backward]
        for number in broken:
            self.parts[number].state.drop_gradients()
        jobs = {id(self.parts[number].state) for number in broken}
        for part, output in zip(self.parts, outputs, strict=True):
            if part.backward and isinstance(output, ForwardBackwardOutput) and id(part.state) not in jobs:
                part.state.add_accumulation(int(output.metrics["tokens:sum"]), output.loss)
        return outputs

    def _finish(self, number: int) -> Result:
        if number not in self.failed:
            results = self._results[number]
            output = results.output()
            if not self.parts[number].backward or np.isfinite(output.metrics["loss:sum"]):
                return output
            self.failed[number] = UserError(
                f"the loss is not finite ({results.first_not_finite()}); no gradient was kept"
            )
        return self.failed[number]


class _Results:
    """What one part gives, in the order of its data."""

    def __init__(self, data: Sequence[Datum]) -> None:
        self.shapes = [datum.loss_fn_inputs["target_tokens"].array.shape for datum in data]
        self.logprobs: list[NDArray[np.float32]] = [np.zeros(shape, np.float32) for shape in self.shapes]
        self.losses = [0.0] * len(data)
        self.weights = [0.0] * len(data)

    def add(self, index: int, logprobs: NDArray[np.float32], losses: NDArray[np.float32], weight: float) -> None:
        """(length, K) each, of datum `index`. K may be larger than the datum's own."""
        shape = self.shapes[index]
        columns = shape[1] if len(shape) == 2 else 1
        self.logprobs[index] = np.ascontiguousarray(logprobs[:, :columns]).reshape(shape)
        self.losses[index] = float(losses.sum(dtype=np.float64))
        self.weights[index] = weight

    def first_not_finite(self) -> str:
        index = next(i for i, value in enumerate(self.losses) if not np.isfinite(value))
        return f"datum {index}: {self.losses[index]}"

    def output(self) -> ForwardBackwardOutput:
        """`weights:sum` is Σ weight for cross_entropy, and for policy losses the number of positions whose
        advantage is not 0; `loss` is `loss:sum` divided by it."""
        metrics = {
            "loss:sum": float(sum(self.losses)),
            "weights:sum": float(sum(self.weights)),
            "tokens:sum": float(sum(shape[0] for shape in self.shapes)),
        }
        return ForwardBackwardOutput(
            loss_fn_outputs=[{"logprobs": TensorData(array)} for array in self.logprobs],
            metrics=metrics,
            loss=mean_loss(metrics),
        )


def out_of_memory(error: BaseException) -> bool:
    """Of a device, or of torch's allocator on a CPU, which raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def _only(results: Sequence[Result]) -> ForwardBackwardOutput:
    [result] = results
    if isinstance(result, Exception):
        raise result
    return result
