"""What enters a cycle: a table, and what must hold for any jobs."""

from __future__ import annotations

import random

import pytest

from lorry_workers.cycle import CycleStats, ReadyOp, RecentCycles, plan_cycle


def ready(text: str) -> list[ReadyOp]:
    """ "b100 f20 step save" -> ops; b: forward_backward, f: forward."""
    kinds = {"b": "forward_backward", "f": "forward"}
    names = {"step": "optim_step", "save": "save_state", "load": "load_state", "create": "create_model"}
    return [ReadyOp(names[word]) if word in names else ReadyOp(kinds[word[0]], int(word[1:])) for word in text.split()]


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([], []),
        ([""], [0]),
        (["b10 step"], [2]),
        (["b10 b10 f5 b10 step b10 step"], [5]),  # one update, not two
        (["step b10"], [1]),
        (["step step"], [1]),
        (["save b10 step"], [1]),  # alone
        (["b10 save step"], [1]),  # nothing else in its cycle, and nothing past it
        (["create"], [1]),
        (["f5 load"], [1]),
        (["b10 step", "b10 step", "save", "", "f10"], [2, 2, 1, 0, 1]),
        # Under a budget of 100 tokens:
        (["b60 step", "b50 step"], [2, 0]),
        (["b60 step", "b40 step"], [2, 2]),
        (["b60 step", "b50 step", "b30 step"], [2, 0, 2]),  # a smaller one behind it still fits
        (["b500 step", "b10 step"], [2, 0]),  # larger than the budget: its turn, and it is over
        (["b10 step", "b500 step"], [2, 0]),
        (["b40 b40 b40 step", "b30 step"], [1, 2]),  # in turn: both get one, then the first has no room
        (["b10 b10 b10 step", "b30 b30 step"], [4, 3]),
        (["b80 b80 step", "step", "b20 step"], [1, 1, 2]),
        (["save", "b500 step"], [1, 0]),
        (["b0 b100 step", "b1"], [1, 1]),
    ],
)
def test_what_enters(jobs, expected):
    assert plan_cycle([ready(text) for text in jobs], max_tokens=100) == expected


def test_at_most_so_many_ops_of_a_job():
    assert plan_cycle([ready("b1 b1 b1 step"), ready("b1 step")], max_tokens=100, max_ops=2) == [2, 2]


def test_a_save_in_front_does_not_use_up_the_turn_of_a_batch_beyond_the_budget():
    """Where the order is turned, as the clock does, every job is the first at some time."""
    jobs = [ready("save save save save"), ready("b500 step")]
    order, ran = [0, 1], [0, 0]
    for _ in range(4):
        counts = plan_cycle([jobs[i][ran[i] :] for i in order], max_tokens=100)
        ran = [ran[i] + counts[order.index(i)] for i in range(2)]
        order = order[1:] + order[:1]
    assert ran[1] == 2


@pytest.mark.parametrize("seed", range(50))
def test_any_jobs_finish_in_order_and_within_the_budget(seed):
    choose = random.Random(seed)
    words = ["b7", "b30", "b99", "b400", "f20", "f150", "step", "save", "load"]
    jobs = {name: ready(" ".join(choose.choices(words, k=choose.randint(0, 12)))) for name in "abcdef"}
    order, ran = list(jobs), dict.fromkeys(jobs, 0)
    largest_wait, waits = 0, dict.fromkeys(jobs, 0)
    for _ in range(200):
        left = {name: jobs[name][ran[name] :] for name in order}
        if not any(left.values()):
            break
        counts = dict(zip(order, plan_cycle(list(left.values()), max_tokens=100), strict=True))
        first = next(name for name in order if left[name])
        assert counts[first] >= 1
        entered = {name: left[name][: counts[name]] for name in order}
        tokens = [op.tokens for run in entered.values() for op in run if op.tokens]
        assert sum(tokens) <= 100 or tokens == [entered[first][0].tokens]
        for name, run in entered.items():
            kinds = [op.kind for op in run]
            assert "optim_step" not in kinds[:-1]
            assert len(run) <= 1 or all(kind in ("forward", "forward_backward", "optim_step") for kind in kinds)
            ran[name] += len(run)
            waits[name] = 0 if run or not left[name] else waits[name] + 1
            largest_wait = max(largest_wait, waits[name])
        # Round robin: who ran goes behind the others.
        order = [name for name in order if not counts[name]] + [name for name in order if counts[name]]
    assert all(ran[name] == len(ops) for name, ops in jobs.items())
    assert largest_wait < len(jobs)


def test_recent_cycles():
    recent = RecentCycles(keep=2)
    assert recent.summary() == {}
    recent.add(CycleStats(cycle=1, jobs=100, ops=100, tokens=10**6, train=100.0))
    recent.add(CycleStats(cycle=2, jobs=1, ops=2, tokens=100, train=0.1, step=0.02, other=0.03, idle=0.35))
    recent.add(CycleStats(cycle=3, jobs=3, ops=4, tokens=300, train=0.3, step=0.04, other=0.01, idle=0.15))
    assert recent.summary() == pytest.approx(
        {
            "cycle": 3,
            "cycles": 2,
            "jobs": 2,
            "ops": 3,
            "tokens": 200,
            "tokens_per_second": 400,
            "train_ms": 200,
            "step_ms": 30,
            "other_ms": 20,
            "idle": 0.5,
        }
    )
