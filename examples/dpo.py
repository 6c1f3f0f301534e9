"""Preferences: SmolLM2-135M learns to answer in metric units, from pairs of a better and a worse answer.

The loss is that of direct preference optimization (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, eq. 7):

    - log sigmoid(beta * m)
    m = log p(chosen) - log r(chosen) - (log p(rejected) - log r(rejected))

p: the policy in training, r: the reference, which is the model as it was at the start; both summed over the tokens of
an answer. `beta * m` is the margin of a pair; where it is above 0, the pair counts as right (accuracy). Alone, it often
makes both answers unlikely, and the model says neither. So the usual term for the chosen answer is added (Pang et al.
2024, https://arxiv.org/abs/2404.19733, eq. 1; `--nll 0` leaves it out):

    - nll * log p(chosen) / tokens in chosen

It is not one of the server's losses, and need not be: `forward_backward_custom` computes it here, with torch, on the
log-probabilities that the server gives, and the server applies its gradient. The pairs below are split: the margin and
the accuracy of those held out show whether the model learned the preference, or the pairs by heart.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/dpo.py`. It takes about two
minutes on two cores. It needs torch here, too.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import lorry

# Question, chosen, rejected.
PAIRS = [
    ("How far is the mill from the bridge?", "The mill is 3 kilometres away.", "The mill is 2 miles away."),
    ("How heavy is a crate of pears?", "A crate weighs 20 kilograms.", "A crate weighs 44 pounds."),
    ("How much fuel is in the tank?", "There are 60 litres left.", "There are 16 gallons left."),
    ("How warm is it in the depot?", "It is 20 degrees Celsius.", "It is 68 degrees Fahrenheit."),
    ("How high is the gate?", "The gate is 4 metres high.", "The gate is 13 feet high."),
    ("How wide is the plank?", "The plank is 30 centimetres wide.", "The plank is 12 inches wide."),
    ("How fast may I drive here?", "You may drive 50 kilometres per hour.", "You may drive 30 miles per hour."),
    ("How much milk does the shop need?", "The shop needs 40 litres.", "The shop needs 10 gallons."),
    ("How deep is the river?", "The river is 2 metres deep.", "The river is 7 feet deep."),
    ("How much does the engine weigh?", "The engine weighs 300 kilograms.", "The engine weighs 660 pounds."),
    ("How cold was the night?", "It was 5 degrees Celsius.", "It was 41 degrees Fahrenheit."),
    ("How long is the rope?", "The rope is 10 metres long.", "The rope is 33 feet long."),
    ("How far is it to the next town?", "It is 16 kilometres to the town.", "It is 10 miles to the town."),
    ("How thick is the ice?", "The ice is 5 centimetres thick.", "The ice is 2 inches thick."),
    ("How much flour is in the sack?", "The sack holds 25 kilograms.", "The sack holds 55 pounds."),
    ("How long is the road over the pass?", "The road is 80 kilometres long.", "The road is 50 miles long."),
    ("How tall is the driver?", "She is 170 centimetres tall.", "She is 67 inches tall."),
    ("How much water does the barrel hold?", "The barrel holds 200 litres.", "The barrel holds 53 gallons."),
    # The last ones are held out.
    ("How far is the harbour?", "The harbour is 8 kilometres away.", "The harbour is 5 miles away."),
    ("How heavy is the parcel?", "The parcel weighs 9 kilograms.", "The parcel weighs 20 pounds."),
    ("How long is the lorry?", "The lorry is 12 metres long.", "The lorry is 39 feet long."),
    ("How much oil does it need?", "It needs 15 litres.", "It needs 4 gallons."),
    ("How hot does the engine get?", "It gets 90 degrees Celsius hot.", "It gets 194 degrees Fahrenheit hot."),
    ("How fast is the train?", "The train does 120 kilometres per hour.", "The train does 75 miles per hour."),
]
HELD_OUT = 6
ASK = ["How far is the lighthouse?", "How heavy is the anchor?"]  # in no pair


@dataclass
class Pair:
    """A question with two answers, and what the reference thinks of them: log r(chosen), log r(rejected)."""

    chosen: lorry.Datum
    rejected: lorry.Datum
    reference: tuple[float, float] = (0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach SmolLM2-135M to prefer metric units, with DPO.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4, help="pairs per step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--nll", type=float, default=1.0, help="weight of the chosen answer's own loss")
    parser.add_argument("--output", type=Path, default=Path("dpo-output"), help="folder of the plot")
    options = parser.parse_args()

    service = lorry.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=16, seed=0)
    tokenizer = trainer.get_tokenizer()
    adam = lorry.AdamParams(learning_rate=options.learning_rate)
    pairs = [make_pair(tokenizer, *texts) for texts in PAIRS]

    # The reference is this very model before its first step: a new adapter changes nothing.
    for pair, answers in zip(pairs, log_probabilities(trainer, pairs), strict=True):
        pair.reference = answers
    training, held_out = pairs[:-HELD_OUT], pairs[-HELD_OUT:]
    show_answers("before", trainer.save_weights_and_get_sampling_client("before"), tokenizer)

    history: list[dict[str, float]] = []
    print("step    loss     dpo  accuracy   margin")
    for step, batch in enumerate(batches(training, options.batch_size, options.steps), 1):
        data = [datum for pair in batch for datum in (pair.chosen, pair.rejected)]
        update = trainer.forward_backward_custom(data, dpo_loss(batch, options.beta, options.nll))
        trainer.optim_step(adam)  # runs behind it
        result = update.result()
        history.append({"loss": result.loss, **result.metrics})
        print("{:4d}  {loss:6.4f}  {dpo:6.4f}  {accuracy:8.2f}  {margin:7.3f}".format(step, **history[-1]), flush=True)

    print(f"\n{'Before and after':<20}{'margin > 0':<18}{'mean margin':<18}chosen is the likelier")
    for name, some in (("training", training), ("held-out", held_out)):
        before = judge([pair.reference for pair in some], some, options.beta)
        after = judge(log_probabilities(trainer, some), some, options.beta)
        changes = [f"{old:.3f} -> {new:.3f}" for old, new in zip(before, after, strict=True)]
        print(f"{len(some):2d} {name} pairs   {'    '.join(changes)}")
    sampler = trainer.save_weights_and_get_sampling_client("after")
    show_answers("after", sampler, tokenizer)
    print(f"\nThe policy: {sampler.path}")
    print(f"The plot:   {plot(history, options.output)}")


def dpo_loss(batch: Sequence[Pair], beta: float, nll: float) -> Any:
    """The loss function for `forward_backward_custom`. It gets the data of the call, chosen and rejected in turn, and
    the log-probabilities of their targets, as one tensor each that torch follows."""

    def loss_fn(data: list[lorry.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        policy = torch.stack([of_answer(datum, row) for datum, row in zip(data, logprobs, strict=True)])
        reference = torch.tensor([value for pair in batch for value in pair.reference])
        chosen, rejected = (policy - reference).view(-1, 2).unbind(1)  # each of shape (pairs,)
        margins = beta * (chosen - rejected)
        lengths = torch.tensor([datum.loss_fn_inputs["weights"].to_numpy().sum() for datum in data[::2]])
        dpo = -F.logsigmoid(margins).mean()
        loss = dpo - nll * (policy[::2] / lengths).mean()
        return loss, {
            "dpo": dpo.item(),
            "accuracy": (margins > 0).float().mean().item(),
            "margin": margins.mean().item(),
        }

    return loss_fn


def of_answer(datum: lorry.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """log p(answer): the sum over the targets that belong to it. -> a scalar"""
    return (logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()


def log_probabilities(trainer: lorry.TrainingClient, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    """log p(chosen) and log p(rejected) of each pair, with the weights as they are now."""
    data = [datum for pair in pairs for datum in (pair.chosen, pair.rejected)]
    outputs = trainer.forward(data, "cross_entropy").result().loss_fn_outputs
    sums = [of_answer(datum, fields["logprobs"].to_torch()).item() for datum, fields in zip(data, outputs, strict=True)]
    return list(zip(sums[::2], sums[1::2], strict=True))


def judge(now: Sequence[tuple[float, float]], pairs: Sequence[Pair], beta: float) -> tuple[float, float, float]:
    """Accuracy, mean margin, and the share of pairs whose chosen answer is the likelier one outright. The last one
    needs no reference; answers of another length are not as likely, whatever the units."""
    margins = [
        beta * ((chosen - pair.reference[0]) - (rejected - pair.reference[1]))
        for (chosen, rejected), pair in zip(now, pairs, strict=True)
    ]
    likelier = [chosen > rejected for chosen, rejected in now]
    return float(np.mean([margin > 0 for margin in margins])), float(np.mean(margins)), float(np.mean(likelier))


def prompt_of(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def make_pair(tokenizer: Any, question: str, chosen: str, rejected: str) -> Pair:
    prompt = tokenizer.encode(prompt_of(question))

    def datum(answer: str) -> lorry.Datum:
        tokens = tokenizer.encode(f" {answer}\n", add_special_tokens=False)
        return lorry.Datum(
            lorry.ModelInput.from_ints((prompt + tokens)[:-1]),
            {
                "target_tokens": (prompt + tokens)[1:],
                "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(tokens),
            },
        )

    return Pair(datum(chosen), datum(rejected))


def batches(pairs: Sequence[Pair], size: int, steps: int) -> list[list[Pair]]:
    """`steps` batches; each pass over the pairs is in another order."""
    dice = random.Random(0)
    order: list[Pair] = []
    while len(order) < steps * size:
        order += dice.sample(pairs, len(pairs))
    return [order[step * size : (step + 1) * size] for step in range(steps)]


def show_answers(when: str, sampler: lorry.SamplingClient, tokenizer: Any) -> None:
    greedy = lorry.SamplingParams(max_tokens=24, temperature=0.0, stop=["\n"])
    print(f"\nAnswers {when}:")
    futures = [sampler.sample(lorry.ModelInput.from_ints(tokenizer.encode(prompt_of(q))), 1, greedy) for q in ASK]
    for question, future in zip(ASK, futures, strict=True):
        print(f"  {question}  {(future.result().sequences[0].text or '').strip()}")
    print(flush=True)


def plot(history: list[dict[str, float]], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(3, 1, sharex=True, figsize=(8, 7), dpi=150)
    for axes, name in zip(rows, ("dpo", "accuracy", "margin"), strict=True):
        axes.plot(range(1, len(history) + 1), [entry[name] for entry in history], marker=".")
        axes.set_ylabel(name)
        axes.grid(axis="y", color="#dddddd")
    rows[0].set_title("DPO: metric units preferred")
    rows[-1].set_xlabel("step")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "dpo.png")
    return folder / "dpo.png"


if __name__ == "__main__":
    main()
