"""`forward_backward_custom`: a loss of the user's own, computed here, its gradient applied on the worker.

For any loss C of the target log-probabilities x, dC/dθ = Σ (dC/dx)·(dx/dθ), which is the gradient of cross_entropy,
-Σ w·x, with the fixed weights w = -dC/dx. So: a forward for the log-probabilities, the user's function under torch's
autograd in this process, and a forward_backward with those weights. The two ops take neighbouring places in the
job's chain at the call, so what is submitted after it runs after both.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lorry_jobs import ops, wire
from lorry_jobs.errors import LorryError, UserError
from lorry_jobs.results import Outcome
from lorry_jobs.tensors import Datum
from lorry_jobs.types import ForwardBackwardOutput

from .futures import APIFuture
from .process import ClientProcess

log = logging.getLogger("lorry")

CustomLoss = Callable[..., tuple[Any, Mapping[str, float]]]
"""(data, [log-probabilities of each datum's targets]) -> (scalar loss, metrics). Torch tensors, float32, one per
datum in the shape of its target_tokens. With `loss_fn_config` it is the third argument."""

# One thread: user functions of one process run one at a time, and the interpreter waits for it at exit.
_runner = ThreadPoolExecutor(1, thread_name_prefix="lorry-custom-loss")


class CustomPass:
    """One call of forward_backward_custom: `future` is what the user waits for."""

    def __init__(
        self,
        process: ClientProcess,
        job: str,
        seq: int,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        config: Mapping[str, float | str] | None,
    ) -> None:
        self._process, self._job, self._seq = process, job, seq
        self._data, self._loss_fn, self._config = data, loss_fn, config
        self._loss = 0.0
        self._metrics: dict[str, float] = {}
        task = ops.task_id(job, seq)
        self.future: APIFuture[ForwardBackwardOutput] = APIFuture(
            process, task, ops.FORWARD_BACKWARD, self._decode, job=job, seq=seq
        )
        process.watch(self.future)

    def start(self, forward: APIFuture[ForwardBackwardOutput]) -> None:
        """Go on as soon as the log-probabilities are there."""
        forward.add_done_callback(lambda done: _runner.submit(self._after_forward, done))

    def _after_forward(self, forward: APIFuture[ForwardBackwardOutput]) -> None:
        try:
            rows = self._weighted(forward.result())
        except Exception as error:  # noqa: BLE001  the user's function may raise anything; it becomes the future's error
            # The place in the chain is taken and must be filled: an empty batch fails on the worker, so the next
            # optim_step knows that gradients are missing. What the user sees is the real reason.
            self._post([])
            self._process.resolve(Outcome(self.future.task_id, self._explained(error), {}, None, False))
            return
        self._post(rows)

    def _weighted(self, output: ForwardBackwardOutput) -> list[Datum]:
        """The data with the weights that make cross_entropy's gradient that of the user's loss."""
        import torch

        logprobs = [fields["logprobs"].to_torch().requires_grad_() for fields in output.loss_fn_outputs]
        arguments = (self._data, logprobs) if self._config is None else (self._data, logprobs, self._config)
        loss, metrics = self._loss_fn(*arguments)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UserError("the custom loss must return (a scalar torch tensor, metrics)")
        if loss.requires_grad:
            loss.backward()
        self._loss = float(loss.detach())
        self._metrics = {name: float(value) for name, value in metrics.items()}
        rows = []
        for index, (datum, logprob) in enumerate(zip(self._data, logprobs, strict=True)):
            gradient = torch.zeros_like(logprob) if logprob.grad is None else logprob.grad
            weights = -gradient.numpy()
            if not np.isfinite(weights).all():
                raise UserError(f"the custom loss has a gradient that is not finite, at datum {index}")
            targets = datum.loss_fn_inputs["target_tokens"]
            rows.append(Datum(datum.model_input, {"target_tokens": targets, "weights": weights}))
        return rows

    def _post(self, rows: list[Datum]) -> None:
        payload = wire.encode_batch(self._job, self._seq, rows, "cross_entropy", None, forward_only=False)
        posted = self._process.submit_op(self._job, self._seq, ops.FORWARD_BACKWARD, payload, self._decode)
        posted._retrieved = True  # the user looks at `self.future`; this one has nothing to report

    def _decode(self, outcome: Outcome) -> ForwardBackwardOutput:
        assert outcome.output is not None
        output = wire.decode_output(outcome.output, cycle=outcome.info.get("cycle"))
        metrics = {**output.metrics, "surrogate_loss:sum": output.metrics["loss:sum"], "loss:sum": self._loss}
        return output.model_copy(update={"loss": self._loss, "metrics": {**metrics, **self._metrics}})

    def _explained(self, error: Exception) -> LorryError:
        if isinstance(error, LorryError):
            return error
        wrapped = UserError(
            f"the custom loss raised {type(error).__name__}: {error}. No gradient was added, so the next optim_step is "
            "refused; then the job goes on",
            job=self._job,
            op=ops.FORWARD_BACKWARD,
            seq=self._seq,
        )
        wrapped.__cause__ = error
        return wrapped


def require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "forward_backward_custom computes your loss with torch in this process, and torch is not installed here: "
            "pip install torch. Nothing was submitted"
        )


def targets_only(data: Sequence[Datum]) -> list[Datum]:
    """The data as the forward needs it: other inputs are for the user's function alone."""
    return [Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data]
