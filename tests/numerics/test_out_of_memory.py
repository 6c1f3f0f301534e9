"""A pass that does not fit is split, and nothing is counted twice. The allocator's limit is a hook that fails in
the middle of the model, forwards or backwards, when more tokens than that are there at once."""

from __future__ import annotations

import pytest
import torch

from lorry_jobs.errors import UserError
from lorry_workers.engine.engine import Batch
from lorry_workers.engine.trainer import MICROBATCHES_UNTIL_MORE
from tests.tiny_engine import create_job, make_engine, random_data, randomize

CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"


def start(store, **options):
    engine = make_engine(store, **options)
    for job, lora in (("a", {"rank": 4}), ("b", {"rank": 4, "seed": 2}), ("c", {"rank": 9, "train_unembed": False})):
        create_job(engine, job, **lora)
        randomize(engine, job)
    return engine


def limit(engine, tokens, where="forward", error=lambda: torch.OutOfMemoryError("CUDA out of memory")):
    """-> the sizes that were tried."""
    tried = []

    def check(x):
        tried.append(x.shape[1])
        if x.shape[1] > tokens:
            raise error()

    layer = engine.trainer.body.layers[1 if where == "forward" else 0]
    if where == "forward":
        layer.register_forward_pre_hook(lambda module, args: check(args[0]))
    else:  # behind the last layer's and the head's gradients
        layer.register_full_backward_hook(lambda module, into, outof: check(outof[0]))
    return tried


def batches():
    return [
        Batch("a", random_data([20, 9, 4], seed=1), "cross_entropy"),
        Batch("b", random_data([17, 16], seed=2, weights="uniform"), "cross_entropy"),
        Batch("c", random_data([5] * 6, seed=3), "cross_entropy"),
        Batch("a", random_data([12], seed=4), "cross_entropy", backward=False),
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [lambda: torch.OutOfMemoryError("CUDA"), lambda: RuntimeError(CPU_MESSAGE)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_that_does_not_fit_is_split_without_counting_anything_twice(tmp_path, where, error, checkpointing):
    engine = start(tmp_path, activation_checkpointing=checkpointing)
    roomy = start(tmp_path)
    tried = limit(engine, 30, where, error)
    for _ in range(2):  # accumulation over two calls
        results, expected = engine.run_batches(batches()), roomy.run_batches(batches())
        for result, theirs in zip(results, expected, strict=True):
            assert not isinstance(result, Exception)
            assert result.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    for job in "abc":
        mine, theirs = (each.state(job).adapter.require_gradients() for each in (engine, roomy))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert engine.state(job).accumulated_calls == 2
    # The smaller budget is kept: only the first call ran into the limit.
    assert engine.trainer.max_tokens_per_microbatch <= 30
    first = max(i for i, size in enumerate(tried) if size > 30)
    assert first < len(tried) / 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_datum_that_never_fits_fails_alone_and_says_what_would(tmp_path, where):
    engine, roomy = start(tmp_path), start(tmp_path)
    limit(engine, 100, where)
    good = batches()[:2]
    long = Batch("c", random_data([8, 300], seed=7), "cross_entropy")
    engine.forward_backward("c", random_data([5]), "cross_entropy")
    results = engine.run_batches([*good, long])
    roomy.run_batches(good)
    with pytest.raises(UserError, match=r"datum 1 has 300 tokens, .* up to (8\d|9\d|100) tokens of it would") as caught:
        raise results[2]
    assert (caught.value.job, caught.value.op) == ("c", "forward_backward")
    assert not engine.state("c").has_gradients
    assert not engine.state("c").adapter.require_gradients().any()
    for job in "ab":
        mine, theirs = (each.state(job).adapter.require_gradients() for each in (engine, roomy))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_another_failure_in_a_shared_pass_hits_only_the_part_that_it_is_about(tmp_path):
    engine, roomy = start(tmp_path), start(tmp_path)

    def break_on_16(module, args):
        if args[0].shape[1] % 100 == 16 or args[0].shape[1] > 60:
            raise ArithmeticError("broken")

    engine.trainer.body.layers[1].register_forward_pre_hook(break_on_16)
    good = batches()[:1]
    results = engine.run_batches([*good, Batch("b", random_data([16]), "cross_entropy"), batches()[2]])
    assert [type(result).__name__ for result in results] == [
        "ForwardBackwardOutput",
        "ArithmeticError",
        "ForwardBackwardOutput",
    ]
    roomy.run_batches(good)
    mine, theirs = (each.state("a").adapter.require_gradients() for each in (engine, roomy))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_smaller_budget_grows_again_once_there_is_room(tmp_path):
    engine = start(tmp_path, max_tokens_per_microbatch=100)
    room = {"tokens": 30}

    def check(module, args):
        if args[0].shape[1] > room["tokens"]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    engine.trainer.body.layers[1].register_forward_pre_hook(check)
    one = [Batch("c", random_data([8] * 6, seed=3), "cross_entropy", backward=False)]
    assert not isinstance(engine.run_batches(one)[0], Exception)
    small = engine.trainer.max_tokens_per_microbatch
    assert small <= 30

    for _ in range(MICROBATCHES_UNTIL_MORE):  # it tries more, which still does not fit
        assert not isinstance(engine.run_batches(one)[0], Exception)
    assert engine.trainer.max_tokens_per_microbatch <= 2 * small

    room["tokens"] = 1000
    for _ in range(3 * MICROBATCHES_UNTIL_MORE):
        assert not isinstance(engine.run_batches(one)[0], Exception)
    assert engine.trainer.max_tokens_per_microbatch == 100
