"""Start a worker: load the model, then run Celery with the runtime as one of its bootsteps."""

from __future__ import annotations

import hashlib
import logging
import platform

import torch

from lorry_jobs.celery_app import create_app
from lorry_jobs.mailbox import queue_name
from lorry_jobs.settings import MAX_WINDOW
from lorry_jobs.types import ModelInfo

from .base_model import BaseModel, load_base_model, parse_model_spec, resolve_model_path
from .consumer import PatientConsumer
from .engine.engine import Engine, EngineOptions
from .engine.opening import open_store
from .runtime import Runtime, new_worker_id
from .settings import WorkerSettings
from .tasks import register_tasks, runtime_step
from .tokenizer_files import pack_tokenizer

log = logging.getLogger(__name__)

SPARE_THREADS = 8


def run_worker(model: str, settings: WorkerSettings, *, name: str | None = None) -> int:
    """Serve one base model until stopped. Returns the process's exit code."""
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.info("settings:\n%s", settings.describe())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model_name, location = parse_model_spec(model)
    worker = new_worker_id(name or f"{model_name.rsplit('/', 1)[-1]}@{platform.node()}".replace("@", "-"))
    base = _load(location, settings)
    log.info("worker %s serves %s on %s", worker, model_name, _device(settings))
    archive = pack_tokenizer(base.tokenizer, base.config)
    info = ModelInfo(
        name=model_name,
        vocab_size=base.vocab_size,
        context_length=base.context_length,
        arch=str(base.config.model_type),
        parameters=sum(parameter.numel() for parameter in base.model.parameters()),
        tokenizer_sha256=hashlib.sha256(archive).hexdigest(),
        eos_token_ids=list(base.eos_token_ids),
    )
    engine = Engine(base, model_name, open_store(settings.store_location), _options(settings))
    return serve(worker, lambda: Runtime(worker, engine, info, archive, settings), settings)


def _load(location: str, settings: WorkerSettings) -> BaseModel:
    device = _device(settings)
    kind = settings.dtype
    if kind == "auto":
        kind = "bfloat16" if device == "cuda" else "float32"
    path = resolve_model_path(location, settings.models_dir)
    return load_base_model(path, dtype=getattr(torch, kind), device=device)


def _device(settings: WorkerSettings) -> str:
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _options(settings: WorkerSettings) -> EngineOptions:
    return EngineOptions(
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch or (1024 if _device(settings) == "cpu" else 4096),
        activation_checkpointing=settings.activation_checkpointing,
    )


def serve(worker: str, make_runtime, settings: WorkerSettings) -> int:  # type: ignore[no-untyped-def]
    app = create_app(settings, client_name=f"lorry-worker-{worker}")
    step, runtime = runtime_step(make_runtime)
    app.steps["worker"].add(step)
    register_tasks(app, runtime)
    app.finalize()
    celery_worker = app.Worker(
        hostname=f"{worker}@{platform.node()}",
        queues=[queue_name(worker)],
        pool_cls="threads",
        # A thread per op that may be here at once: they only wait, cost about 60 kB each, and start when needed.
        concurrency=settings.slots * MAX_WINDOW + settings.seats + SPARE_THREADS,
        loglevel=settings.log_level.upper(),
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=False,
        consumer_cls=PatientConsumer,
    )
    celery_worker.start()
    return int(celery_worker.exitcode or 0)
