"""Reinforcement learning: SmolLM2-135M learns to answer sums of one digit, from the reward alone.

The loop is the usual one of policy gradients with a reward that can be checked:

1. sample a group of answers to each question from the weights as they are now;
2. reward each answer: 1 if it is the sum and nothing else, else 0;
3. the advantage of an answer is its reward minus the mean of its group (Shao et al. 2024, DeepSeekMath,
   https://arxiv.org/abs/2402.03300, section 4.1, without dividing by the standard deviation, as in Liu et al. 2025,
   https://arxiv.org/abs/2503.20783);
4. one step with the loss `importance_sampling`, whose objective is the sum over the answers' tokens of

       - exp(x - q) * A

   x: the token's log-probability now, q: when it was sampled, A: the advantage. Then from the start again.

The base model can add, but it does not answer: one answer in ten is the bare sum. After 20 steps nearly all are. The
questions that are asked before and after the training are none of those that it trains on.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/rl.py`. It takes about
four minutes on two cores. The reward of each step goes to rl-output/reward.png.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lorry

MAX_TOKENS = 6
HELD_OUT = 20
TTL_SECONDS = 3600
"""Samplers of single steps go away by themselves; the last one stays."""


@dataclass(frozen=True)
class Question:
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"Question: What is {self.a} + {self.b}?\nAnswer:"

    def reward(self, answer: str) -> float:
        return 1.0 if answer.strip() == str(self.a + self.b) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach SmolLM2-135M to answer sums, by reward alone.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8, help="questions per step")
    parser.add_argument("--samples", type=int, default=8, help="answers per question")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--output", type=Path, default=Path("rl-output"), help="folder of the plot")
    options = parser.parse_args()

    service = lorry.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    tokenizer = trainer.get_tokenizer()
    adam = lorry.AdamParams(learning_rate=options.learning_rate)

    dice = random.Random(0)
    questions = [Question(a, b) for a in range(10) for b in range(10)]
    dice.shuffle(questions)
    held_out, training = questions[:HELD_OUT], questions[HELD_OUT:]

    sampler = trainer.save_weights_for_sampler("step-0", ttl_seconds=TTL_SECONDS).result()
    before = evaluate(sampler, tokenizer, held_out, options.samples)
    print(f"Mean reward on {HELD_OUT} held-out questions before: {before:.3f}\n")

    rewards = []
    print("step  reward  mixed groups  tokens  log-ratio  seconds")
    for step in range(1, options.steps + 1):
        began = time.monotonic()
        groups = sample_groups(sampler, tokenizer, dice.sample(training, options.groups), options.samples, seed=step)
        rewards.append(float(np.mean([group.rewards for group in groups])))
        data = [datum for group in groups for datum in group.data()]

        drift = 0.0
        if data:  # none if in every group all answers were as good: then there is nothing to learn from
            update = trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(adam)
        # Submitted behind the step, which nobody has to wait for.
        saved = trainer.save_weights_for_sampler(
            f"step-{step}", ttl_seconds=TTL_SECONDS if step < options.steps else None
        )
        if data:
            drift = log_ratio(data, update.result())
        sampler = saved.result()

        mixed = sum(group.is_mixed for group in groups)
        tokens = sum(len(answer.tokens) for group in groups for answer in group.answers)
        print(
            f"{step:4d}  {rewards[-1]:6.3f}  {mixed:3d} of {len(groups):<5d}  {tokens:6d}  {drift:9.1e}"
            f"  {time.monotonic() - began:7.1f}",
            flush=True,
        )

    after = evaluate(sampler, tokenizer, held_out, options.samples)
    print(f"\nMean reward on {HELD_OUT} held-out questions after: {after:.3f} (before: {before:.3f})")
    print(f"The policy: {sampler.path}")
    print(f"The plot:   {plot(rewards, before, after, options.output)}")


@dataclass
class Group:
    """One question, the answers that were sampled for it, and their rewards."""

    prompt: lorry.ModelInput
    answers: list[lorry.SampledSequence]
    rewards: list[float]

    @property
    def is_mixed(self) -> bool:
        return len(set(self.rewards)) > 1

    def data(self) -> list[lorry.Datum]:
        """A datum for each answer whose advantage is not 0. Position i predicts token i + 1 of prompt and answer;
        what belongs to the prompt has the advantage 0."""
        mean = float(np.mean(self.rewards))
        prompt = self.prompt.to_ints()
        padding = [0.0] * (len(prompt) - 1)
        return [
            lorry.Datum(
                lorry.ModelInput.from_ints(prompt + answer.tokens[:-1]),
                {
                    "target_tokens": prompt[1:] + answer.tokens,
                    "logprobs": padding + answer.logprobs,
                    "advantages": padding + [reward - mean] * len(answer.tokens),
                },
            )
            for answer, reward in zip(self.answers, self.rewards, strict=True)
            if reward != mean
        ]


def sample_groups(
    sampler: lorry.SamplingClient, tokenizer: Any, questions: list[Question], samples: int, seed: int
) -> list[Group]:
    """All questions are submitted before the first answer is waited for."""
    # Temperature 1: the answers must come from the very policy whose gradient is taken.
    params = lorry.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, stop=["\n"], seed=seed)
    prompts = [lorry.ModelInput.from_ints(tokenizer.encode(question.text)) for question in questions]
    futures = [sampler.sample(prompt, samples, params) for prompt in prompts]
    groups = []
    for question, prompt, future in zip(questions, prompts, futures, strict=True):
        answers = future.result().sequences
        groups.append(Group(prompt, answers, [question.reward(answer.text or "") for answer in answers]))
    return groups


def evaluate(sampler: lorry.SamplingClient, tokenizer: Any, questions: list[Question], samples: int) -> float:
    groups = sample_groups(sampler, tokenizer, questions, samples, seed=1234)
    return float(np.mean([group.rewards for group in groups]))


def log_ratio(data: list[lorry.Datum], output: lorry.ForwardBackwardOutput) -> float:
    """The largest |x - q| over the answers' tokens. Here the step is taken with the weights that sampled, so it is
    about 0; if it is not, the data are misaligned or the policy has moved on."""
    gaps = [
        np.abs(fields["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy())[
            datum.loss_fn_inputs["advantages"].to_numpy() != 0
        ]
        for datum, fields in zip(data, output.loss_fn_outputs, strict=True)
    ]
    return float(np.concatenate(gaps).max())


def plot(rewards: list[float], before: float, after: float, folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, marker="o", label="training questions")
    axes.plot([0, len(rewards)], [before, after], "s", markersize=9, label="held-out questions, before and after")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="Sums of one digit, by reward alone")
    axes.grid(axis="y", color="#dddddd")
    axes.legend(loc="lower right")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "reward.png")
    return folder / "reward.png"


if __name__ == "__main__":
    main()
