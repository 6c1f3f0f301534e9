"""What the service costs per training step, against a bare torch + peft loop in the same run.

    floor      the bare loop
    serial     through the service, each step awaited before the next is submitted
    pipelined  through the service, one step submitted ahead

Keys: floor_ms, serial_ms, pipelined_ms (tiny model, medians), smollm2_ratio (tokens/s over the bare loop's).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tiny models of the tests

import lorry
from benchmarks._bare import BareLoop
from benchmarks._report import in_turn, median, options, report
from lorry_jobs.paths import models_dir
from tests.tiny_models import make_tiny_qwen3

THREADS = 2
RANK = 16
ADAM = lorry.AdamParams(learning_rate=1e-4)


def main() -> None:
    args = options(__doc__ or "")
    torch.set_num_threads(THREADS)
    folder = Path(tempfile.mkdtemp(prefix="lorry-bench-"))
    make_tiny_qwen3(folder / "tiny")
    smollm2 = models_dir() / "smollm2"

    tiny = measure("tiny", folder / "tiny", batch=8, length=64, rounds=3 if args.quick else 9, steps=20)
    rows: list[tuple[str, ...]] = [("model", "floor ms", "serial ms", "pipelined ms", "tokens/s over floor")]
    rows.append(row("tiny, 8 × 64", tiny))
    figures = {f"{name}_ms": tiny[name] for name in ("floor", "serial", "pipelined")}
    if smollm2.is_dir():
        real = measure("smollm2", smollm2, batch=4, length=128, rounds=2 if args.quick else 4, steps=2)
        rows.append(row("SmolLM2-135M, 4 × 128", real))
        figures["smollm2_ratio"] = real["floor"] / real["pipelined"]
    else:
        print(f"SmolLM2 is not in {models_dir()} (lorry models fetch smollm2): left out", file=sys.stderr)
    report("Time of a training step (medians)", rows, figures, args.json)


def row(name: str, found: dict[str, float]) -> tuple[str, ...]:
    times = (f"{found[key]:.1f}" for key in ("floor", "serial", "pipelined"))
    return (name, *times, f"{found['floor'] / found['pipelined']:.2f}")


def measure(name: str, model: Path, *, batch: int, length: int, rounds: int, steps: int) -> dict[str, float]:
    """Median milliseconds per step of the three contenders."""
    bare = BareLoop(model, rank=RANK)
    vocabulary = bare.model.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1))
    with lorry.local(model=f"{name}={model}"):
        client = lorry.ServiceClient().create_lora_training_client(name, rank=RANK, train_unembed=False)
        data = [lorry.Datum(lorry.ModelInput.from_ints(line[:-1]), {"target_tokens": line[1:]}) for line in tokens]
        contenders: dict[str, Callable[[], float]] = {
            "floor": lambda: per_step(steps, lambda n: [bare.step(tokens) for _ in range(n)]),
            "serial": lambda: per_step(steps, lambda n: serial(client, data, n)),
            "pipelined": lambda: per_step(steps, lambda n: pipelined(client, data, n)),
        }
        for warm_up in contenders.values():
            warm_up()
        found = in_turn(rounds, contenders)
    return {key: median(values) for key, values in found.items()}


def per_step(steps: int, run: Callable[[int], object]) -> float:
    started = time.perf_counter()
    run(steps)
    return (time.perf_counter() - started) / steps * 1000


def serial(client: lorry.TrainingClient, data: list[lorry.Datum], steps: int) -> None:
    for _ in range(steps):
        forward_backward = client.forward_backward(data, "cross_entropy")
        optim_step = client.optim_step(ADAM)
        forward_backward.result()
        optim_step.result()


def pipelined(client: lorry.TrainingClient, data: list[lorry.Datum], steps: int) -> None:
    ahead = None
    for _ in range(steps):
        following = (client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM))
        if ahead is not None:
            ahead[0].result()
            ahead[1].result()
        ahead = following
    assert ahead is not None
    ahead[0].result()
    ahead[1].result()


if __name__ == "__main__":
    main()
