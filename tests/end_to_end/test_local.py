"""`with lorry.local(model=...)`: everything that a notebook needs, from one block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lorry
from tests.conftest import QWEN_SMALL
from tests.end_to_end.running import random_batch, train

PROMPT = lorry.ModelInput.from_ints([10, 20, 30, 40])


@pytest.fixture(scope="module")
def service(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lorry.ServiceClient]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORRY_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("LORRY_URL", raising=False)
        with lorry.local(model=f"{QWEN_SMALL}={tiny_qwen3}"):
            yield lorry.ServiceClient()
        assert "LORRY_URL" not in os.environ


@pytest.fixture(scope="module")
def client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    return service.create_lora_training_client(QWEN_SMALL, rank=8, seed=1)


@pytest.fixture(scope="module")
def base(service: lorry.ServiceClient) -> lorry.SamplingClient:
    return service.create_sampling_client(base_model=QWEN_SMALL)


def tokens_of(sampler: lorry.SamplingClient, **params: object) -> list[int]:
    given = {"max_tokens": 12, "temperature": 0.0, "stop": [], **params}
    return sampler.sample(PROMPT, 1, lorry.SamplingParams(**given)).result(60).sequences[0].tokens


def test_info(service: lorry.ServiceClient, client: lorry.TrainingClient) -> None:
    info = client.get_info()
    assert info.model_id == info.model_data.model_id == client.model_id
    assert (info.model_name, info.lora_rank, info.is_lora) == (QWEN_SMALL, 8, True)
    assert (info.model_data.model_name, info.model_data.lora_rank) == (QWEN_SMALL, 8)
    [model] = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length, model.workers) == (QWEN_SMALL, 512, 1)


def test_training_lowers_the_loss(service: lorry.ServiceClient) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=8, seed=1)
    losses = train(client, [7] * 10, learning_rate=3e-3)
    assert losses[-1] < losses[0] - 0.5
    assert losses == sorted(losses, reverse=True)


def test_one_seed_gives_one_adapter(service: lorry.ServiceClient) -> None:
    def run(seed: int) -> list[float]:
        return train(service.create_lora_training_client(QWEN_SMALL, rank=8, seed=seed), [1, 2, 3])

    assert run(5) == pytest.approx(run(5), abs=1e-6)
    assert run(5)[1:] != pytest.approx(run(6)[1:], abs=1e-4)


def test_logprobs_and_loss_are_those_of_the_targets(client: lorry.TrainingClient) -> None:
    batch = random_batch(3, rows=3, length=5)
    output = client.forward(batch).result(60)
    rows = [fields["logprobs"].tolist() for fields in output.loss_fn_outputs]
    assert [len(row) for row in rows] == [5, 5, 5]
    everything = [logprob for row in rows for logprob in row]
    assert output.metrics["loss:sum"] == pytest.approx(-sum(everything), rel=1e-5)
    assert output.loss == pytest.approx(-sum(everything) / 15, rel=1e-5)


def test_the_tokenizer_comes_from_the_worker(client: lorry.TrainingClient, base: lorry.SamplingClient) -> None:
    tokenizer = client.get_tokenizer()
    text = "The lorry leaves the depot at dawn, ünïcode too."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n"
    assert base.get_tokenizer().encode(text) == tokenizer.encode(text)


def test_greedy_sampling_is_the_most_likely_token_each_time(base: lorry.SamplingClient) -> None:
    tokens = tokens_of(base)
    assert len(tokens) == 12
    assert tokens_of(base) == tokens
    for length in (0, 5, 11):
        following = PROMPT.append(tokens[: length + 1])
        topk = base.sample(following, 1, lorry.SamplingParams(max_tokens=1, stop=[]), topk_prompt_logprobs=2)
        rows = topk.result(60).topk_prompt_logprobs
        assert rows is not None
        last = rows[-1]
        assert last is not None
        assert last[0][0] == tokens[length]
        assert last[0][1] >= last[1][1]


def test_temperature_with_a_seed_can_be_repeated(base: lorry.SamplingClient) -> None:
    hot = [tokens_of(base, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1]
    assert hot[0] != hot[2]
    assert hot[0] != tokens_of(base)
    several = base.sample(PROMPT, 4, lorry.SamplingParams(max_tokens=12, temperature=1.5, seed=1, stop=[])).result(60)
    assert len({tuple(sequence.tokens) for sequence in several.sequences}) > 1
    again = base.sample(PROMPT, 4, lorry.SamplingParams(max_tokens=12, temperature=1.5, seed=1, stop=[])).result(60)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in several.sequences]


def test_stop_strings_and_stop_tokens(base: lorry.SamplingClient) -> None:
    tokens = tokens_of(base)
    tokenizer = base.get_tokenizer()
    position = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    by_token = base.sample(
        PROMPT, 1, lorry.SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=[tokens[position]])
    )
    [sequence] = by_token.result(60).sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens[:position] == tokens[:position]
    assert len(sequence.tokens) <= position + 1

    text = tokenizer.decode(tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    by_string = base.sample(PROMPT, 1, lorry.SamplingParams(max_tokens=12, temperature=0.0, stop=stop))
    [sequence] = by_string.result(60).sequences
    assert sequence.stop_reason == "stop"
    assert sequence.text == text[: text.index(stop)]
    [unstopped] = (
        base.sample(PROMPT, 1, lorry.SamplingParams(max_tokens=12, temperature=0.0, stop=[])).result(60).sequences
    )
    assert unstopped.stop_reason == "length"
    assert unstopped.text == text


def test_sampling_ends_with_the_context(base: lorry.SamplingClient) -> None:
    prompt = lorry.ModelInput.from_ints([1] * 500)
    [sequence] = base.sample(prompt, 1, lorry.SamplingParams(max_tokens=100, stop=[])).result(60).sequences
    assert sequence.stop_reason == "length"
    assert len(sequence.tokens) == 12


def test_the_trainer_and_the_sampler_agree(service: lorry.ServiceClient, base: lorry.SamplingClient) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=8, seed=2)
    batch = random_batch(9, rows=1, length=20)
    train(client, [9] * 3, learning_rate=3e-3)
    sampler = client.save_weights_and_get_sampling_client("agree")
    trained = client.forward(batch).result(60).loss_fn_outputs[0]["logprobs"].tolist()
    whole = batch[0].model_input.append([int(batch[0].loss_fn_inputs["target_tokens"].array[-1])])
    sampled = sampler.compute_logprobs(whole).result(60)
    assert sampled[0] is None
    assert sampled[1:] == pytest.approx(trained, abs=1e-4)
    assert base.compute_logprobs(whole).result(60)[1:] != pytest.approx(trained, abs=1e-2)


def test_a_sampler_is_frozen_when_it_is_saved(service: lorry.ServiceClient) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=8, seed=3)
    train(client, [4] * 3, learning_rate=1e-2)
    saving = client.save_weights_for_sampler("frozen")
    train(client, [5] * 6, learning_rate=1e-2)
    frozen = saving.result(60)
    assert frozen.path == f"lorry://{client.model_id}/sampler_weights/frozen"
    assert frozen.size > 0
    later = client.save_weights_and_get_sampling_client()
    by_path = service.create_sampling_client(model_path=frozen.path)
    other_scheme = service.create_sampling_client(model_path=frozen.path.replace("lorry://", "tinker://"))
    logprobs = [c.compute_logprobs(PROMPT).result(60)[1:] for c in (frozen, by_path, other_scheme, later)]
    assert logprobs[0] == logprobs[1] == logprobs[2]
    assert logprobs[3] != pytest.approx(logprobs[0], abs=1e-3)


def test_a_run_goes_on_from_its_state(service: lorry.ServiceClient) -> None:
    """With the optimizer exactly; without, from the same weights and then otherwise."""
    client = service.create_lora_training_client(QWEN_SMALL, rank=8, seed=4)
    train(client, [1, 2, 3], learning_rate=3e-3)
    path = client.save_state("middle").result(60).path
    expected = train(client, [4, 5, 6], learning_rate=3e-3)

    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert resumed.model_id != client.model_id
    assert resumed.get_info().lora_rank == 8
    assert train(resumed, [4, 5, 6], learning_rate=3e-3) == pytest.approx(expected, abs=1e-6)

    weights_only = train(service.create_training_client_from_state(path), [4, 5, 6], learning_rate=3e-3)
    assert weights_only[0] == pytest.approx(expected[0], abs=1e-6)
    assert weights_only[1:] != pytest.approx(expected[1:], abs=1e-4)

    loaded = client.load_state_with_optimizer("middle").result(60)
    assert (loaded.path, loaded.optimizer, loaded.dropped_gradients) == (path, True, False)
    assert train(client, [4, 5, 6], learning_rate=3e-3) == pytest.approx(expected, abs=1e-6)


def test_loading_drops_gradients_and_says_so(service: lorry.ServiceClient) -> None:
    client = service.create_lora_training_client(QWEN_SMALL, rank=8, seed=5)
    client.save_state("start")
    client.forward_backward(random_batch(1))
    assert client.load_state("start").result(60).dropped_gradients
    with pytest.raises(lorry.UserError, match="nothing is accumulated"):
        client.optim_step().result(60)


def test_a_program_that_ends_leaves_its_ops_on_the_server(service: lorry.ServiceClient) -> None:
    """Forgotten futures are flushed at exit: what was submitted runs, and its result stays."""
    program = (
        "import lorry\n"
        f"client = lorry.ServiceClient().create_lora_training_client('{QWEN_SMALL}', rank=4)\n"
        "datum = lorry.Datum(lorry.ModelInput.from_ints([1, 2, 3]), {'target_tokens': [2, 3, 4]})\n"
        "for _ in range(20):\n"
        "    client.forward_backward([datum])\n"
        "    client.optim_step_async(lorry.AdamParams())\n"
        "print(client.model_id)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    job = done.stdout.strip()
    process = service._process
    last = process.app.AsyncResult(f"{job}.40")
    assert last.get(timeout=60)["metrics"]["grad_norm"] > 0
    assert process.mailbox.status(job).committed == 40
