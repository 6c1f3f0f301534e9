"""The engine: one base model, the jobs that train on it, and the samplers that use it.

Everything here runs on one thread. It knows nothing of queues: methods take requests and return results, and
what is wrong with a request is a `UserError`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lorry_jobs.checkpoint_paths import CheckpointPath, Kind
from lorry_jobs.errors import JobNotFound, LorryError, ServiceError, UserError
from lorry_jobs.types import (
    AdamParams,
    CheckpointMetadata,
    CreateModelRequest,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadStateRequest,
    LoadWeightsResponse,
    ModelData,
    OptimStepResponse,
    SampleResponse,
    SaveRequest,
)
from lorry_jobs.wire import SampleRequest

from . import training_state
from .adapter import Adapter, create_adapter, head_name, make_shell, read_adapter
from .checkpoint_format import Checkpoint, Manifest, Origin
from .head import Head
from .job_state import JobState
from .lora_linear import install_lora_linears
from .optimizer import AdamState, take_steps
from .sampler import Sampler, ShouldStop
from .store import Store
from .trainer import Part, Trainer

if TYPE_CHECKING:
    from ..base_model import BaseModel

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineOptions:
    """`head_chunk_elements`: logits held at a time. `sampler_adapters`: how many stay loaded."""

    max_tokens_per_microbatch: int = 4096
    activation_checkpointing: bool = False
    head_chunk_elements: int = 2**24
    sampler_adapters: int = 16
    max_sample_rows: int = 32


@dataclass(frozen=True)
class Batch:
    """One forward, or with `backward` one forward_backward, of a job."""

    job: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] | None = None
    backward: bool = True


class Engine:
    """`name` is the base model's name in requests, checkpoints and paths."""

    def __init__(
        self,
        base: BaseModel,
        name: str,
        store: Store[Any],
        options: EngineOptions = EngineOptions(),
    ) -> None:
        self.base = base
        self.name = name
        self.store = store
        self.options = options
        self.on_use: Callable[[CheckpointPath], None] = lambda path: None
        """Called before a checkpoint is read or sampled from: it is in use."""
        self.jobs: dict[str, JobState] = {}
        self._shell = make_shell(base.model)
        self._head = Head(base.model.get_output_embeddings(), head_name(base.model), options.head_chunk_elements)
        self._device = self._head.weight.device
        self._samplers: OrderedDict[tuple[str, str], Adapter] = OrderedDict()
        active = install_lora_linears(base.model)
        check_head(base, self._head)
        self.trainer = Trainer(
            base,
            active,
            self._head,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            activation_checkpointing=options.activation_checkpointing,
        )
        self.sampler = Sampler(base, active, self._head, max_rows=options.max_sample_rows)

    # ------------------------------------------------------------------------------------------------- jobs

    def create_model(self, job: str, request: CreateModelRequest) -> GetInfoResponse:
        """A new job with a fresh adapter, or one that starts from a checkpoint. Without a seed, one is made
        from the job's id, so that a replay of this op gives the same adapter."""
        with _located(job, "create_model"):
            if job in self.jobs:
                raise UserError("the job exists already")
            if request.base_model != self.name:
                raise UserError(f"this worker serves {self.name}, not {request.base_model}")
            saved = self._load_checkpoint(request.from_checkpoint) if request.from_checkpoint else None
            state = self._fresh_state(job, request if saved is None else _shaped_like(request, saved[0]))
            if saved is not None:
                training_state.read_state(state, saved[1], saved[0], optimizer=request.with_optimizer)
            self.jobs[job] = state
            return self.info(job)

    def _load_checkpoint(self, text: str) -> tuple[Manifest, Checkpoint]:
        path = CheckpointPath.parse(text)
        self.on_use(path)
        manifest, checkpoint = self.store.load(path)
        if manifest.base_model != self.name:
            raise UserError(f"{path} is of {manifest.base_model}, but this worker serves {self.name}")
        return manifest, checkpoint

    def _fresh_state(self, job: str, request: CreateModelRequest) -> JobState:
        adapter = create_adapter(
            self._shell,
            request.lora,
            base_model=self.name,
            device=self._device,
            fallback_seed=int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "little"),
        )
        return JobState(
            job=job,
            base_model=self.name,
            lora=request.lora.model_copy(update={"seed": adapter.seed}),
            adapter=adapter,
            adam=AdamState.zeros_like(adapter.flat),
            user_metadata=dict(request.user_metadata or {}),
        )

    def info(self, job: str) -> GetInfoResponse:
        state = self.state(job)
        data = ModelData(
            model_id=job,
            model_name=self.name,
            lora_rank=state.lora.rank,
            arch=type(self.base.model).__name__,
            tokenizer_id=self.name,
        )
        return GetInfoResponse(model_id=job, model_name=self.name, lora_rank=state.lora.rank, model_data=data)

    def state(self, job: str) -> JobState:
        state = self.jobs.get(job)
        if state is None:
            raise JobNotFound("this worker does not hold the job", job=job)
        return state

    def drop_job(self, job: str) -> None:
        """Forget the job's state, if it is here."""
        state = self.jobs.pop(job, None)
        if state is not None:
            self.trainer.forget(state.adapter)

    def drop_gradients(self, job: str) -> bool:
        """Forget what was accumulated since the last step; True if there was anything."""
        return self.state(job).drop_gradients()

    # --------------------------------------------------------------------------------------------- training

    def run_batches(self, batches: Sequence[Batch]) -> list[ForwardBackwardOutput | Exception]:
        """The batches of many jobs in as few passes through the model as memory allows.

        For each batch, in order, what it gives or the error it failed with; nothing is raised for what one of
        them did. Batches with `backward` add to their job's gradient. If one of those fails, all that its job
        has accumulated is dropped, what other batches of the same call added included; other jobs go on as if
        it had not been there.
        """
        results: list[ForwardBackwardOutput | Exception | None] = []
        parts: list[Part] = []
        for batch in batches:
            state = self.jobs.get(batch.job)
            if state is None:
                results.append(JobNotFound("this worker does not hold the job"))
            else:
                parts.append(Part(state, batch.data, batch.loss_fn, batch.loss_fn_config, batch.backward))
                results.append(None)
        found = iter(self.trainer.run(parts))
        results = [next(found) if missing is None else missing for missing in results]
        return [
            _of(result, batch.job, "forward_backward" if batch.backward else "forward")
            for result, batch in zip(results, batches, strict=True)
        ]

    def forward(
        self,
        job: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """`run_batches` of one batch without `backward`; raises its error."""
        return _only(self.run_batches([Batch(job, data, loss_fn, loss_fn_config, backward=False)]))

    def forward_backward(
        self,
        job: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """`run_batches` of one batch; raises its error."""
        return _only(self.run_batches([Batch(job, data, loss_fn, loss_fn_config)]))

    def optim_steps(self, steps: Sequence[tuple[str, AdamParams]]) -> list[OptimStepResponse | Exception]:
        """One AdamW step of each of several jobs (each at most once), with the gradients they accumulated.

        For each, in order, its response or the error it failed with. A step whose gradient is not finite is
        refused: the gradient is dropped, and weights and moments stay as they are. The other jobs' steps do not
        depend on it.
        """
        if len({job for job, _ in steps}) < len(steps):
            raise ValueError("a job may take only one step of a cycle")
        results: list[OptimStepResponse | Exception] = [self._missing(job) for job, _ in steps]
        ready = [i for i, (job, _) in enumerate(steps) if job in self.jobs and self.jobs[job].has_gradients]
        states = [self.jobs[steps[i][0]] for i in ready]
        taken = take_steps(
            [state.adapter.flat for state in states],
            [state.adapter.require_gradients() for state in states],
            [state.adam for state in states],
            [steps[i][1] for i in ready],
        )
        for i, state, step in zip(ready, states, taken, strict=True):
            state.drop_gradients()
            if step.refused:
                results[i] = UserError(f"{step.refused}; the gradient was dropped and no step was taken")
            else:
                state.step += 1
                metrics = {"grad_norm": step.grad_norm, "learning_rate": steps[i][1].learning_rate}
                results[i] = OptimStepResponse(metrics=metrics)
        return [_of(result, job, "optim_step") for result, (job, _) in zip(results, steps, strict=True)]

    def _missing(self, job: str) -> LorryError:
        """Why there is no step to take, if there is none."""
        if job not in self.jobs:
            return JobNotFound("this worker does not hold the job")
        return UserError("nothing is accumulated: an optim_step needs a forward_backward before it")

    def optim_step(self, job: str, params: AdamParams) -> OptimStepResponse:
        """`optim_steps` of one job; raises its error."""
        return _only(self.optim_steps([(job, params)]))

    # ------------------------------------------------------------------------------------------ checkpoints

    def save_state(self, job: str, request: SaveRequest, op_id: str) -> CheckpointMetadata:
        with _located(job, "save_state"):
            state = self.state(job)
            return self._save(state, "weights", training_state.write_state(state), request, op_id)

    def save_weights_for_sampler(self, job: str, request: SaveRequest, op_id: str) -> CheckpointMetadata:
        with _located(job, "save_weights_for_sampler"):
            state = self.state(job)
            content = training_state.write_adapter(state.adapter)
            return self._save(state, "sampler_weights", content, request, op_id)

    def _save(
        self, state: JobState, kind: Kind, content: Checkpoint, request: SaveRequest, op_id: str
    ) -> CheckpointMetadata:
        manifest = self.store.save(
            CheckpointPath(state.job, kind, request.name),
            content,
            Origin(op_id, state.base_model, state.lora, state.step, state.user_metadata),
            ttl_seconds=request.ttl_seconds,
            overwrite=request.overwrite,
        )
        return manifest.metadata

    def load_state(self, job: str, request: LoadStateRequest) -> LoadWeightsResponse:
        """Put a checkpoint in the place of the job's weights, and with `optimizer` of its moments; without,
        they start from zero. A bare name is one of this job's own."""
        with _located(job, "load_state"):
            state = self.state(job)
            path = CheckpointPath.parse(request.path, job=job)
            self.on_use(path)
            manifest, checkpoint = self.store.load(path)
            dropped = training_state.read_state(state, checkpoint, manifest, optimizer=request.optimizer)
            return LoadWeightsResponse(path=str(path), optimizer=request.optimizer, dropped_gradients=dropped)

    # --------------------------------------------------------------------------------------------- sampling

    def sample(self, request: SampleRequest, should_stop: ShouldStop | None = None) -> SampleResponse:
        with _located(None, "sample"):
            adapter = self._sampler_adapter(request.model_path) if request.model_path else None
            return self.sampler.sample(
                adapter,
                request.prompt.to_ints(),
                request.num_samples,
                request.params,
                request.prompt_logprobs,
                request.topk_prompt_logprobs,
                should_stop,
            )

    def _sampler_adapter(self, model_path: str) -> Adapter:
        """The adapter at `model_path`; the last used ones stay loaded. A replaced checkpoint is read anew.

        One that expired is still served while it is loaded here: whoever is in the middle of it can finish."""
        path = CheckpointPath.parse(model_path, kind="sampler_weights")
        self.on_use(path)
        manifest = self.store.find(path, expired=True)
        if manifest is None or (manifest.expired and _version(manifest) not in self._samplers):
            manifest = self.store.manifest(path)
        key = _version(manifest)
        adapter = self._samplers.get(key)
        if adapter is None:
            manifest, checkpoint = self._load_checkpoint(str(path))
            adapter = read_adapter(checkpoint.adapter, checkpoint.adapter_config, device=self._device)
            key = _version(manifest)
            self._samplers[key] = adapter
            while len(self._samplers) > self.options.sampler_adapters:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(key)
        return adapter


def check_head(base: BaseModel, head: Head) -> None:
    """Refuse a model whose logits are not its output layer's product (scaled or capped ones, say)."""
    tokens = torch.arange(1, 9, device=head.weight.device)[None] % base.vocab_size
    with torch.no_grad():
        expected = base.model(input_ids=tokens, use_cache=False).logits[0].float()
        states = base.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        gap = (head.logits(states) - expected).abs().max().item()
    allowed = 1e-3 if head.weight.dtype == torch.float32 else 0.05
    if not gap <= allowed * max(1.0, expected.abs().max().item()):
        raise ServiceError(
            f"{type(base.model).__name__} changes the logits after its output layer, which Lorry does not know"
        )


def _only(results: Sequence[Result | Exception]) -> Result:
    [result] = results
    if isinstance(result, Exception):
        raise result
    return result


def _of(result: Result, job: str, op: str) -> Result:
    """An error says which job and op it is about."""
    if isinstance(result, LorryError):
        result.job, result.op = result.job or job, result.op or op
    return result


def _shaped_like(request: CreateModelRequest, manifest: Manifest) -> CreateModelRequest:
    return request.model_copy(update={"lora": manifest.lora})


def _version(manifest: Manifest) -> tuple[str, str]:
    return str(manifest.path), f"{manifest.op_id} {manifest.created.isoformat()}"


@contextmanager
def _located(job: str | None, op: str) -> Iterator[None]:
    """Errors that leave here say which job and op they are about."""
    try:
        yield
    except LorryError as error:
        error.job = error.job or job
        error.op = error.op or op
        raise
