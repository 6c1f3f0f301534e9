"""`ServiceClient`: the way in. It makes training and sampling clients."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from typing import Any

from lorry_jobs import ops
from lorry_jobs.errors import SequenceConflict, UnknownModel, UserError
from lorry_jobs.results import Outcome
from lorry_jobs.types import (
    CreateModelRequest,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoraConfig,
    ModelInfo,
    SupportedModel,
)

from .background import at_once, in_background
from .checkpoint_methods import CheckpointMethods
from .checkpoints import Checkpoints
from .discovery import find_url
from .futures import APIFuture, Submission
from .process import ClientProcess, get_process
from .sampling_client import SamplingClient, note_unused
from .settings import ClientSettings
from .settled import settle
from .tokenizers import load_tokenizer, tokenizer_cache, unpack_tokenizer
from .training_client import TrainingClient

log = logging.getLogger("lorry")

MODEL_POLL_SECONDS = 0.5
"""How often to look whether the first worker ever has appeared; only while there is none."""


class ServiceClient(CheckpointMethods):
    """Connects to a Lorry server.

    `base_url`: `redis://[:password@]host:port/db`. Without it: LORRY_URL, else the stack that `lorry up` or
    `lorry.local()` runs on this machine, else an error that says how to start one.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        user_metadata: dict[str, str] | None = None,
    ) -> None:
        if api_key is not None:
            raise UserError("api_key is for the HTTP gateway; a redis:// address has its password in the URL")
        self._process: ClientProcess = get_process(ClientSettings(url=find_url(base_url)))
        self._user_metadata = user_metadata
        self._session = secrets.token_hex(5)
        self._process.open_session(self._session)
        self._checkpoints = Checkpoints(self._process, self._session)
        self._lock = threading.Lock()
        self._next_model = 0
        self._tokenizers: dict[str, Any] = {}
        self._models: dict[str, ModelInfo] = {}

    # ------------------------------------------------------------------------------------------- training clients

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        """Start a training run: a fresh LoRA adapter on `base_model`. Waits until a worker has made it.

        Raises UnknownModel if workers are there and none has ever served this model. While there is no worker at
        all it waits, and says so.
        """
        lora = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed)
        return self._create(CreateModelRequest(base_model=base_model, lora=lora, user_metadata=user_metadata)).result()

    def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
    ) -> Submission[TrainingClient]:
        """One await gives the client."""
        lora = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=train_unembed)
        request = CreateModelRequest(base_model=base_model, lora=lora, user_metadata=user_metadata)
        return Submission(self._create(request), levels=1)

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None, weights_access_token: str | None = None
    ) -> TrainingClient:
        """A new run that starts from a checkpoint's weights; the optimizer is new.

        `path`: of any scheme, or a bare name. `weights_access_token` is not needed here, see `load_state`.
        """
        note_unused(weights_access_token=weights_access_token)
        return self._create(self._from_state(path, user_metadata, with_optimizer=False)).result()

    def create_training_client_from_state_async(
        self, path: str, user_metadata: dict[str, str] | None = None, weights_access_token: str | None = None
    ) -> Submission[TrainingClient]:
        note_unused(weights_access_token=weights_access_token)
        return Submission(self._create(self._from_state(path, user_metadata, with_optimizer=False)), levels=1)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None, weights_access_token: str | None = None
    ) -> TrainingClient:
        """A new run that goes on exactly where the checkpoint was saved."""
        note_unused(weights_access_token=weights_access_token)
        return self._create(self._from_state(path, user_metadata, with_optimizer=True)).result()

    def create_training_client_from_state_with_optimizer_async(
        self, path: str, user_metadata: dict[str, str] | None = None, weights_access_token: str | None = None
    ) -> Submission[TrainingClient]:
        note_unused(weights_access_token=weights_access_token)
        return Submission(self._create(self._from_state(path, user_metadata, with_optimizer=True)), levels=1)

    def create_lora_training_client_from_state(
        self, checkpoint_state: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """As `create_training_client_from_state_with_optimizer`; a `.result()` on what it returns does no harm."""
        return settle(self.create_training_client_from_state_with_optimizer(checkpoint_state, user_metadata))

    def create_lora_training_client_from_state_async(
        self, checkpoint_state: str, user_metadata: dict[str, str] | None = None
    ) -> Submission[TrainingClient]:
        return self.create_training_client_from_state_with_optimizer_async(checkpoint_state, user_metadata)

    # ------------------------------------------------------------------------------------------- sampling clients

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None, retry_config: object | None = None
    ) -> SamplingClient:
        """Sample from a checkpoint (`model_path`: of any scheme or kind, or a bare name), or from `base_model` itself.

        `retry_config` is not needed: a request is kept on the server until a worker has answered it.
        """
        note_unused(retry_config=retry_config)
        if model_path is not None:
            found = self._checkpoints.to_use(model_path, ("sampler_weights", "weights"))
            if base_model is not None and base_model != found.base_model:
                raise UserError(f"{found.path} is an adapter of {found.base_model}, not of {base_model}")
            return SamplingClient(self, self._process, self._model_info(found.base_model), checkpoint=found)
        if base_model is None:
            raise UserError("create_sampling_client needs a model_path or a base_model")
        return SamplingClient(self, self._process, self._model_info(base_model))

    def create_sampling_client_async(
        self, model_path: str | None = None, base_model: str | None = None, retry_config: object | None = None
    ) -> Submission[SamplingClient]:
        def create() -> SamplingClient:
            return self.create_sampling_client(model_path, base_model, retry_config)

        if model_path is None and base_model is not None and base_model not in self._known_models():
            return in_background(self._process, "create_sampling_client", create)
        return at_once(self._process, "create_sampling_client", create)

    def create_sampling_client_from_checkpoint(self, checkpoint_name: str) -> SamplingClient:
        """As `create_sampling_client(model_path)`; a `.result()` on what it returns does no harm."""
        return settle(self.create_sampling_client(checkpoint_name))

    def create_sampling_client_from_checkpoint_async(self, checkpoint_name: str) -> Submission[SamplingClient]:
        return self.create_sampling_client_async(checkpoint_name)

    # ------------------------------------------------------------------------------------------------ information

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """The base models that live workers serve now."""

        def ask() -> list[SupportedModel]:
            mailbox = self._process.mailbox
            found = []
            for name, text in sorted(mailbox.models().items()):
                workers = len(mailbox.live_workers(name))
                if workers:
                    info = ModelInfo.model_validate_json(text)
                    found.append(
                        SupportedModel(model_name=name, max_context_length=info.context_length, workers=workers)
                    )
            return found

        return GetServerCapabilitiesResponse(supported_models=self._process.call(ask))

    def get_server_capabilities_async(self) -> Submission[GetServerCapabilitiesResponse]:
        return at_once(self._process, "get_server_capabilities", self.get_server_capabilities)

    def get_tokenizer(self, base_model: str) -> Any:
        """The tokenizer of a base model that this server knows; no model hub is asked."""
        with self._lock:
            if base_model not in self._tokenizers:
                info = self._model_info(base_model)
                cache = tokenizer_cache()
                folder = cache / info.tokenizer_sha256
                if not folder.is_dir():
                    archive = self._process.call(lambda: self._process.mailbox.get_tokenizer(info.tokenizer_sha256))
                    if archive is None:
                        raise UnknownModel(
                            f"the server has no tokenizer of {base_model}; restart a worker that serves it"
                        )
                    folder = unpack_tokenizer(archive, cache)
                self._tokenizers[base_model] = load_tokenizer(folder)
            return self._tokenizers[base_model]

    def close(self) -> None:
        """Say that this session's training runs are not needed any more: the server drops them once their ops
        are done. Checkpoints stay. Without it, that happens when nothing was heard of this process for hours."""
        self._process.end_session(self._session)

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ServiceClient session {self._session}>"

    # -------------------------------------------------------------------------------------------------- internals

    def _create(self, request: CreateModelRequest) -> APIFuture[TrainingClient]:
        with self._lock:
            number, self._next_model = self._next_model, self._next_model + 1
        job = f"{self._session}:train:{number}"
        if request.user_metadata is None and self._user_metadata:
            request = request.model_copy(update={"user_metadata": self._user_metadata})
        spec = request.model_dump_json()
        settings = self._process.settings
        self._refuse_unknown(request.base_model)

        def register() -> None:
            answer = self._process.mailbox.create(
                job,
                request.base_model,
                spec,
                session=self._session,
                window=settings.window,
                max_ops=settings.max_queued_ops,
                max_bytes=settings.max_queued_bytes,
            )
            if answer == "conflict":
                raise SequenceConflict("another job has this id already; make a new ServiceClient", job=job)

        def client(outcome: Outcome) -> TrainingClient:
            info = GetInfoResponse(**{k: v for k, v in outcome.info.items() if k in GetInfoResponse.model_fields})
            return TrainingClient(self, self._process, info, self._model_info(request.base_model))

        return self._process.submit_op(job, 0, ops.CREATE_MODEL, spec.encode(), client, before=register)

    def _from_state(
        self, path: str, user_metadata: dict[str, str] | None, *, with_optimizer: bool
    ) -> CreateModelRequest:
        # Without its optimizer, an adapter that was saved for sampling is as good a start.
        found = self._checkpoints.to_use(path, ("weights",) if with_optimizer else ("weights", "sampler_weights"))
        return CreateModelRequest(
            base_model=found.base_model,
            from_checkpoint=found.path,
            with_optimizer=with_optimizer,
            user_metadata=user_metadata,
        )

    def _known_models(self) -> dict[str, str]:
        return self._process.call(self._process.mailbox.models)

    def _refuse_unknown(self, base_model: str) -> None:
        known = self._known_models()
        if base_model not in known and self._process.call(self._process.mailbox.live_workers):
            raise UnknownModel(
                f"no worker has ever served '{base_model}' here; served are: {', '.join(sorted(known))}. "
                f"Check the name, or start one: lorry worker --model {base_model}"
            )

    def _model_info(self, base_model: str) -> ModelInfo:
        """What a worker said of the model. Waits for the first worker, if there has never been one, and says so."""
        say_at = time.monotonic() + self._process.settings.notice_after_seconds
        while base_model not in self._models:
            text = self._known_models().get(base_model)
            if text is not None:
                self._models[base_model] = ModelInfo.model_validate_json(text)
                break
            self._refuse_unknown(base_model)
            if time.monotonic() > say_at:
                say_at = math.inf
                log.warning(
                    "no live worker serves '%s'; waiting until one appears: lorry worker --model %s",
                    base_model,
                    base_model,
                )
            time.sleep(MODEL_POLL_SECONDS)
        return self._models[base_model]
