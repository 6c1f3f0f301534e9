"""What the chain costs with an engine that does nothing, against a plain Celery task on the same Redis.

Keys: celery_ops_s, ops_s_1, ops_s_8, ops_s_64, ops_s_1000 (pipelined, by number of jobs), p50_ms, p99_ms (one job,
each op awaited), bytes_per_idle_job, bytes_per_queued_op (memory in Redis).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import redis
from celery import Celery

sys.path.insert(0, str(Path(__file__).parent.parent))

import lorry
from benchmarks._null_worker import MODEL, worker_spec
from benchmarks._report import in_turn, median, options, report
from lorry.stack import Stack, StackSettings
from lorry_jobs.mailbox import Mailbox

IN_FLIGHT = 64
DATUM = lorry.Datum(lorry.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})


def plain_app(url: str) -> Celery:
    """Celery as it comes, with the same pool and the same number of threads in use."""
    app = Celery("plain", broker=url, backend=url, set_as_current=False)
    app.conf.update(task_default_queue="plain", worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)

    @app.task(name="plain.nothing")
    def nothing(job: str, seq: int) -> int:
        return seq

    return app


def plain_ops_per_second(app: Celery, count: int) -> float:
    """IN_FLIGHT tasks at a time, each result read."""
    task = app.tasks["plain.nothing"]
    started = time.perf_counter()
    pending = []
    for seq in range(count):
        pending.append(task.apply_async(("job", seq)))
        if len(pending) >= IN_FLIGHT:
            pending.pop(0).get(timeout=60)
    for result in pending:
        result.get(timeout=60)
    return count / (time.perf_counter() - started)


def chain_ops_per_second(clients: list[lorry.TrainingClient], count: int) -> float:
    """The same number in flight, spread over the jobs."""
    started = time.perf_counter()
    pending: list[lorry.APIFuture[lorry.ForwardBackwardOutput]] = []
    for number in range(count):
        pending.append(clients[number % len(clients)].forward_backward([DATUM]))
        if len(pending) >= max(IN_FLIGHT, 2 * min(len(clients), count // 4)):
            pending.pop(0).result(60)
    for future in pending:
        future.result(60)
    return count / (time.perf_counter() - started)


def latencies_ms(client: lorry.TrainingClient, count: int) -> list[float]:
    found = []
    for _ in range(count):
        started = time.perf_counter()
        client.forward_backward([DATUM]).result(60)
        found.append((time.perf_counter() - started) * 1000)
    return sorted(found)


def make_clients(service: lorry.ServiceClient, count: int) -> list[lorry.TrainingClient]:
    made: list[lorry.TrainingClient] = []

    def some(share: int) -> None:
        for _ in range(share):
            made.append(service.create_lora_training_client(MODEL, rank=1))

    threads = [threading.Thread(target=some, args=(count // 4 + (n < count % 4),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def bytes_per_idle_job(client: redis.Redis, jobs: int) -> float:
    """Memory of a job that was created and has nothing queued."""
    mailbox = Mailbox(client)
    before = used_memory(client)
    for number in range(jobs):
        mailbox.create(
            f"idle:{number}",
            "nobody",
            '{"base_model":"nobody"}',
            session=f"s{number}",
            window=4,
            max_ops=4096,
            max_bytes=2**28,
        )
    return (used_memory(client) - before) / jobs


def bytes_per_queued_op(client: redis.Redis, service: lorry.ServiceClient, ops: int) -> float:
    """Memory of a small op that waits in a job's mailbox (no worker takes it)."""
    before = used_memory(client)
    mailbox = Mailbox(client)
    mailbox.create("queued", "nobody", "{}", session="s", window=4, max_ops=10**6, max_bytes=2**28)
    envelope = "x" * 900  # what a kombu envelope of an op weighs
    for seq in range(ops):
        mailbox.submit(
            "queued",
            seq,
            envelope=envelope,
            payload=b"y" * 100,
            digest=b"0" * 16,
            task=f"q.{seq}",
            channel="",
            ttl=60,
            max_total_bytes=2**32,
        )
    return (used_memory(client) - before) / ops


def used_memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def main() -> None:
    args = options(__doc__ or "")
    count = 1000 if args.quick else 4000
    sizes = (1, 8, 64) if args.quick else (1, 8, 64, 1000)
    home = Path(tempfile.mkdtemp(prefix="lorry-bench-"))
    settings = StackSettings(home=home, url=None, flower=False, models=[])
    figures: dict[str, float] = {}
    with Stack(settings, processes=[worker_spec(1, slots=1024)], started_by="benchmark") as stack:
        plain = plain_app(stack.url)
        worker = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.control_plane import plain_app; "
                "plain_app(sys.argv[2]).worker_main(['worker', '-P', 'threads', '-c', '64', '-l', 'ERROR', "
                "'--without-gossip', '--without-mingle'])",
                str(Path(__file__).parent.parent),
                stack.url,
            ]
        )
        try:
            service = lorry.ServiceClient(base_url=stack.url)
            clients = {size: make_clients(service, size) for size in sizes}
            plain.tasks["plain.nothing"].apply_async(("job", 0)).get(timeout=60)
            contenders = {"celery": lambda: plain_ops_per_second(plain, count)}
            for size in sizes:
                contenders[f"{size}"] = lambda size=size: chain_ops_per_second(clients[size], count)
            found = in_turn(1 if args.quick else 3, contenders)
            waits = latencies_ms(clients[1][0], count // 4)
            with redis.Redis.from_url(stack.url) as client:
                figures["bytes_per_idle_job"] = bytes_per_idle_job(client, 2000)
                figures["bytes_per_queued_op"] = bytes_per_queued_op(client, service, 2000)
        finally:
            worker.terminate()
            worker.wait(30)
    celery = median(found["celery"])
    figures["celery_ops_s"] = celery
    rows: list[tuple[str, ...]] = [("", "ops/s", "of plain Celery"), ("plain Celery task", f"{celery:.0f}", "1.00")]
    for size in sizes:
        speed = median(found[f"{size}"])
        figures[f"ops_s_{size}"] = speed
        rows.append((f"chains of {size} jobs", f"{speed:.0f}", f"{speed / celery:.2f}"))
    figures["p50_ms"], figures["p99_ms"] = waits[len(waits) // 2], waits[int(len(waits) * 0.99)]
    rows.append(("each op awaited, p50 / p99", f"{figures['p50_ms']:.1f} / {figures['p99_ms']:.1f} ms", ""))
    rows.append(("Redis memory per idle job", f"{figures['bytes_per_idle_job']:.0f} B", ""))
    rows.append(("Redis memory per queued op", f"{figures['bytes_per_queued_op']:.0f} B", ""))
    report("Control plane, engine that does nothing", rows, figures, args.json)


if __name__ == "__main__":
    main()
