"""Supervised fine-tuning on chats: SmolLM2-135M learns to talk like a dispatcher on the radio.

Every answer in `data/radio.jsonl` begins with "Roger." and ends with "Over.". `lorry.data` makes the tokens with the
model's own chat template, and only what the assistant says has a loss. The last rows of the file are held out: their
loss before and after shows whether the model learned the manner, or the answers by heart.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/sft.py`. It takes a
minute or two on two cores. With `--data FILE` it trains on chats of your own.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import lorry

DATA = Path(__file__).parent / "data" / "radio.jsonl"
QUESTION = "What is the capital of Spain?"  # in no row
AHEAD = 4
"""Steps that are submitted before the result of the first of them is waited for. The server never runs dry."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a model on a JSONL file of chats.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--held-out", type=int, default=8, help="rows at the end of the file that are not trained on")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=512, help="tokens; longer rows lose their end")
    parser.add_argument("--name", default="radio", help="of the checkpoint")
    parser.add_argument("--question", default=QUESTION, help="is asked before and after")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    console = Console(highlight=False)

    service = lorry.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=options.rank, seed=0)
    tokenizer = trainer.get_tokenizer()

    data = lorry.data.load_jsonl(options.data, tokenizer, max_length=options.max_length)
    say(console, str(data.report))
    if not 0 < options.held_out < len(data):
        sys.exit(f"--held-out must leave rows on both sides: 1 to {len(data) - 1}")
    training, held_out = data[: -options.held_out], data[-options.held_out :]

    # Calls return at once, and the server keeps their order: this is the loss before the first step.
    before = trainer.forward(held_out, "cross_entropy")
    base = service.create_sampling_client(base_model=options.model)
    say(console, f"\nAsked before: {options.question}\n  {answer(base, tokenizer, options.question)}\n")

    losses = list(train(trainer, training, options, console))

    after = trainer.forward(held_out, "cross_entropy").result().loss
    tuned = trainer.save_weights_for_sampler(options.name, overwrite=True).result()
    say(console, f"\nAsked after: {options.question}\n  {answer(tuned, tokenizer, options.question)}\n")
    say(console, f"Training loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    say(console, f"Held-out loss {before.result().loss:.4f} before, {after:.4f} after")
    say(console, f"Checkpoint    {tuned.path}")


def train(
    trainer: lorry.TrainingClient, data: Sequence[lorry.Datum], options: argparse.Namespace, console: Console
) -> Iterator[float]:
    """The loss of each step, as its result arrives."""
    adam = lorry.AdamParams(learning_rate=options.learning_rate)
    batches = lorry.data.batches(data, options.batch_size, seed=0, epochs=None)
    waiting: deque[lorry.APIFuture[lorry.ForwardBackwardOutput]] = deque()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("loss      ", total=options.steps)

        def next_loss() -> float:
            loss = waiting.popleft().result().loss
            progress.update(bar, advance=1, description=f"loss {loss:.4f}")
            return loss

        for batch in islice(batches, options.steps):
            waiting.append(trainer.forward_backward(batch, "cross_entropy"))
            trainer.optim_step(adam)  # runs behind it; if the step before it fails, so does this one
            if len(waiting) > AHEAD:
                yield next_loss()
        while waiting:
            yield next_loss()


def answer(client: lorry.SamplingClient, tokenizer: Any, question: str) -> str:
    prompt = lorry.data.chat_prompt([{"role": "user", "content": question}], tokenizer)
    greedy = lorry.SamplingParams(max_tokens=40, temperature=0.0)  # it stops at the end of the turn
    return " ".join((client.sample(prompt, sampling_params=greedy).result().sequences[0].text or "").split())


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)  # not wrapped: paths are there to be copied


if __name__ == "__main__":
    try:
        main()
    except lorry.LorryError as error:
        sys.exit(f"lorry: {error}")
