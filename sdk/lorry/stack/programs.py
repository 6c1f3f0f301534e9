"""What a stack runs beside Redis: the command lines of workers and Flower, and how to see that they work."""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import platform
import re
import socket
import sys
import urllib.request
from pathlib import Path
from typing import cast

import redis

from lorry.stack.process import ProcessSpec
from lorry.stack.redis_server import HOST
from lorry.stack.state import FlowerInfo
from lorry_jobs.errors import UserError
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.paths import models_dir

# `lorry models fetch` writes this file last and then moves the whole folder into place.
MODEL_MANIFEST = "lorry-model.json"

# -P keeps the current folder off the module path: `lorry up` beside somebody's `celery.py` must not run it.
PYTHON = (sys.executable, "-P")


def worker_specs(models: list[str], workers: int) -> list[ProcessSpec]:
    """`workers` processes for each of the models, which are given as NAME or NAME=PATH."""
    return [_worker_spec(model, number) for model in models for number in range(1, workers + 1)]


def _worker_spec(model: str, number: int) -> ProcessSpec:
    name, has_path, path = model.partition("=")
    if has_path:
        model = f"{name}={Path(path).expanduser().absolute()}"
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", name) + f"-{number}"
    return ProcessSpec(
        name=f"worker-{label}",
        argv=(*PYTHON, "-m", "lorry_workers", "--model", model, "--name", label),
        ready=holds_a_lease,
    )


def holds_a_lease(url: str, pid: int) -> bool:
    """Whether the worker in this process has loaded its model and announced itself.

    The pid tells it from the workers of a run that was killed, whose leases live on for some seconds, and
    from workers on other machines. That somebody has once served the model would be no sign at all: Redis
    remembers it from run to run.
    """
    try:
        with redis.Redis.from_url(url, socket_timeout=5.0) as client:
            for worker in Mailbox(client).live_workers():
                info = json.loads(cast("bytes | None", client.hget(f"lorry:worker:{worker}", "info")) or b"{}")
                if (info.get("host"), info.get("pid")) == (platform.node(), pid):
                    return True
    except (redis.ConnectionError, redis.TimeoutError):
        pass  # asked again soon; a Redis that has ended is noticed by whoever runs it
    return False


def flower_is_installed() -> bool:
    return importlib.util.find_spec("flower") is not None


def flower_spec(url: str, port: int, login: FlowerInfo) -> ProcessSpec:
    """Flower takes every option from the environment, so that neither password shows in `ps`."""
    return ProcessSpec(
        name="flower",
        argv=(*PYTHON, "-m", "celery", "flower"),
        env={
            "CELERY_BROKER_URL": url,
            "FLOWER_ADDRESS": HOST,
            "FLOWER_PORT": str(port),
            "FLOWER_BASIC_AUTH": f"{login.user}:{login.password}",
            "FLOWER_PERSISTENT": "False",
            "FLOWER_ENABLE_EVENTS": "True",
            # By default Flower runs the `flowerconfig.py` of the current folder. Ours is none at all.
            "FLOWER_CONF": "/dev/null",
        },
        ready=lambda url, pid: _answers(login),
        stop_seconds=5.0,
    )


def _answers(flower: FlowerInfo) -> bool:
    login = base64.b64encode(f"{flower.user}:{flower.password}".encode()).decode()
    request = urllib.request.Request(f"{flower.url}/healthcheck", headers={"Authorization": f"Basic {login}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy on the way to loopback
    try:
        with direct.open(request, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def free_port(preferred: int | None = None) -> int:
    """`preferred` if nothing listens there, else a port that is free now."""
    for port in (preferred, 0) if preferred else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on {HOST}")


def default_models() -> list[str]:
    """What a stack serves if it is not told: every base model that is complete on this machine."""
    found = complete_models(models_dir())
    if not found:
        raise UserError(f"There is no base model in {models_dir()}. Fetch one: lorry models fetch smollm2")
    return found


def complete_models(folder: Path) -> list[str]:
    """Names (`smollm2`, `Qwen/Qwen3-0.6B`) of what `lorry models fetch` has brought to its end there."""
    manifests = [*folder.glob(f"*/{MODEL_MANIFEST}"), *folder.glob(f"*/*/{MODEL_MANIFEST}")]
    names = [manifest.parent.relative_to(folder) for manifest in manifests]
    # A leading dot marks a fetch in progress.
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))
