"""What enters a cycle of the clock, and what a cycle took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lorry_jobs import ops

BATCHES = (ops.FORWARD, ops.FORWARD_BACKWARD)


class ReadyOp(NamedTuple):
    """An op whose turn it is, or will be once those before it in its job are done. `tokens`: of its batch."""

    kind: str
    tokens: int = 0


def plan_cycle(jobs: Sequence[Sequence[ReadyOp]], *, max_tokens: int, max_ops: int = 64) -> list[int]:
    """How many of its ready ops each job may run in one cycle.

    `jobs` holds each job's ready ops in their order, the job whose turn is first first; the caller turns the
    order from cycle to cycle. A job's part of a cycle is one update: `forward` and `forward_backward` ops, up to
    and with the `optim_step` that ends it. Any other op (save, load, create) is the job's whole part.

    The jobs take turns, one op each, as long as `max_tokens` last, so that a job with large batches waits for its
    own and not the others for them. What a job has begun it may go on with in the next cycle: nothing is taken
    out of order. Ops without tokens, `optim_step` above all, enter whatever is left. The first job always enters
    with one op, if need be a larger one than the budget, so that every op has its turn. At most `max_ops` enter
    from one job.
    """
    counts = [0] * len(jobs)
    waiting = deque(index for index, ready in enumerate(jobs) if ready)
    tokens = 0
    while waiting:
        index = waiting.popleft()
        op = jobs[index][counts[index]]
        # A job that does not fit now drops out, and a smaller op of the next may still do.
        if op.tokens and tokens + op.tokens > max_tokens and (tokens or any(counts)):
            continue
        tokens += op.tokens
        counts[index] += 1
        if _goes_on(op, jobs[index], counts[index], max_ops):
            waiting.append(index)
    return counts


def _goes_on(last: ReadyOp, ready: Sequence[ReadyOp], count: int, max_ops: int) -> bool:
    if last.kind not in BATCHES or count >= min(len(ready), max_ops):
        return False
    return ready[count].kind in (*BATCHES, ops.OPTIM_STEP)


@dataclass(frozen=True)
class CycleStats:
    """One cycle. Times in seconds: of the batches of all jobs, of their optimizer steps, of everything else (saves,
    loads, sampling since the cycle before it, copies for snapshots), and `idle`, the wait for work before it."""

    cycle: int
    jobs: int
    ops: int
    tokens: int
    train: float = 0.0
    step: float = 0.0
    other: float = 0.0
    idle: float = 0.0

    @property
    def busy(self) -> float:
        return self.train + self.step + self.other


class RecentCycles:
    """The last `keep` cycles, summed up."""

    def __init__(self, keep: int = 100) -> None:
        self._cycles: deque[CycleStats] = deque(maxlen=keep)

    def add(self, stats: CycleStats) -> None:
        self._cycles.append(stats)

    def summary(self) -> dict[str, float]:
        """`cycle`: the last one's number. Means per cycle of jobs, ops and tokens; tokens per second of all time,
        idle time included; mean milliseconds of each part; `idle`: the share of time spent waiting for work."""
        cycles = list(self._cycles)  # another thread may be adding to them
        if not cycles:
            return {}
        count = len(cycles)
        total = {
            name: sum(getattr(stats, name) for stats in cycles)
            for name in ("jobs", "ops", "tokens", "train", "step", "other", "busy", "idle")
        }
        elapsed = total["busy"] + total["idle"]
        return {
            "cycle": cycles[-1].cycle,
            "cycles": count,
            "jobs": total["jobs"] / count,
            "ops": total["ops"] / count,
            "tokens": total["tokens"] / count,
            "tokens_per_second": total["tokens"] / elapsed if elapsed else 0.0,
            "train_ms": total["train"] / count * 1000,
            "step_ms": total["step"] / count * 1000,
            "other_ms": total["other"] / count * 1000,
            "idle": total["idle"] / elapsed if elapsed else 0.0,
        }
