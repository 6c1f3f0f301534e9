"""How throughput grows with workers whose engine sleeps for a fixed time.

Keys: speedup_2, speedup_4, speedup_8 (throughput over one worker's).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import lorry
from benchmarks._null_worker import worker_spec
from benchmarks._report import options, report
from benchmarks.control_plane import DATUM, make_clients
from lorry.stack import Stack, StackSettings

SLEEP_SECONDS = 0.1
JOBS_PER_WORKER = 2


def throughput(workers: int, seconds: float) -> float:
    """Ops per second of `workers` workers with two jobs each, each kept two ops ahead."""
    home = Path(tempfile.mkdtemp(prefix="lorry-bench-"))
    settings = StackSettings(home=home, url=None, flower=False, models=[])
    specs = [worker_spec(n, sleep_seconds=SLEEP_SECONDS, slots=JOBS_PER_WORKER) for n in range(workers)]
    with Stack(settings, processes=specs, started_by="benchmark") as stack:
        clients = make_clients(lorry.ServiceClient(base_url=stack.url), workers * JOBS_PER_WORKER)
        ahead = [[client.forward_backward([DATUM]) for _ in range(3)] for client in clients]
        for queue in ahead:  # warm
            queue.pop(0).result(60)
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            for client, queue in zip(clients, ahead, strict=True):
                queue.append(client.forward_backward([DATUM]))
                queue.pop(0).result(60)
                done += 1
        elapsed = time.perf_counter() - started
        for queue in ahead:
            for future in queue:
                future.result(60)
    return done / elapsed


def main() -> None:
    args = options(__doc__ or "")
    sizes = (1, 2, 4) if args.quick else (1, 2, 4, 8)
    seconds = 3.0 if args.quick else 10.0
    speeds = {workers: throughput(workers, seconds) for workers in sizes}
    rows: list[tuple[str, ...]] = [("workers", "ops/s", "speed-up", "of ideal")]
    figures = {}
    for workers, speed in speeds.items():
        gain = speed / speeds[1]
        rows.append((f"{workers}", f"{speed:.1f}", f"{gain:.2f}", f"{gain / workers:.2f}"))
        if workers > 1:
            figures[f"speedup_{workers}"] = gain
    report(f"Scale-out, engine sleeps {SLEEP_SECONDS * 1000:.0f} ms per op", rows, figures, args.json)


if __name__ == "__main__":
    main()
