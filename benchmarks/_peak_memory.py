"""How much memory one forward_backward needs at its peak, over what the process held before it, in bytes.

Run as a program, `_peak_memory.py MODEL TOKENS`: each measurement needs a process of its own, because memory that
one has freed may be used by the next without being seen.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LENGTH = 512  # of each sequence


def measure(model: Path, tokens: int) -> int:
    """For `tokens` tokens, a multiple of `LENGTH`, with an adapter on every layer, the output layer included."""
    command = [sys.executable, str(Path(__file__)), str(model), str(tokens)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(found.stdout.split()[-1])


def measure_here(model: Path, tokens: int) -> int:
    import numpy as np
    import torch

    from lorry_jobs.types import CreateModelRequest, Datum, LoraConfig, ModelInput
    from lorry_workers.base_model import load_base_model
    from lorry_workers.engine.checkpoints import CheckpointStore
    from lorry_workers.engine.engine import Engine

    torch.set_num_threads(2)
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as store:
        engine = Engine(load_base_model(str(model), dtype=torch.float32, device="cpu"), "m", CheckpointStore(store))
        engine.create_model("job", CreateModelRequest(base_model="m", lora=LoraConfig(rank=16)))

        def forward_backward(rows: int, length: int) -> None:
            ids = random.integers(0, engine.base.vocab_size, (rows, length + 1))
            data = [Datum(ModelInput.from_ints(row[:-1]), {"target_tokens": row[1:]}) for row in ids]
            engine.forward_backward("job", data, "cross_entropy")

        forward_backward(1, 8)  # what is made once: gradients, the bank, torch's own
        forget_peak()
        before = resident_bytes()
        forward_backward(tokens // LENGTH, LENGTH)
        return peak_bytes() - before


def forget_peak() -> None:
    """Let the peak start from now. Where the system cannot (outside of Linux), it is that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak before the measurement counts as well: it may be too small", file=sys.stderr)


def peak_bytes() -> int:
    if (kibibytes := _status("VmHWM")) is not None:
        return kibibytes * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int:
    """What the process holds now; without /proc, the most that it ever held."""
    kibibytes = _status("VmRSS")
    return peak_bytes() if kibibytes is None else kibibytes * 1024


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    print(measure_here(Path(sys.argv[1]), int(sys.argv[2])))
