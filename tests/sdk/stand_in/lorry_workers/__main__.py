"""Not a worker: a process with a worker's command line, its sign of readiness and its way to stop.

The tests of the stack put this folder first on PYTHONPATH, to see processes start, die and stop within
milliseconds. What the real worker does under a stack is tested end to end, elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time

import redis

from lorry_jobs.mailbox import Mailbox


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--name", required=True)
    given = options.parse_args()
    name = given.model.partition("=")[0]
    if name == "broken":
        print("stand-in: this model cannot be loaded")
        sys.exit(3)
    signal.signal(signal.SIGTERM, _stop)
    if name != "never-ready":
        about = json.dumps({"host": platform.node(), "pid": os.getpid()})
        with redis.Redis.from_url(os.environ["LORRY_URL"]) as client:
            Mailbox(client).hello(
                f"{given.name}-{os.getpid()}",
                name,
                slots=1,
                seats=1,
                lease_seconds=60,
                info=about,
                model_info="{}",
            )
    print(f"stand-in: {given.name} serves {name}")
    while True:
        time.sleep(60)


def _stop(*_: object) -> None:
    print("stand-in: warm stop")
    sys.exit(0)


main()
