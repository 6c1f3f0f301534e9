"""A training run that may die at any time: start it again, and it goes on as if nothing had happened.

Kill this program while it trains (Ctrl-C, or `kill -9`), then give the same command again. What makes it exact:

- every `--save-every` steps the whole state is saved, optimizer included;
- the checkpoints carry the run's name (`user_metadata`) and the count of steps, so that they are found again without
  a note anywhere else;
- everything else is a function of the step: the batch, the order of the data, the learning rate;
- of the checkpoints, the newest one is taken whose losses are all in the log. (Ops that were submitted before a crash
  still run on the server, a save among them; their losses came to nobody.)

So the log, resume-output/NAME.csv, has the same losses to the last digit as that of a run that was never stopped:

    python examples/resume.py --run stopped         # and kill it once or twice
    python examples/resume.py --run undisturbed
    cmp resume-output/stopped.csv resume-output/undisturbed.csv

That the *server's* worker dies needs nothing of this: it restores its jobs by itself, and the client waits.

Start a server in another terminal, `lorry up --model smollm2`. A whole run takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lorry
from lorry.types import CheckpointMetadata, SaveWeightsResponse

LEARNING_RATE = 3e-4
BATCH_SIZE = 2
AHEAD = 2
"""Steps that are submitted before the result of the first of them is waited for."""
SENTENCES = [
    "The lorry to the coast is loaded last and leaves first.",
    "Whoever takes the mountain road checks the chains before the tunnel.",
    "A crate that is not on the list stays at the depot.",
    "The radio is for the dispatcher, and not for music.",
    "In spring the ferry does not run before ten.",
    "Fuel is paid with the blue card, tolls with the green one.",
    "Two drivers share a lorry, a map and a flask of tea.",
    "If the bridge is closed, call the mill and turn back.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, die, start again, and go on exactly.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--run", default="resume", help="the run's name: the same one goes on, another one is new")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("resume-output"), help="folder of the log")
    parser.add_argument("--fresh", action="store_true", help="forget what there is of this run")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    log = options.output / f"{options.run}.csv"

    with lorry.ServiceClient() as service:  # at the end, the server may forget this start's job; checkpoints stay
        if options.fresh:
            log.unlink(missing_ok=True)
            delete_checkpoints(service, options.run, before_step=sys.maxsize)

        losses = read_log(log)
        checkpoint = find_checkpoint(service, options.run, len(losses))
        metadata = {"run": options.run}
        if checkpoint is None:
            print("A new run.", flush=True)
            done = 0
            trainer = service.create_lora_training_client(options.model, rank=16, seed=0, user_metadata=metadata)
        else:
            print(f"Going on after step {checkpoint.step}, from {checkpoint.path}", flush=True)
            done = checkpoint.step
            trainer = service.create_training_client_from_state_with_optimizer(checkpoint.path, user_metadata=metadata)
        write_log(log, losses[:done])  # what came after the checkpoint comes again

        waiting: deque[Submitted] = deque()
        for step in range(done + 1, options.steps + 1):
            waiting.append(submit(trainer, step, options))
            if len(waiting) > AHEAD:
                finish(service, waiting.popleft(), log, options.run)
        while waiting:
            finish(service, waiting.popleft(), log, options.run)
    print(f"All {options.steps} steps are done. Their losses are in {log}. To begin again: --fresh")


@dataclass
class Submitted:
    step: int
    output: lorry.APIFuture[lorry.ForwardBackwardOutput]
    save: lorry.APIFuture[SaveWeightsResponse] | None


def submit(trainer: lorry.TrainingClient, step: int, options: argparse.Namespace) -> Submitted:
    """One step, and a save if it is time for one. Nothing is waited for."""
    output = trainer.forward_backward(batch_of(step, trainer.get_tokenizer()), "cross_entropy")
    trainer.optim_step(lorry.AdamParams(learning_rate=LEARNING_RATE * (1 - (step - 1) / options.steps)))
    due = step % options.save_every == 0 or step == options.steps
    return Submitted(step, output, trainer.save_state(f"step-{step}") if due else None)


def finish(service: lorry.ServiceClient, submitted: Submitted, log: Path, run: str) -> None:
    """Write the loss down; once a save is there as well, the older ones are not needed any more."""
    loss = submitted.output.result().loss
    with log.open("a") as file:
        file.write(f"{submitted.step},{loss!r}\n")
    print(f"step {submitted.step:3d}  loss {loss:.4f}", flush=True)
    if submitted.save is not None:
        print(f"saved {submitted.save.result().path}", flush=True)
        delete_checkpoints(service, run, before_step=submitted.step)


def batch_of(step: int, tokenizer: Any) -> list[lorry.Datum]:
    """The data of a step, counted from 1. Each pass over the sentences has an order of its own, and the same one
    whenever it is asked for."""
    position = (step - 1) * BATCH_SIZE
    epoch, offset = divmod(position, len(SENTENCES))
    order = random.Random(epoch).sample(SENTENCES, len(SENTENCES))
    batch = []
    for sentence in order[offset : offset + BATCH_SIZE]:
        tokens = tokenizer.encode(sentence)
        batch.append(lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]}))
    return batch


def checkpoints_of(service: lorry.ServiceClient, run: str) -> list[CheckpointMetadata]:
    """All training states of this run, whichever of its jobs saved them: each start is another job."""
    return [found for found in service.list_checkpoints(kind="weights") if found.user_metadata.get("run") == run]


def find_checkpoint(service: lorry.ServiceClient, run: str, logged: int) -> CheckpointMetadata | None:
    """The newest one whose losses, `logged` of them, are all in the log. None: begin at the beginning."""
    usable = [found for found in checkpoints_of(service, run) if found.step <= logged]
    return max(usable, key=lambda found: found.step, default=None)


def delete_checkpoints(service: lorry.ServiceClient, run: str, before_step: int) -> None:
    for found in checkpoints_of(service, run):
        if found.step < before_step:
            service.delete_checkpoint(found.path)


def read_log(log: Path) -> list[str]:
    """The losses of the steps 1, 2, ... as far as they are whole: a crash may have cut off the last line."""
    if not log.exists():
        return []
    text = log.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [line.partition(",")[2] for line in lines]


def write_log(log: Path, losses: list[str]) -> None:
    """Replaced in one go: a crash here must not lose the log."""
    new = log.with_suffix(".new")
    new.write_text("".join(f"{step},{loss}\n" for step, loss in enumerate(losses, 1)))
    new.replace(log)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nStopped. The same command goes on.")
