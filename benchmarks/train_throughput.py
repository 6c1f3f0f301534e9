"""Training through the service, in tokens per second, against a bare torch + peft loop (float32) in the same run.

Contenders take turns: the bare loop (the jobs of a case one after the other), a worker with a float32 base and one
with a bfloat16 base, each with two threads, and a large matrix product. All clients live in this process; updates
(forward_backward, optim_step) are submitted ahead without waiting. The time of a turn is from its first submit to its
last result, a cycle that fills the pipeline and one that drains it included.

Ratios are tokens/s over the bare loop's. Padding counts as no token, of masked positions each counts.

Keys: ratio_one (4 × 128), ratio_one_masked (half of the positions are a prompt), ratio_eight_64, ratio_eight_16,
ratio_eight_ragged; ratio_one_bf16, ratio_eight_64_bf16, ratio_eight_16_bf16; utilisation_one (4 × parameters × tokens
over the time, of the matrix rate of the faster of `torch.mm` and the worker's own product); utilisation_one_of_mm (of
`torch.mm`'s); tokens_s_1 ... tokens_s_32 (by number of jobs, 1 × 64 each); memory_of_vocabulary
(growth of a forward_backward's peak memory per token, over that of float32 logits). They are SmolLM2's; the tiny
model's begin with `tiny_`. With --quick there is only the tiny model, and its keys have no prefix.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the tiny models of the tests

import lorry
from benchmarks import _peak_memory
from benchmarks._bare import BareLoop, twin
from benchmarks._cases import Case, ragged, rectangular
from benchmarks._matrix import adapter_flops, base_flops, matrix_rate, product_parameters, utilisation
from benchmarks._report import in_turn, median, options, report, show
from lorry.stack import Stack, StackSettings
from lorry.stack.programs import worker_specs
from lorry_jobs import ops
from lorry_jobs.mailbox import Mailbox
from lorry_jobs.paths import models_dir
from lorry_workers.engine.products import linear
from tests.tiny_models import make_tiny_qwen3

THREADS = 2
AHEAD = 4  # updates of each job that are submitted and not finished
ADAM = lorry.AdamParams(learning_rate=1e-4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEMORY_TOKENS = (512, 1024, 2048, 4096)
MEMORY_FROM = 1024  # from here on the head works in chunks of one size
MEMORY_VOCABULARY = 50_000

# Case: (its row, goal in fp32, goal in bf16). step_overhead.py measures the rest: what a single step costs.
GOALS: dict[str, tuple[str, float | None, float | None]] = {
    "one": ("one job, 4 × 128", 1.05, 1.6),
    "one_masked": ("the same, half of it masked", 1.15, None),
    "eight_64": ("eight jobs, 1 × 64", 1.8, 3.0),
    "eight_16": ("eight jobs, 1 × 16", 3.0, 4.0),
    "eight_ragged": ("eight, 2 × 16 to 256, ranks 4 to 64", 1.6, None),
}
UTILISATION_GOAL = 0.7  # of the case "one" in fp32
KEYS_BF16 = ("one", "eight_64", "eight_16")


@dataclass(frozen=True)
class Plan:
    """How much is measured of a model: turns (`rounds`), and the updates in each, by case and by number of jobs."""

    name: str
    label: str
    rounds: int
    updates: dict[str, int]
    jobs: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rounds_by_jobs: int = 2
    updates_by_jobs: int = 2


TINY = Plan(
    "tiny",
    "a tiny Qwen3",
    rounds=5,
    updates={"one": 40, "one_masked": 40, "eight_64": 30, "eight_16": 40, "eight_ragged": 10},
    rounds_by_jobs=3,
    updates_by_jobs=20,
)
SMOLLM2 = Plan(
    "smollm2",
    "SmolLM2-135M",
    rounds=3,
    updates={"one": 4, "one_masked": 4, "eight_64": 4, "eight_16": 8, "eight_ragged": 2},
)


@dataclass
class Turn:
    """One turn of a worker: its time, the cycles it took, and which share of the time went into the batches of these
    cycles and into their optimizer steps."""

    seconds: float
    cycles: int
    train: float
    step: float


@dataclass
class Found:
    """Medians. By case: seconds per update of the bare loop; by dtype and case: the same of the service, updates per
    cycle, and the shares of batches and steps; by dtype: every matrix rate measured, of `torch.mm` and of the faster of
    that and the worker's own product, and tokens/s by number of jobs."""

    parameters: int
    adapters: dict[str, int] = field(default_factory=dict)  # flops of all jobs' adapters in an update
    bare: dict[str, float] = field(default_factory=dict)
    service: dict[tuple[str, str], float] = field(default_factory=dict)
    updates_per_cycle: dict[tuple[str, str], float] = field(default_factory=dict)
    train: dict[tuple[str, str], float] = field(default_factory=dict)
    step: dict[tuple[str, str], float] = field(default_factory=dict)
    mm_rates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})
    rates: dict[str, list[float]] = field(default_factory=lambda: {dtype: [] for dtype in DTYPES})
    by_jobs: dict[tuple[str, int], float] = field(default_factory=dict)


def main() -> None:
    args = options(__doc__ or "")
    torch.set_num_threads(THREADS)
    folder = Path(tempfile.mkdtemp(prefix="lorry-bench-"))
    smollm2 = models_dir() / "smollm2"
    figures: dict[str, float] = {}
    if args.quick:
        fewer = {case: max(2, updates // 8) for case, updates in TINY.updates.items()}
        plan = replace(TINY, rounds=2, updates=fewer, jobs=(1, 8), updates_by_jobs=3)
        figures |= run(plan, make_tiny_qwen3(folder / "tiny"))
    else:
        tiny = run(TINY, make_tiny_qwen3(folder / "tiny"))
        if smollm2.is_dir():
            figures |= run(SMOLLM2, smollm2)
        else:
            print(f"SmolLM2 is not in {models_dir()} (lorry models fetch smollm2): left out", file=sys.stderr)
        figures |= {f"tiny_{key}": value for key, value in tiny.items()}

    rows, growth = memory(folder, MEMORY_TOKENS[1:3] if args.quick else MEMORY_TOKENS)
    figures["memory_of_vocabulary"] = growth
    report(
        f"Peak memory of a forward_backward, {MEMORY_VOCABULARY:,} tokens in the vocabulary: it grows by {growth:.0%} "
        "of what float32 logits would",
        rows,
        figures,
        args.json,
    )


def run(plan: Plan, model: Path) -> dict[str, float]:
    """Measure one model and show its tables. -> figures by the issue's keys"""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    cases = make_cases(base.config.vocab_size)
    found = Found(product_parameters(base))
    with start(plan.name, model, slots=64) as stack:
        service = lorry.ServiceClient(base_url=stack.url)
        with redis.Redis.from_url(stack.url) as client:
            workers = {dtype: Jobs(service, Mailbox(client), f"{plan.name}-{dtype}") for dtype in DTYPES}
            measure_cases(plan, base, cases, workers, found)
            show_cases(plan, cases, found)
            measure_numbers_of_jobs(plan, base.config.vocab_size, workers, found)
            show_numbers_of_jobs(plan, found)
        service.close()
    return figures_of(found, cases, plan)


def make_cases(vocabulary: int) -> dict[str, Case]:
    return {
        "one": rectangular(1, 4, 128, vocabulary),
        "one_masked": rectangular(1, 4, 128, vocabulary, masked=0.5),
        "eight_64": rectangular(8, 1, 64, vocabulary),
        "eight_16": rectangular(8, 1, 16, vocabulary),
        "eight_ragged": ragged(vocabulary),
    }


# -------------------------------------------------------------------------------------------------------- measuring


def measure_cases(plan: Plan, base: Any, cases: dict[str, Case], workers: dict[str, Jobs], found: Found) -> None:
    bare = BareJobs(base)
    for name, case in cases.items():
        found.adapters[name] = bare.adapter_flops(case)
        _measure_case(name, case, plan, bare, workers, found)


def _measure_case(
    name: str,
    case: Case,
    plan: Plan,
    bare: BareJobs,
    workers: dict[str, Jobs],
    found: Found,
) -> None:
    updates = plan.updates[name]
    turns: dict[str, list[Turn]] = {dtype: [] for dtype in DTYPES}

    def turn(dtype: str) -> float:
        turns[dtype].append(workers[dtype].train(case, updates))
        return turns[dtype][-1].seconds / updates

    contenders: dict[str, Callable[[], float]] = {"bare": lambda: bare.train(case, updates)}
    for dtype in DTYPES:
        contenders[dtype] = lambda dtype=dtype: turn(dtype)
        contenders[f"rate {dtype}"] = lambda dtype=dtype: matrix_rate(DTYPES[dtype])
        contenders[f"own rate {dtype}"] = lambda dtype=dtype: matrix_rate(DTYPES[dtype], product=linear)
    bare.train(case, 1)
    for jobs in workers.values():
        jobs.train(case, 1)
    times = in_turn(plan.rounds, contenders)
    found.bare[name] = median(times["bare"])
    for dtype in DTYPES:
        found.service[dtype, name] = median(times[dtype])
        found.mm_rates[dtype] += times[f"rate {dtype}"]
        found.rates[dtype] += map(max, times[f"rate {dtype}"], times[f"own rate {dtype}"])
        found.train[dtype, name] = median([t.train for t in turns[dtype]])
        found.step[dtype, name] = median([t.step for t in turns[dtype]])
        found.updates_per_cycle[dtype, name] = median([updates * len(case.batches) / t.cycles for t in turns[dtype]])


def measure_numbers_of_jobs(plan: Plan, vocabulary: int, workers: dict[str, Jobs], found: Found) -> None:
    cases = {(dtype, count): rectangular(count, 1, 64, vocabulary) for dtype in workers for count in plan.jobs}
    contenders: dict[str, Callable[[], float]] = {}
    for (dtype, count), case in cases.items():
        workers[dtype].train(case, 1)
        contenders[f"{dtype} {count}"] = lambda jobs=workers[dtype], case=case: (
            jobs.train(case, plan.updates_by_jobs).seconds
        )
    times = in_turn(plan.rounds_by_jobs, contenders)
    for (dtype, count), case in cases.items():
        found.by_jobs[dtype, count] = case.tokens * plan.updates_by_jobs / median(times[f"{dtype} {count}"])


def start(name: str, model: Path, *, slots: int) -> Stack:
    """A stack with one worker for each dtype of the base. One of them is idle while the other is measured."""
    home = Path(tempfile.mkdtemp(prefix="lorry-bench-"))
    specs = []
    for dtype, torch_dtype in DTYPES.items():
        [spec] = worker_specs([f"{name}-{dtype}={model}"], 1)
        env = {
            "LORRY_DTYPE": str(torch_dtype).removeprefix("torch."),
            "LORRY_DEVICE": "cpu",
            "LORRY_THREADS": str(THREADS),
            "LORRY_SLOTS": str(slots),
        }
        specs.append(replace(spec, env={**spec.env, **env}))
    settings = StackSettings(home=home, url=None, flower=False, models=[])
    return Stack(settings, processes=specs, started_by="benchmark")


class BareJobs:
    """One bare loop per job, on the weights of one base model."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self._loops: dict[tuple[int, int], BareLoop] = {}

    def train(self, case: Case, updates: int) -> float:
        """The jobs one after the other. -> seconds per update of all of them"""
        loops = [self._loop(job, rank) for job, rank in enumerate(case.ranks)]
        batches = [case.padded(job) for job in range(len(loops))]
        started = time.perf_counter()
        for loop, batch in zip(loops, batches, strict=True):
            for _ in range(updates):
                loop.update(*batch).item()
        return (time.perf_counter() - started) / updates

    def adapter_flops(self, case: Case) -> int:
        total = 0
        for job, (rank, rows) in enumerate(zip(case.ranks, case.batches, strict=True)):
            trained = sum(p.numel() for p in self._loop(job, rank).model.parameters() if p.requires_grad)
            total += adapter_flops(trained, sum(len(row) - 1 for row in rows))
        return total

    def _loop(self, job: int, rank: int) -> BareLoop:
        if (job, rank) not in self._loops:
            self._loops[job, rank] = BareLoop(twin(self.base), rank=rank)
        return self._loops[job, rank]


class Jobs:
    """The jobs of one worker. They are made when first used and serve all cases."""

    def __init__(self, service: lorry.ServiceClient, mailbox: Mailbox, model: str) -> None:
        self.service, self.mailbox, self.model = service, mailbox, model
        self._clients: dict[tuple[int, int], lorry.TrainingClient] = {}

    def train(self, case: Case, updates: int) -> Turn:
        clients = [self._client(job, rank) for job, rank in enumerate(case.ranks)]
        batches = [case.data(job) for job in range(len(clients))]
        cycles: set[int] = set()
        waiting: deque[tuple[lorry.APIFuture[Any], lorry.APIFuture[Any]]] = deque()

        def finish_one() -> None:
            for future in waiting.popleft():
                cycle = future.result().cycle
                assert cycle is not None
                cycles.add(cycle)

        started = time.perf_counter()
        for _ in range(updates):
            for client, data in zip(clients, batches, strict=True):
                waiting.append((client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)))
            while len(waiting) > (AHEAD - 1) * len(clients):
                finish_one()
        while waiting:
            finish_one()
        seconds = time.perf_counter() - started
        ledgers = [self.mailbox.ledger(client.model_id).values() for client in clients]
        phases = phase_seconds(op for ledger in ledgers for op in ledger if op.get("cycle") in cycles)
        return Turn(seconds, len(cycles), phases[ops.FORWARD_BACKWARD] / seconds, phases[ops.OPTIM_STEP] / seconds)

    def _client(self, job: int, rank: int) -> lorry.TrainingClient:
        if (job, rank) not in self._clients:
            client = self.service.create_lora_training_client(self.model, rank=rank, train_unembed=False)
            self._clients[job, rank] = client
        return self._clients[job, rank]


def phase_seconds(entries: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by kind of op, from lines of ledgers: in a cycle, ops of a kind run together, and each of them has the
    time that all took."""
    longest: dict[tuple[str, int], float] = {}
    for entry in entries:
        key = (entry["op"], entry["cycle"])
        longest[key] = max(longest.get(key, 0.0), entry["milliseconds"] / 1000)
    seconds = {ops.FORWARD_BACKWARD: 0.0, ops.OPTIM_STEP: 0.0}
    for (op, _), value in longest.items():
        seconds[op] = seconds.get(op, 0.0) + value
    return seconds


def memory(folder: Path, sizes: Sequence[int]) -> tuple[list[tuple[str, ...]], float]:
    """Rows of the table, and the growth per token from `MEMORY_FROM` tokens on over that of float32 logits."""
    model = make_tiny_qwen3(folder / "large-vocabulary", vocab_size=MEMORY_VOCABULARY)
    peaks = {tokens: _peak_memory.measure(model, tokens) for tokens in sizes}
    rows: list[tuple[str, ...]] = [("tokens", "peak above rest, MB", "tokens × vocabulary × 4 B, MB")]
    for tokens, peak in peaks.items():
        rows.append((f"{tokens}", f"{peak / 1e6:.0f}", f"{tokens * MEMORY_VOCABULARY * 4 / 1e6:.0f}"))
    first, last = MEMORY_FROM, sizes[-1]
    return rows, (peaks[last] - peaks[first]) / (last - first) / (MEMORY_VOCABULARY * 4)


# -------------------------------------------------------------------------------------------------------- reporting


def show_cases(plan: Plan, cases: dict[str, Case], found: Found) -> None:
    show(f"Training, {plan.label}: tokens/s (medians of {plan.rounds} turns)", throughput_rows(found, cases))
    rates = ", ".join(
        f"{dtype} {median(found.rates[dtype]) / 1e9:.0f}, torch.mm's {median(found.mm_rates[dtype]) / 1e9:.0f}"
        for dtype in DTYPES
    )
    show(f"What limits it, {plan.label}: shares of the time (matrix rate, GFLOP/s: {rates})", limit_rows(found, cases))


def show_numbers_of_jobs(plan: Plan, found: Found) -> None:
    header = ("jobs, 1 × 64 each", *(f"{count}" for count in plan.jobs))
    rows = [(dtype, *(f"{found.by_jobs[dtype, count]:.0f}" for count in plan.jobs)) for dtype in DTYPES]
    show(f"Tokens/s by number of jobs, {plan.label}", [header, *rows])


def mfu(found: Found, cases: dict[str, Case], dtype: str, name: str, rates: Mapping[str, list[float]]) -> float:
    flops = base_flops(found.parameters, cases[name].tokens)
    return utilisation(flops, found.service[dtype, name], median(rates[dtype]))


def ratio(found: Found, dtype: str, name: str) -> float:
    return found.bare[name] / found.service[dtype, name]


def throughput_rows(found: Found, cases: dict[str, Case]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "bare", "fp32", "ratio", "goal", "bf16", "ratio", "goal")]
    for name, (label, *goals) in GOALS.items():
        tokens = cases[name].tokens
        row = [label, f"{tokens / found.bare[name]:.0f}"]
        for dtype, goal in zip(DTYPES, goals, strict=True):
            row.append(f"{tokens / found.service[dtype, name]:.0f}")
            row.append(f"{ratio(found, dtype, name):.2f}")
            row.append("" if goal is None else f"≥ {goal:g}")
        rows.append(tuple(row))
    for label, rates in (("of torch.mm's rate", found.mm_rates), ("of the fastest rate", found.rates)):
        one = mfu(found, cases, "fp32", "one", rates)
        rows.append((f"one job, 4 × 128: {label}", "", "", f"{one:.2f}", f"≥ {UTILISATION_GOAL:g}", "", "", ""))
    return rows


def limit_rows(found: Found, cases: dict[str, Case]) -> list[tuple[str, ...]]:
    """Where the time goes. `base` (which is the utilisation) and `adapters` are what their products would take at the
    matrix rate. `rest`: what the batches took beyond that, for smaller and slower products, attention, softmax, and
    all that is done element by element. `step`: AdamW. `waits`: between the phases of cycles, for ops or commits."""
    rows: list[tuple[str, ...]] = [("", "base type", "updates/cycle", "base", "adapters", "rest", "step", "waits")]
    for name, (label, *_) in GOALS.items():
        for dtype in DTYPES:
            base = mfu(found, cases, dtype, name, found.rates)
            rate = median(found.rates[dtype])
            adapters = utilisation(found.adapters[name], found.service[dtype, name], rate)
            train, step = found.train[dtype, name], found.step[dtype, name]
            shares = (base, adapters, train - base - adapters, step, 1 - train - step)
            updates = f"{found.updates_per_cycle[dtype, name]:.1f}"
            rows.append((label, dtype, updates, *(f"{max(0.0, share):.0%}" for share in shares)))
    return rows


def figures_of(found: Found, cases: dict[str, Case], plan: Plan) -> dict[str, float]:
    figures = {f"ratio_{name}": ratio(found, "fp32", name) for name in GOALS}
    figures |= {f"ratio_{name}_bf16": ratio(found, "bf16", name) for name in KEYS_BF16}
    figures["utilisation_one"] = mfu(found, cases, "fp32", "one", found.rates)
    figures["utilisation_one_of_mm"] = mfu(found, cases, "fp32", "one", found.mm_rates)
    return figures | {f"tokens_s_{count}": found.by_jobs["fp32", count] for count in plan.jobs}


if __name__ == "__main__":
    main()
