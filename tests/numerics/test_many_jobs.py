"""Jobs that share passes are as exact as jobs alone, and never see one another."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from lorry_jobs.errors import JobNotFound, UserError
from lorry_jobs.types import AdamParams, Datum
from lorry_workers.engine.engine import Batch, Engine
from tests.tiny_engine import create_job, make_engine, random_data, randomize

JOBS = {
    "a": {"rank": 4, "seed": 1},
    "b": {"rank": 4, "seed": 2, "alpha": 3.0},
    "c": {"rank": 1, "seed": 3, "train_unembed": False},
    "d": {"rank": 16, "seed": 4, "train_attn": False},
    "e": {"rank": 3, "seed": 5, "train_mlp": False},
    "f": {"rank": 8, "seed": 6, "train_attn": False, "train_mlp": False},
    "g": {"rank": 8, "seed": 7, "alpha": 64.0, "train_unembed": False},
    "h": {"rank": 2, "seed": 8},
}
ALIKE = {job: {"rank": 4, "seed": seed, "train_unembed": False} for seed, job in enumerate("abcd")}


def start(store, jobs=JOBS, **options) -> Engine:
    engine = make_engine(store, **options)
    for job, lora in jobs.items():
        create_job(engine, job, **lora)
        randomize(engine, job)
    return engine


def gradient(engine: Engine, job: str) -> torch.Tensor:
    return engine.state(job).adapter.require_gradients().clone()


def assert_equal_to_alone(tmp_path, jobs, batches, **options):
    together, alone = start(tmp_path, jobs, **options), start(tmp_path, jobs)
    results = together.run_batches(batches)
    for batch, result in zip(batches, results, strict=True):
        assert not isinstance(result, Exception), result
        run = alone.forward_backward if batch.backward else alone.forward
        expected = run(batch.job, batch.data, batch.loss_fn, batch.loss_fn_config)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for mine, theirs in zip(result.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(mine["logprobs"].array, theirs["logprobs"].array, atol=2e-5)
    for job in jobs:
        torch.testing.assert_close(gradient(together, job), gradient(alone, job), rtol=1e-4, atol=2e-5)
        assert together.state(job).accumulated_calls == alone.state(job).accumulated_calls
        assert together.state(job).accumulated_tokens == alone.state(job).accumulated_tokens


@pytest.mark.parametrize("max_tokens", [4096, 70, 1])
def test_any_mix_of_ranks_targets_losses_and_lengths(tmp_path, max_tokens):
    inputs = {"weights": "uniform", "logprobs": "normal", "advantages": "normal"}
    losses = ["cross_entropy", "ppo", "dro", "cross_entropy", "importance_sampling", "cispo", "gspo", "gspo"]
    batches = []
    for number, (job, loss_fn) in enumerate(zip(JOBS, losses, strict=True)):
        lengths = [3 + 7 * number, 9, 40][: 1 + number % 3]
        batches.append(Batch(job, random_data(lengths, seed=number, **inputs), loss_fn, backward=number not in (3, 6)))
    batches.append(Batch("a", random_data([11, 2], seed=20, **inputs), "cispo", {"clip_high_threshold": 2.0}))
    batches.append(Batch("a", random_data([5], seed=21), "cross_entropy", backward=False))
    assert_equal_to_alone(tmp_path, JOBS, batches, max_tokens_per_microbatch=max_tokens)


def test_equal_adapters_with_equally_many_tokens_run_stacked(tmp_path, monkeypatch):
    from lorry_workers.engine import lora_linear

    batches = [
        Batch(job, random_data([10, 6], seed=n, weights="uniform"), "cross_entropy") for n, job in enumerate(ALIKE)
    ]
    stacked = []
    original = lora_linear._AllAdapters.add_gradients
    monkeypatch.setattr(
        lora_linear._AllAdapters, "add_gradients", lambda *args: (stacked.append(args), original(*args))[1]
    )
    assert_equal_to_alone(tmp_path, ALIKE, batches)
    assert stacked


def test_soft_targets_and_ignored_ones_beside_hard_ones_of_other_jobs(tmp_path):
    random = np.random.default_rng(0)
    [plain] = random_data([7], seed=1)
    columns = random.integers(0, 400, (7, 3))
    columns[2] = -100
    soft = Datum(plain.model_input, {"target_tokens": columns, "weights": random.uniform(0, 1, (7, 3))})
    ignored = Datum(plain.model_input, {"target_tokens": np.full(7, -100)})
    half = Datum(plain.model_input, {"target_tokens": [-100] * 4 + [1, 2, 3]})
    batches = [
        Batch("a", [soft], "cross_entropy"),
        Batch("b", [ignored, half], "cross_entropy"),
        Batch("c", [ignored], "cross_entropy"),
        Batch("h", random_data([7], seed=2, weights="uniform"), "cross_entropy"),
    ]
    assert_equal_to_alone(tmp_path, JOBS, batches)


def good_batches() -> list[Batch]:
    return [Batch(job, random_data([9, 5], seed=n), "cross_entropy") for n, job in enumerate("abcd")]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Batch("e", [], "cross_entropy"), "data is empty"),
        (Batch("e", random_data([4]), "nonsense"), "unknown loss_fn"),
        (Batch("e", random_data([4]), "cross_entropy", {"beta": 1.0}), "has no option"),
        (Batch("e", random_data([4], logprobs="normal"), "ppo"), "needs loss_fn_inputs"),
    ],
)
@pytest.mark.parametrize("backward", [True, False])
def test_a_bad_batch_fails_alone(tmp_path, bad, reason, backward):
    engine, clean = start(tmp_path), start(tmp_path)
    engine.forward_backward("e", random_data([6]), "cross_entropy")
    before = gradient(engine, "e")
    good = good_batches()
    bad = Batch(bad.job, bad.data, bad.loss_fn, bad.loss_fn_config, backward)
    results = engine.run_batches([*good[:2], bad, *good[2:]])
    with pytest.raises(UserError, match=reason) as caught:
        raise results[2]
    assert (caught.value.job, caught.value.op) == ("e", "forward_backward" if backward else "forward")
    assert engine.state("e").has_gradients == (not backward)
    assert torch.equal(gradient(engine, "e"), torch.zeros_like(before) if backward else before)
    expected = clean.run_batches(good)
    assert [r.metrics for r in results[:2] + results[3:]] == [r.metrics for r in expected]
    for job in "abcd":
        assert torch.equal(gradient(engine, job), gradient(clean, job))


def test_an_unknown_job_is_an_error_of_its_own(tmp_path):
    engine = start(tmp_path)
    results = engine.run_batches([Batch("x", random_data([4]), "cross_entropy"), *good_batches()])
    assert isinstance(results[0], JobNotFound)
    assert results[0].job == "x"
    assert not any(isinstance(result, Exception) for result in results[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("jobs", [JOBS, ALIKE])
def test_broken_weights_of_one_job_reach_no_other(tmp_path, jobs, value):
    """All paths: adapters alike (stacked) and different, in the same pass, before and behind the broken one."""
    engine, clean = start(tmp_path, jobs), start(tmp_path, jobs)
    engine.state("b").adapter.flat.fill_(value)
    batches = good_batches()
    results, expected = engine.run_batches(batches), clean.run_batches(batches)
    with pytest.raises(UserError, match="the loss is not finite"):
        raise results[1]
    assert not gradient(engine, "b").any()
    for batch, result, theirs in zip(batches, results, expected, strict=True):
        if batch.job != "b":
            assert result.metrics == theirs.metrics
            assert torch.equal(gradient(engine, batch.job), gradient(clean, batch.job))

    # Nor the next job in its place: the memory that the broken job used is used again.
    engine.drop_job("b")
    create_job(engine, "b", **jobs["b"])
    randomize(engine, "b")
    for job in "acd":
        engine.drop_gradients(job)
    again = engine.run_batches(batches)
    assert [result.metrics for result in again] == [result.metrics for result in expected]
    for job in "abcd":
        assert torch.equal(gradient(engine, job), gradient(clean, job))


def test_one_failed_batch_drops_all_that_its_job_accumulated(tmp_path):
    engine = start(tmp_path)
    engine.forward_backward("a", random_data([4]), "cross_entropy")
    bad = Batch("a", [Datum([1, 2], {"target_tokens": [1, 2], "weights": [3e38, 3e38]})], "cross_entropy")
    results = engine.run_batches([*good_batches(), bad, Batch("a", random_data([3]), "cross_entropy")])
    assert [isinstance(result, Exception) for result in results] == [False] * 4 + [True, False]
    assert not engine.state("a").has_gradients
    assert not gradient(engine, "a").any()
    assert engine.state("b").has_gradients


def test_eight_jobs_interleaved_at_random_equal_eight_jobs_alone(tmp_path):
    together, alone = start(tmp_path, max_tokens_per_microbatch=150), start(tmp_path)
    random = np.random.default_rng(5)
    plans = {}
    for number, job in enumerate(JOBS):
        # With a smaller ε, gradients that are nothing but rounding would become steps of full size.
        adam = AdamParams(learning_rate=1e-3 / (1 + number), weight_decay=0.01 * number, eps=1e-5)
        shapes = [random.integers(1, 30, random.integers(1, 4)).tolist() for _ in range(20)]
        plans[job] = [(random_data(s, seed=100 * number + i), adam) for i, s in enumerate(shapes)]
    losses = {job: [] for job in JOBS}
    waiting = {job: list(plan) for job, plan in plans.items()}
    while any(waiting.values()):
        chosen = [job for job in JOBS if waiting[job] and random.random() < 0.6]
        steps = [(job, *waiting[job].pop(0)) for job in random.permutation(chosen).tolist()]
        results = together.run_batches([Batch(job, data, "cross_entropy") for job, data, _ in steps])
        for (job, _, _), result in zip(steps, results, strict=True):
            losses[job].append(result.loss)
        stepped = together.optim_steps([(job, adam) for job, _, adam in steps])
        assert not any(isinstance(step, Exception) for step in stepped)
    for job, plan in plans.items():
        expected = []
        for data, adam in plan:
            expected.append(alone.forward_backward(job, data, "cross_entropy").loss)
            alone.optim_step(job, adam)
        np.testing.assert_allclose(losses[job], expected, rtol=1e-5)
        torch.testing.assert_close(
            together.state(job).adapter.flat, alone.state(job).adapter.flat, rtol=1e-5, atol=1e-5
        )
        assert together.state(job).step == 20


def test_a_cycle_of_steps_refuses_the_bad_ones_alone(tmp_path):
    """An infinite gradient, nothing accumulated, an unknown job, an absurd learning rate: only their own."""
    engine, clean = start(tmp_path), start(tmp_path)
    adam = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    for each in (engine, clean):
        each.run_batches(good_batches())
    engine.state("b").adapter.require_gradients()[3] = float("inf")
    moments = engine.state("b").adam.exp_avg.clone()
    weights = engine.state("b").adapter.flat.clone()
    absurd = AdamParams(learning_rate=1e300, weight_decay=1e300, eps=1e300)
    steps = [("a", adam), ("b", adam), ("e", adam), ("c", absurd), ("x", adam), ("d", adam)]
    results = engine.optim_steps(steps)
    for index, reason in ((1, "norm is inf; the gradient was dropped"), (2, "nothing is accumulated"), (4, "not hold")):
        with pytest.raises((UserError, JobNotFound), match=reason) as caught:
            raise results[index]
        assert (caught.value.job, caught.value.op) == (steps[index][0], "optim_step")
    assert torch.equal(engine.state("b").adapter.flat, weights)
    assert torch.equal(engine.state("b").adam.exp_avg, moments)
    assert (engine.state("b").step, engine.state("b").has_gradients) == (0, False)
    expected = [clean.optim_step(job, adam) for job in "ad"]
    assert [results[0].metrics, results[5].metrics] == [e.metrics for e in expected]

    # The job with the absurd learning rate is beyond help, the others do not notice.
    results = engine.run_batches(good_batches())
    clean.run_batches([batch for batch in good_batches() if batch.job in "ad"])
    with pytest.raises(UserError, match="not finite"):
        raise results[2]
    for job in "ad":
        assert torch.equal(engine.state(job).adapter.flat, clean.state(job).adapter.flat)
        torch.testing.assert_close(gradient(engine, job), gradient(clean, job), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="only one step"):
        engine.optim_steps([("a", adam), ("a", adam)])


def test_jobs_whose_company_changes_from_cycle_to_cycle_always_train_on_their_present_values(tmp_path):
    """The layouts of earlier companies are kept; what they hold of a job is old once it has stepped without them."""
    engine, alone = start(tmp_path), start(tmp_path)
    adam = AdamParams(learning_rate=1e-2, eps=1e-5)
    for number, company in enumerate(["ab", "a", "ab", "b", "ba", "ab"]):
        batches = [Batch(job, random_data([7, 5], seed=10 * number + ord(job)), "cross_entropy") for job in company]
        for batch, result in zip(batches, engine.run_batches(batches), strict=True):
            expected = alone.forward_backward(batch.job, batch.data, batch.loss_fn)
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
        for each in (engine, alone):
            each.optim_steps([(job, adam) for job in company])


def test_a_dropped_job_is_forgotten_and_a_new_one_of_its_name_starts_afresh(tmp_path):
    engine = start(tmp_path)
    engine.run_batches([batch for batch in good_batches() if batch.job in "ad"])
    adapter = weakref.ref(engine.state("a").adapter)
    engine.drop_job("a")
    gc.collect()
    assert adapter() is None

    create_job(engine, "a", rank=4, seed=9)
    clean = make_engine(tmp_path)
    create_job(clean, "a", rank=4, seed=9)
    batch = Batch("a", random_data([9], seed=1), "cross_entropy")
    [result] = engine.run_batches([batch])
    assert result.metrics == pytest.approx(clean.run_batches([batch])[0].metrics, rel=1e-5)
    torch.testing.assert_close(gradient(engine, "a"), gradient(clean, "a"), rtol=1e-5, atol=1e-6)
