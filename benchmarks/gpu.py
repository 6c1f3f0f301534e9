"""Training speed and memory of the engine on a CUDA GPU: Qwen3 of about 0.6B and 4B with random weights in bfloat16.

The weights are made on the spot, so nothing is downloaded. The engine runs in this process, without the service.
Each line is a cycle (one forward_backward and one optim_step of every job) against a bare torch + peft loop on the
same model, which runs the jobs one after the other. Under five minutes on a recent GPU; where there is none it says
so and measures nothing. `--tiny --device cpu` runs the same code on a model that a CPU manages in seconds.

Keys, for every model (`0.6b`, `4b`) and case (`one`, `eight`, `eight_short`): <model>_<case>_tokens_s, _ratio,
_utilisation, _peak_gb; matrix_tflops.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks._bare import BareLoop, twin
from benchmarks._cases import Case, rectangular
from benchmarks._matrix import base_flops, matrix_rate, product_parameters, synchronize, utilisation
from benchmarks._report import in_turn, median, report
from lorry_jobs.types import AdamParams, CreateModelRequest, LoraConfig
from lorry_workers.base_model import BaseModel
from lorry_workers.engine.checkpoints import CheckpointStore
from lorry_workers.engine.engine import Batch, Engine

ADAM = AdamParams(learning_rate=1e-4)
ROUNDS = 3


@dataclass(frozen=True)
class Size:
    """What is measured: models by name, cases by (jobs, sequences, tokens), seconds per turn."""

    models: dict[str, dict[str, int]]
    cases: dict[str, tuple[int, int, int]]
    seconds: float
    matrix: int


QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
FULL = Size(
    models={
        "0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        | {"num_attention_heads": 16},
        "4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
        | {"num_attention_heads": 32},
    },
    cases={"one": (1, 8, 512), "eight": (8, 1, 512), "eight_short": (8, 1, 64)},
    seconds=3.0,
    matrix=8192,
)
TINY = Size(
    models={
        "tiny": {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 500, "hidden_size": 64}
        | {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    },
    cases={"one": (1, 2, 32), "eight": (8, 1, 32), "eight_short": (8, 1, 8)},
    seconds=0.05,
    matrix=256,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="of torch; default: cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU manages, to try the script")
    parser.add_argument("--quick", action="store_true", help="shorter turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the line of JSON there")
    args = parser.parse_args()
    device = torch.device(args.device or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here: nothing was measured. Try the script with --tiny --device cpu.", file=sys.stderr)
        # `make bench` goes on with the next one. Who asked for a GPU by name is told by the exit status.
        return 2 if args.device else 0
    size = TINY if args.tiny else FULL
    seconds = size.seconds / 3 if args.quick else size.seconds

    rate = matrix_rate(torch.bfloat16, device, size=size.matrix, times=10)
    figures = {"matrix_tflops": rate / 1e12}
    rows: list[tuple[str, ...]] = [
        ("model", "jobs × sequences × tokens", "tokens/s", "bare", "ratio", "util.", "peak GB")
    ]
    for name, sizes in size.models.items():
        base = make_base(sizes, device)
        for case, shape in size.cases.items():
            found = measure(base, rectangular(*shape, sizes["vocab_size"]), device, seconds, rate)
            rows.append((name, " × ".join(map(str, shape)), *found.cells()))
            figures |= {f"{name}_{case}_{key}": value for key, value in found.figures().items()}
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report(f"{what}: bfloat16 matrix rate {rate / 1e12:.1f} TFLOP/s", rows, figures, args.json)
    return 0


@dataclass(frozen=True)
class Found:
    """Peaks are in bytes, 0 where the device does not tell. `bare` None: it does not fit into memory."""

    tokens_per_second: float
    bare: float | None
    utilisation: float
    peak: int

    def cells(self) -> tuple[str, ...]:
        bare = ("does not fit", "") if self.bare is None else (f"{self.bare:.0f}", f"{self.ratio:.2f}")
        return (f"{self.tokens_per_second:.0f}", *bare, f"{self.utilisation:.2f}", f"{self.peak / 1e9:.1f}")

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.bare if self.bare else 0.0

    def figures(self) -> dict[str, float]:
        figures = {"tokens_s": self.tokens_per_second, "utilisation": self.utilisation, "peak_gb": self.peak / 1e9}
        return figures if self.bare is None else {**figures, "ratio": self.ratio}


def make_base(sizes: dict[str, int], device: torch.device) -> Any:
    """A Qwen3 with random weights in bfloat16, embedding and output layer tied as in those that are published."""
    config = Qwen3Config(**sizes, max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def measure(base: Any, case: Case, device: torch.device, seconds: float, rate: float) -> Found:
    """Engine and bare loop in turn, both on the weights of `base`, which stays as it is."""
    gc.collect()  # models have reference cycles: those of the case before would count as this one's memory
    parameters = product_parameters(base)
    with tempfile.TemporaryDirectory() as store:
        run_cycle = engine_cycle(twin(base), case, store)
        for _ in range(2):
            run_cycle()
        peak = peak_of(run_cycle, device)
        contenders = {"engine": lambda: tokens_per_second(run_cycle, case, device, seconds)}
        bare: float | None = None
        try:
            run_bare = bare_cycle(base, case, device)
            run_bare()
        except torch.OutOfMemoryError:
            pass
        else:
            contenders["bare"] = lambda: tokens_per_second(run_bare, case, device, seconds)
        found = in_turn(ROUNDS, contenders)
    if "bare" in found:
        bare = median(found["bare"])
    speed = median(found["engine"])
    return Found(speed, bare, utilisation(base_flops(parameters, case.tokens), case.tokens / speed, rate), peak)


def engine_cycle(model: Any, case: Case, store: str) -> Callable[[], None]:
    """One cycle of the engine: forward_backward and optim_step of every job of the case."""
    context, vocabulary = model.config.max_position_embeddings, model.config.vocab_size
    base = BaseModel(model, None, model.config, context_length=context, vocab_size=vocabulary, eos_token_ids=())
    engine = Engine(base, "random", CheckpointStore(store))
    batches, steps = [], []
    for number, rank in enumerate(case.ranks):
        job = f"job-{number}"
        engine.create_model(
            job, CreateModelRequest(base_model="random", lora=LoraConfig(rank=rank, train_unembed=False))
        )
        batches.append(Batch(job, case.data(number), "cross_entropy"))
        steps.append((job, ADAM))

    def run() -> None:
        for result in (*engine.run_batches(batches), *engine.optim_steps(steps)):
            if isinstance(result, Exception):
                raise result

    return run


def bare_cycle(base: Any, case: Case, device: torch.device) -> Callable[[], None]:
    """One update of every job with plain torch and peft, one job after the other."""
    loops = [BareLoop(twin(base), rank=rank) for rank in case.ranks]
    batches = [tuple(part.to(device) for part in case.padded(job)) for job in range(len(loops))]

    def run() -> None:
        for loop, (inputs, labels) in zip(loops, batches, strict=True):
            loop.update(inputs, labels)

    return run


def tokens_per_second(run: Callable[[], None], case: Case, device: torch.device, seconds: float) -> float:
    """Over as many runs as fit into `seconds`, at least one."""
    synchronize(device)
    started, runs, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        run()
        synchronize(device)
        runs, elapsed = runs + 1, time.perf_counter() - started
    return runs * case.tokens / elapsed


def peak_of(run: Callable[[], None], device: torch.device) -> int:
    """The most bytes allocated on the device while `run` runs, weights included; 0 on a CPU, which does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main())
