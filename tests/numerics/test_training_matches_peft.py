"""The engine's losses and adapters are those of a plain torch + peft loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.types import AdamParams, Datum, ModelInput
from lorry_workers.engine.bank import Segment
from lorry_workers.engine.losses import LOSSES
from tests.tiny_engine import create_job, make_engine, peft_model, random_data, randomize, targets

JOB = "a1:train:0"
LENGTHS = [23, 5, 40, 17, 1]


def plain_losses(model, data, terms):
    """Σ loss per datum by autograd, one datum at a time, without padding."""
    losses = []
    for datum in data:
        inputs = {k: torch.from_numpy(v.array) for k, v in datum.loss_fn_inputs.items()}
        logits = model(input_ids=torch.from_numpy(datum.model_input.tokens)[None]).logits[0]
        picked = torch.log_softmax(logits.float(), -1).gather(-1, inputs["target_tokens"][:, None])[:, 0]
        losses.append(terms(picked, inputs).sum())
    return torch.stack(losses)


def cross_entropy(x, inputs):
    return -inputs["weights"] * x


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", True), ("qwen3", False)])
@pytest.mark.parametrize("unembed", [True, False])
def test_ten_steps_give_the_same_losses_and_adapter(tmp_path, family, tied, unembed):
    engine = make_engine(tmp_path, family, tied, max_tokens_per_microbatch=64, head_chunk_elements=500 * 11)
    create_job(engine, train_unembed=unembed)
    model = peft_model(family, tied, target_modules=targets(unembed=unembed))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    adam = AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.01, grad_clip_norm=5.0)

    for step in range(10):
        data = random_data(LENGTHS, seed=step, weights="uniform")
        output = engine.forward_backward(JOB, data, "cross_entropy")
        metrics = engine.optim_step(JOB, adam).metrics

        loss = plain_losses(model, data, cross_entropy).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 5.0)
        optimizer.step()
        optimizer.zero_grad()

        assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours = engine.state(JOB).adapter.parameters()
    assert len(ours) == len(trained)
    # Per matrix: both losses and adapters drift apart only by rounding.
    for mine, theirs in zip(ours, trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_fn", list(LOSSES))
def test_every_loss_and_its_gradient_match_autograd(tmp_path, loss_fn):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    data = random_data([9, 14], weights="uniform", advantages="normal", logprobs="normal")
    # Sampling log-probabilities near the model's own, so that ratios lie on both sides of the thresholds.
    own = engine.forward(JOB, data, "cross_entropy").loss_fn_outputs
    data = [
        Datum(
            d.model_input,
            {**d.loss_fn_inputs, "logprobs": o["logprobs"].array + 0.3 * d.loss_fn_inputs["logprobs"].array},
        )
        for d, o in zip(data, own, strict=True)
    ]

    def terms(x, i):
        ratio = torch.exp(x - i["logprobs"])
        advantages = i["advantages"]
        match loss_fn:
            case "cross_entropy":
                return -i["weights"] * x
            case "importance_sampling":
                return -ratio * advantages
            case "ppo":
                return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            case "cispo":
                return -ratio.clamp(0, 4).detach() * x * advantages
            case "dro":
                return -(x * advantages - 0.5 * 0.05 * (x - i["logprobs"]) ** 2)
            case "gspo":
                r = torch.exp((x.detach() - i["logprobs"]).mean() + x - x.detach())
                return -torch.min(r * advantages, r.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
        raise AssertionError(loss_fn)

    model = peft_model(target_modules=targets())
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for theirs, mine in zip(trained, engine.state(JOB).adapter.parameters(), strict=True):
            theirs.copy_(mine)
    loss = plain_losses(model, data, terms).sum()
    loss.backward()
    output = engine.forward_backward(JOB, data, loss_fn)
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    for mine, theirs in zip(engine.state(JOB).adapter.parameters(), trained, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_batch_micro_batches_and_checkpointing_change_nothing(tmp_path):
    data = random_data([31, 8, 8, 64, 3], weights="uniform")
    results = []
    for options, parts in (
        ({}, [data]),
        ({}, [data[:2], data[2:]]),
        ({"max_tokens_per_microbatch": 1}, [data]),
        ({"max_tokens_per_microbatch": 20, "head_chunk_elements": 1}, [data]),
        ({"activation_checkpointing": True}, [data]),
    ):
        engine = make_engine(tmp_path, **options)
        assert bool(engine.trainer.checkpointed) == ("activation_checkpointing" in options)
        create_job(engine)
        randomize(engine)
        outputs = [engine.forward_backward(JOB, part, "cross_entropy") for part in parts]
        logprobs = np.concatenate([f["logprobs"].array for o in outputs for f in o.loss_fn_outputs])
        results.append((logprobs, engine.state(JOB).adapter.require_gradients()))
    for logprobs, gradient in results[1:]:
        np.testing.assert_allclose(logprobs, results[0][0], atol=1e-5)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-5)


def test_forward_equals_forward_backward_and_leaves_everything_as_it_was(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    data = random_data([12, 30], weights="uniform")
    trained = engine.forward_backward(JOB, data, "cross_entropy")
    state = engine.state(JOB)
    gradient, calls = state.adapter.require_gradients().clone(), state.accumulated_calls
    scored = engine.forward(JOB, data, "cross_entropy")
    assert scored.metrics == pytest.approx(trained.metrics)
    assert torch.equal(state.adapter.require_gradients(), gradient)
    assert state.accumulated_calls == calls
    for one, two in zip(scored.loss_fn_outputs, trained.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"].array, two["logprobs"].array, atol=1e-6)


def test_ignored_targets_count_as_weight_zero_and_have_logprob_zero(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    [plain] = random_data([20])
    targets_ = plain.loss_fn_inputs["target_tokens"].array.copy()
    weights = np.ones(20, np.float32)
    weights[:12] = 0
    by_weight = engine.forward_backward(
        JOB, [Datum(plain.model_input, {"target_tokens": targets_, "weights": weights})], "cross_entropy"
    )
    gradient = engine.state(JOB).adapter.require_gradients().clone()
    engine.drop_gradients(JOB)
    targets_[:12] = -100
    by_mask = engine.forward_backward(JOB, [Datum(plain.model_input, {"target_tokens": targets_})], "cross_entropy")
    assert by_mask.metrics == pytest.approx(by_weight.metrics)
    assert by_mask.metrics["weights:sum"] == 8
    assert by_mask.loss == pytest.approx(by_mask.metrics["loss:sum"] / 8)
    torch.testing.assert_close(engine.state(JOB).adapter.require_gradients(), gradient)
    logprobs = by_mask.loss_fn_outputs[0]["logprobs"].array
    assert (logprobs[:12] == 0).all()
    assert (logprobs[12:] < 0).all()

    nothing = Datum(plain.model_input, {"target_tokens": np.full(20, -100)})
    assert engine.forward_backward(JOB, [nothing], "cross_entropy").metrics["loss:sum"] == 0
    assert engine.forward(JOB, [nothing], "cross_entropy").metrics["weights:sum"] == 0


def test_soft_targets_are_a_sum_over_columns_and_mix_with_hard_ones(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 400, 11)
    columns = random.integers(0, 400, (11, 3))
    weights = random.uniform(0, 1, (11, 3)).astype(np.float32)
    source = ModelInput.from_ints(tokens)
    soft = Datum(source, {"target_tokens": columns, "weights": weights})
    [hard] = random_data([6], weights="uniform")

    output = engine.forward_backward(JOB, [hard, soft], "cross_entropy")
    gradient = engine.state(JOB).adapter.require_gradients().clone()
    engine.drop_gradients(JOB)
    alone = [Datum(source, {"target_tokens": columns[:, k], "weights": weights[:, k]}) for k in range(3)]
    parts = engine.forward_backward(JOB, [hard, *alone], "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(parts.metrics["loss:sum"], rel=1e-5)
    torch.testing.assert_close(engine.state(JOB).adapter.require_gradients(), gradient, rtol=1e-4, atol=1e-5)
    assert output.loss_fn_outputs[0]["logprobs"].shape == [6]
    assert output.loss_fn_outputs[1]["logprobs"].shape == [11, 3]
    np.testing.assert_allclose(
        output.loss_fn_outputs[1]["logprobs"].array[:, 1], parts.loss_fn_outputs[2]["logprobs"].array, atol=1e-5
    )


@pytest.mark.parametrize("sizes", [(18, 18), (9, 27)])
@pytest.mark.parametrize("ranks", [(4, 4), (4, 7)])
def test_tokens_of_different_adapters_in_one_pass(tmp_path, sizes, ranks):
    engine = make_engine(tmp_path)
    for job, seed, rank in (("a", 1, ranks[0]), ("b", 2, ranks[1])):
        create_job(engine, job, seed=seed, rank=rank, train_unembed=False, train_mlp=rank == 4)
        randomize(engine, job)
    adapters = [engine.state("a").adapter, engine.state("b").adapter]
    tokens = torch.randint(0, 400, (4, 9), generator=torch.Generator().manual_seed(0))
    active, body = engine.trainer.active, engine.trainer.body
    bank = active.make_bank(adapters, gradients=False)
    bank.segments = (Segment(0, 0, sizes[0]), Segment(1, sizes[0], sum(sizes)))
    first = sizes[0] // 9
    with torch.no_grad():
        with active.use(bank):
            together = body(input_ids=tokens, use_cache=False).last_hidden_state
        for adapter, rows in zip(adapters, (slice(0, first), slice(first, 4)), strict=True):
            with active.use_one(adapter):
                alone = body(input_ids=tokens[rows], use_cache=False).last_hidden_state
            torch.testing.assert_close(together[rows], alone, rtol=1e-5, atol=1e-5)
        assert active.bank is None
        with active.use(bank), pytest.raises(ValueError, match=r"9 tokens arrived where .* expect 36"):
            body(input_ids=tokens[:1], use_cache=False)


def test_without_an_adapter_the_model_is_the_base_model(tmp_path):
    engine = make_engine(tmp_path)
    create_job(engine)
    randomize(engine)
    tokens = torch.arange(3, 60)[None]
    plain = peft_model(target_modules=targets()).get_base_model()
    with torch.no_grad(), peft_model(target_modules=targets()).disable_adapter():
        expected = plain.model(input_ids=tokens).last_hidden_state
        assert torch.equal(engine.trainer.body(input_ids=tokens).last_hidden_state, expected)


def test_bfloat16_base_with_float32_adapter(tmp_path):
    engine = make_engine(tmp_path, dtype=torch.bfloat16)
    exact = make_engine(tmp_path)
    data = random_data([12, 30], weights="uniform")
    losses = []
    for each in (engine, exact):
        create_job(each)
        randomize(each)
        losses.append(each.forward_backward(JOB, data, "cross_entropy").loss)
        each.optim_step(JOB, AdamParams(learning_rate=1e-3))
    assert engine.state(JOB).adapter.flat.dtype == torch.float32
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
