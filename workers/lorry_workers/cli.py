"""`lorry worker`, which this package adds to the command line (`lorry models` is in `models_cli`)."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def worker(
    model: Annotated[
        str,
        typer.Option(help="NAME, or NAME=PATH: a folder, a .gguf file, a name under the models folder, or a hub id."),
    ],
    name: Annotated[str | None, typer.Option(help="How this worker is called in Flower.")] = None,
    slots: Annotated[int | None, typer.Option(help="Jobs held at once.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the base model: auto, float32 or bfloat16.")] = None,
    threads: Annotated[int | None, typer.Option(help="Torch's CPU threads.")] = None,
    url: Annotated[str | None, typer.Option(help="Redis; default: LORRY_URL.")] = None,
) -> None:
    """Serve one base model: train and sample for every client of this Redis."""
    # OpenMP's threads spin while they wait, by default for milliseconds, and take the cores from Celery, Redis and
    # clients on the same machine. Not to spin at all is worse: to wake a thread takes longer than many a product.
    # About 30 microseconds were best of what was tried. It is read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    from .settings import WorkerSettings
    from .worker import run_worker

    given = {"slots": slots, "device": device, "dtype": dtype, "threads": threads, "url": url}
    settings = WorkerSettings(**{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    if settings.url is None:
        raise typer.BadParameter("say where Redis is: --url or LORRY_URL, for example redis://:password@host:6379/0")
    raise typer.Exit(run_worker(model, settings, name=name))
