"""`python -m lorry_workers.health`: exit code 0 while a worker on this host has a live lease."""

from __future__ import annotations

import json
import platform
import sys

from lorry_jobs.mailbox import Mailbox
from lorry_jobs.redis_client import connect

from .settings import WorkerSettings


def main() -> int:
    redis = connect(WorkerSettings(), name="lorry-health")
    host = platform.node()
    for worker in Mailbox(redis).live_workers():
        info = redis.hget(f"lorry:worker:{worker}", "info")
        if info and json.loads(info)["host"] == host:
            print(f"{worker} is alive")
            return 0
    print(f"no worker on {host} has a live lease", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
