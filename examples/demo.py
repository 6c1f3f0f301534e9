"""What `make demo` runs: teach SmolLM2-135M three answers through the real queue, on this machine.

The training is the example of PyTRIO's guide to async methods, with another model, rank and learning rate: three
questions with answers, and a loop that submits every op before any result is awaited. `train` is the part to copy;
the rest starts a server and shows what happens (`demo_display.py`).

The checkpoint stays in Lorry's home (LORRY_HOME, by default ~/.local/share/lorry), the loss curve in demo-output/.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_display import Display, save_loss_curve

import lorry
from lorry.stack import running_stack
from lorry.stack.state import FlowerInfo
from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.paths import lorry_home, models_dir, store_dir
from lorry_workers.fetch import fetch_model

BASE_MODEL = "smollm2"
ITERATIONS = 15
LOSS_CURVE, SAMPLE = "loss.png", "sample.py"

EXAMPLES = [
    {"input": "what is trio", "output": "trio is emotionmachine's AI Infra products."},
    {"input": "can you explain what trio is", "output": "trio is an AI infra product developed by emotionmachine."},
    {
        "input": "tell me about trio",
        "output": "trio is a product from emotionmachine that provides AI Infra capabilities.",
    },
]
QUESTION, ANSWER = EXAMPLES[0]["input"], EXAMPLES[0]["output"]


@dataclass
class Trained:
    losses: list[float]
    before: str
    after: str
    path: str
    """Of the checkpoint, as `create_sampling_client(model_path=...)` takes it."""


def process_example(example: dict[str, str], tokenizer: Any) -> lorry.Datum:
    """Tokens of the question and the answer; only the answer's have a weight. Each position predicts the next."""
    prompt = f"Question: {example['input']}\nAnswer:"
    prompt_tokens = tokenizer.encode(prompt, add_special_tokens=True)
    prompt_weights = [0] * len(prompt_tokens)

    completion_tokens = tokenizer.encode(f" {example['output']}\n\n", add_special_tokens=False)
    completion_weights = [1] * len(completion_tokens)

    tokens = prompt_tokens + completion_tokens
    weights = prompt_weights + completion_weights

    return lorry.Datum(
        model_input=lorry.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"weights": weights[1:], "target_tokens": tokens[1:]},
    )


async def train(display: Display) -> Trained:
    # 1. A client finds the server: LORRY_URL, else the stack that runs on this machine.
    service_client = lorry.ServiceClient()

    # 2. One training client is one training run: a base model, an adapter, an optimizer.
    training_client = await service_client.create_lora_training_client_async(base_model=BASE_MODEL, rank=16, seed=0)

    # 3. The tokenizer comes from the worker; no model hub is asked.
    tokenizer = training_client.get_tokenizer()
    processed_examples = [process_example(example, tokenizer) for example in EXAMPLES]
    tokens_per_step = sum(datum.model_input.length for datum in processed_examples)

    # 4. What the base model says.
    prompt = lorry.ModelInput.from_ints(tokenizer.encode(f"Question: {QUESTION}\nAnswer:"))
    sampling_base_client = await service_client.create_sampling_client_async(base_model=BASE_MODEL)
    # No stop here: asked this way, the base model begins with an empty line, with which a trained answer ends.
    greedy = lorry.SamplingParams(max_tokens=24, temperature=0.0)
    result_base = await sampling_base_client.sample_async(prompt=prompt, sampling_params=greedy, num_samples=1)
    before = result_base.sequences[0].text
    display.answer("before", QUESTION, before)

    # 5. Train. Everything is submitted before anything is awaited; the server keeps the order of the calls.
    async def report(step: int, fwdbwd_future: lorry.APIFuture, optim_future: lorry.APIFuture) -> float:
        fwdbwd_result = await fwdbwd_future
        await optim_future
        display.step(step, fwdbwd_result.loss, tokens_per_step)
        return fwdbwd_result.loss  # the mean per weighted token

    futures: list[lorry.APIFuture] = []
    reports = []
    with display.training(BASE_MODEL, ITERATIONS, in_flight=lambda: sum(not future.done() for future in futures)):
        for step in range(1, ITERATIONS + 1):
            fwdbwd_future = await training_client.forward_backward_async(processed_examples, "cross_entropy")
            optim_future = await training_client.optim_step_async(lorry.AdamParams(learning_rate=1e-3))
            futures += [fwdbwd_future, optim_future]
            reports.append(report(step, fwdbwd_future, optim_future))
        losses = await asyncio.gather(*reports)

    # 6. Save the adapter and ask again.
    sampling_sft_client = await training_client.save_weights_and_get_sampling_client_async(name="what-is-trio")
    params = lorry.SamplingParams(max_tokens=24, temperature=0.0, stop=["\n"])
    result_sft = await sampling_sft_client.sample_async(prompt=prompt, sampling_params=params, num_samples=1)
    after = result_sft.sequences[0].text
    display.answer("after", QUESTION, after)
    return Trained(losses, before, after, sampling_sft_client.path)


SAMPLE_SCRIPT = """\
import lorry

path = "{path}"
client = lorry.ServiceClient().create_sampling_client(model_path=path)
prompt = lorry.ModelInput.from_ints(client.get_tokenizer().encode("Question: {question}\\nAnswer:"))
params = lorry.SamplingParams(max_tokens=24, temperature=0.0, stop=["\\n"])
print(client.sample(prompt, sampling_params=params).result().sequences[0].text)
"""


@dataclass
class Server:
    """What the demo trains on. `ours`: it is stopped when the demo ends."""

    ours: bool
    flower: FlowerInfo | None


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach SmolLM2-135M three answers through Lorry.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder of the loss curve")
    parser.add_argument("--keep", action="store_true", help="keep the stack and Flower running until Ctrl-C")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    display = Display()
    with server(display) as running:
        trained = asyncio.run(train(display))
        display.loss_curve(trained.losses)
        save_loss_curve(
            options.output / LOSS_CURVE, BASE_MODEL, trained.losses, QUESTION, trained.before, trained.after
        )
        (options.output / SAMPLE).write_text(SAMPLE_SCRIPT.format(path=trained.path, question=QUESTION))
        if options.keep and running.ours:
            explain(display, trained, options.output, running, stopped=False)
            display.say("\nThe stack runs until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
    if not (options.keep and running.ours):
        explain(display, trained, options.output, running, stopped=running.ours)
    if trained.after.strip() != ANSWER:
        sys.exit(f"The model did not learn the answer: it says {trained.after!r}")


@contextmanager
def server(display: Display) -> Iterator[Server]:
    """The server to train on: one that is there already, else a stack of our own, in the user's home of Lorry."""
    if os.environ.get("LORRY_URL"):
        display.say("Training on the server that LORRY_URL names.")
        yield Server(ours=False, flower=None)
        return
    home = lorry_home()
    running = running_stack(home)
    if running is not None and BASE_MODEL in running.models:
        display.say(f"Training on the stack that runs in {home} already ({running.started_by}, pid {running.pid}).")
        yield Server(ours=False, flower=running.flower)
        return
    fetched = fetch_model(BASE_MODEL, models_dir(), console=display.console)
    display.say(f"Base model: {fetched.folder}")
    with ExitStack() as held:
        with display.waiting("Starting Redis, a worker and Flower"):
            stack = held.enter_context(lorry.local(model=BASE_MODEL, home=home, flower=True, start_timeout=300))
        if stack.flower is not None:
            display.say(
                f"Flower shows every op: {stack.flower.url}  user {stack.flower.user}  password {stack.flower.password}"
            )
        yield Server(ours=True, flower=stack.flower)
        display.say("\nStopping the stack ...")


def explain(display: Display, trained: Trained, output: Path, running: Server, *, stopped: bool) -> None:
    """Where everything is and what to do with it."""
    bin_folder = Path(sys.executable).parent
    if bin_folder.is_relative_to(Path.cwd()):
        bin_folder = bin_folder.relative_to(Path.cwd())
    script = output / SAMPLE

    display.heading("What there is now")
    display.say(f"  Loss curve   {output / LOSS_CURVE}")
    display.say(f"  Checkpoint   {trained.path}")
    folder = store_dir().joinpath(*CheckpointPath.parse(trained.path).folders)
    if folder.is_dir():  # not if the server is another machine's
        display.say(f"               {folder} (it loads in peft)")

    if stopped:
        display.heading("Bring the stack up again: same home, same checkpoints")
        display.say(f"  {bin_folder / 'lorry'} up --model {BASE_MODEL}")
        display.say("  It prints the address, user and password of Flower, which shows every op.")
        display.heading("While it runs, sample the checkpoint from another terminal")
    else:
        if running.flower is not None:
            display.heading("Flower shows every op")
            display.say(f"  {running.flower.url}  user {running.flower.user}  password {running.flower.password}")
        display.heading("Sample the checkpoint")
    display.say(f"  {bin_folder / 'python'} {script}")
    display.say("\nThat script is:\n")
    display.say("\n".join(f"  {line}".rstrip() for line in script.read_text().splitlines()))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except lorry.LorryError as error:
        sys.exit(f"lorry: {error}")
