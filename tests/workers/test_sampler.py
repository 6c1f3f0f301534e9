from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.errors import OpCancelled, UserError
from lorry_jobs.types import Datum, ModelInput, SamplingParams
from lorry_workers.engine.sampler import choose
from tests.tiny_engine import create_job, make_engine, randomize
from tests.tiny_models import CONTEXT_LENGTH

JOB = "a1:train:0"
PROMPT = [11, 205, 33, 42, 300]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = make_engine(tmp_path_factory.mktemp("store"), max_sample_rows=3)
    create_job(engine)
    randomize(engine)
    return engine


def sample(engine, prompt=PROMPT, count=1, with_adapter=True, **options):
    given = {
        name: options.pop(name)
        for name in list(options)
        if name in ("prompt_logprobs", "topk_prompt_logprobs", "should_stop")
    }
    adapter = engine.state(JOB).adapter if with_adapter else None
    return engine.sampler.sample(adapter, prompt, count, SamplingParams(**options), **given)


def trainer_logprobs(engine, tokens):
    """Log-probabilities of tokens[1:] by the trainer's forward."""
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    return engine.forward(JOB, [datum], "cross_entropy").loss_fn_outputs[0]["logprobs"].array


def test_logprobs_of_samples_and_prompt_equal_the_trainers(engine):
    response = sample(engine, count=5, max_tokens=20, stop=[], seed=1, prompt_logprobs=True, temperature=0.7)
    assert len({tuple(s.tokens) for s in response.sequences}) == 5
    for sequence in response.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 20
        expected = trainer_logprobs(engine, PROMPT + sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, expected[len(PROMPT) - 1 :], atol=1e-4)
        assert response.prompt_logprobs[0] is None
        np.testing.assert_allclose(response.prompt_logprobs[1:], expected[: len(PROMPT) - 1], atol=1e-4)


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_sampled(engine):
    many = sample(engine, count=7, max_tokens=12, seed=5, stop=[])
    few = sample(engine, count=2, max_tokens=12, seed=5, stop=[])
    assert [s.tokens for s in many.sequences[:2]] == [s.tokens for s in few.sequences]
    other = sample(engine, count=1, max_tokens=12, seed=6, stop=[])
    assert other.sequences[0].tokens != few.sequences[0].tokens
    unseeded = [sample(engine, max_tokens=12, stop=[]).sequences[0].tokens for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_greedy_is_the_most_likely_token_at_each_step(engine):
    tokens = sample(engine, max_tokens=6, temperature=0, stop=[]).sequences[0].tokens
    response = sample(engine, prompt=PROMPT + tokens, max_tokens=1, topk_prompt_logprobs=3)
    best = [row[0][0] for row in response.topk_prompt_logprobs[len(PROMPT) :]]
    assert best == tokens
    assert response.topk_prompt_logprobs[0] is None
    assert all(len(row) == 3 and row[0][1] >= row[1][1] for row in response.topk_prompt_logprobs[1:])
    assert sample(engine, max_tokens=6, top_k=1, stop=[]).sequences[0].tokens == tokens
    assert sample(engine, max_tokens=6, top_p=1e-9, stop=[], seed=1).sequences[0].tokens == tokens
    assert sample(engine, max_tokens=6, temperature=1e-6, stop=[], seed=1).sequences[0].tokens == tokens


def test_stop_tokens_stay_in_the_tokens_and_not_in_the_text(engine):
    free = sample(engine, max_tokens=10, temperature=0, stop=[]).sequences[0]
    stop = free.tokens[4]
    cut = free.tokens[: free.tokens.index(stop) + 1]
    for options in ({"stop": [stop]}, {"stop_token_ids": [stop], "stop": []}):
        stopped = sample(engine, max_tokens=10, temperature=0, **options).sequences[0]
        assert stopped.tokens == cut
        assert stopped.stop_reason == "stop"
        assert stopped.text == engine.base.tokenizer.decode(cut[:-1], skip_special_tokens=True)
    assert free.stop_reason == "length"


def test_rows_that_end_leave_the_batch_and_the_others_go_on(engine):
    free = sample(engine, count=3, max_tokens=15, seed=3, stop=[]).sequences
    stop = free[1].tokens[2]
    stopped = sample(engine, count=3, max_tokens=15, seed=3, stop=[stop]).sequences
    for one, other in zip(free, stopped, strict=True):
        end = one.tokens.index(stop) + 1 if stop in one.tokens else 15
        assert other.tokens == one.tokens[:end]
        np.testing.assert_allclose(other.logprobs, one.logprobs[:end], atol=1e-4)


def test_end_of_text_stops_unless_the_stop_list_is_empty(engine):
    [eos, *_] = engine.base.eos_token_ids
    head = engine.sampler.head
    bias = torch.zeros(engine.base.vocab_size)
    bias[eos] = 100
    head.bias = bias
    try:
        assert sample(engine, max_tokens=5).sequences[0].tokens == [eos]
        assert sample(engine, max_tokens=5, stop=["zzz"]).sequences[0].tokens == [eos]
        assert sample(engine, max_tokens=5, stop=[]).sequences[0].tokens == [eos] * 5
    finally:
        head.bias = None


def test_a_stop_string_is_found_across_tokens(engine):
    free = sample(engine, max_tokens=40, temperature=0.8, seed=2, stop=[]).sequences[0]
    tokenizer = engine.base.tokenizer
    # A string that begins inside one token and ends inside a later one.
    for start in range(2, 30):
        parts = [tokenizer.decode(free.tokens[i : i + 1]) for i in range(start, start + 3)]
        text = "".join(parts)
        if all(part.isascii() and part.strip() for part in parts) and len(parts[0]) > 1:
            stop = text[1:]
            break
    else:
        pytest.fail("no ascii run in the sample")
    whole = tokenizer.decode(free.tokens)
    stopped = sample(engine, max_tokens=40, temperature=0.8, seed=2, stop=stop).sequences[0]
    assert stopped.stop_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.tokens == free.tokens[: len(stopped.tokens)]
    assert stop in tokenizer.decode(stopped.tokens)
    assert stop not in tokenizer.decode(stopped.tokens[:-1])


def test_limits_of_the_context(engine):
    prompt = [7] * (CONTEXT_LENGTH - 3)
    sequence = sample(engine, prompt=prompt, max_tokens=50, stop=[]).sequences[0]
    assert (len(sequence.tokens), sequence.stop_reason) == (3, "length")
    assert len(sample(engine, prompt=prompt, stop=[]).sequences[0].tokens) == 3
    full = sample(engine, prompt=[7] * CONTEXT_LENGTH, max_tokens=1, prompt_logprobs=True)
    assert (full.sequences[0].tokens, full.sequences[0].stop_reason) == ([], "length")
    assert len(full.prompt_logprobs) == CONTEXT_LENGTH
    single = sample(engine, prompt=[7], max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2)
    assert single.prompt_logprobs == [None]
    assert single.topk_prompt_logprobs == [None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [7] * (CONTEXT_LENGTH + 1)}, "context is 512"),
        ({"prompt": [1, 9999]}, "token 9999"),
        ({"count": 0}, "num_samples"),
        ({"topk_prompt_logprobs": 9999}, "topk_prompt_logprobs"),
    ],
)
def test_bad_requests(engine, options, reason):
    with pytest.raises(UserError, match=reason):
        sample(engine, **options)


def test_should_stop_ends_a_request_between_steps(engine):
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) == 4

    with pytest.raises(OpCancelled):
        sample(engine, max_tokens=50, stop=[], should_stop=should_stop)
    assert len(asked) == 4
    assert engine.trainer.active.bank is None


def test_choose_follows_the_distribution_and_its_limits():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]])).expand(4000, -1)
    random = [torch.Generator().manual_seed(i) for i in range(4000)]

    def shares(**options):
        counts = torch.bincount(choose(logits, SamplingParams(**options), random), minlength=5)
        return (counts / 4000).tolist()

    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05, 0], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert shares(top_p=0.75) == pytest.approx([0.625, 0.375, 0, 0, 0], abs=0.03)
    assert shares(top_k=3, top_p=0.5) == pytest.approx([1, 0, 0, 0, 0], abs=0.03)
    sharp = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]) ** 2
    assert shares(temperature=0.5) == pytest.approx((sharp / sharp.sum()).tolist(), abs=0.03)
