"""A client process with very many futures that nothing has resolved yet; prints what they cost as JSON.

    python -m tests.end_to_end.many_futures REDIS_URL COUNT

The process plays the worker, too: it commits everything at the end, so that every future resolves.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import psutil

import lorry
from tests.sdk.by_hand import MODEL, HandWorker

JOBS = 20


def main(url: str, count: int) -> dict[str, object]:
    hand = HandWorker(url)
    hand.hello()
    service = lorry.ServiceClient(url)
    clients = []
    for _ in range(JOBS):
        creating = service.create_lora_training_client_async(MODEL)
        hand.create(str(creating.job))
        clients.append(creating.result(60))
    clients[0].forward_async  # noqa: B018  loaded before anything is measured
    outbox = service._process._outbox
    warm = [client.optim_step() for client in clients]
    outbox.flush(60)
    threads_before = sorted(thread.name for thread in threading.enumerate())
    memory = psutil.Process().memory_info
    futures, points = [*warm], [(len(warm), memory().rss, 0.0)]
    started = time.monotonic()
    for part in range(1, 11):
        while len(futures) < count * part // 10:
            futures += [client.optim_step() for client in clients]
        outbox.flush(120)
        points.append((len(futures), memory().rss, time.monotonic() - started))
    assert not any(future.done() for future in futures)
    threads = sorted(thread.name for thread in threading.enumerate())
    started = time.monotonic()
    for client in clients:
        hand.commit_steps(client.model_id, len(futures) // JOBS)
    values = [future.result(120).metrics["seq"] for future in futures]
    return {
        "points": points,
        "threads_before": threads_before,
        "threads": threads,
        "right": values == [float(str(future.seq)) for future in futures],
        "left": len(service._process._listener.outstanding()),
        "resolve_seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
