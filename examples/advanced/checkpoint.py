"""Checkpoints from the first save to the last delete: sample from one, go on from one, look after them.

There are two kinds, and a name is used once within a kind:

- `save_weights_for_sampler(name)` keeps the adapter, for sampling. Its result is a `SamplingClient`, with `.path`.
- `save_state(name)` keeps the optimizer, the gradients that have no step yet and the count of steps too, for going on.

Both are ops of the chain: they save the state after all calls before them. Wherever a checkpoint is asked for, its
bare name will do, or its path (`lorry://JOB/weights/NAME`), which names one of any job.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/advanced/checkpoint.py`. It
takes about half a minute on two cores, and deletes what it saved.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import lorry

STEPS = 10
TEXT = "Ada asked the driver where the lorry was going, and the driver said: {place}."
PLACES = ["to the harbour", "over the pass", "to the mill", "home", "to the fair"]
ADAM = lorry.AdamParams(learning_rate=3e-4)


def train_and_save(client: lorry.TrainingClient, batches: list[list[lorry.Datum]]) -> None:
    """A training loop that saves as it goes. Nothing is waited for but the losses: saves take their turn."""
    steps = []
    for step, batch in enumerate(batches):
        steps.append(client.forward_backward(batch, "cross_entropy"))
        client.optim_step(ADAM)
        if step % 5 == 0:
            client.save_weights_for_sampler(f"checkpoint-step-{step}")
            client.save_state(f"state-step-{step}")
    for step, future in enumerate(steps):
        print(f"step {step}  loss {future.result().loss:.4f}")


def sample_from_checkpoints(
    service: lorry.ServiceClient, client: lorry.TrainingClient, batch: list[lorry.Datum]
) -> None:
    """A sampler has the weights of its save for ever. Whoever trains on needs a new one."""
    now = client.save_weights_for_sampler("checkpoint-final").result()  # a SamplingClient, ready to be used
    then = service.create_sampling_client_from_checkpoint("checkpoint-step-0")  # the same, of an earlier save
    tokens = batch[0].model_input
    for sampler in (then, now):
        logprobs = sampler.compute_logprobs(tokens).result()
        loss = -sum(value for value in logprobs if value is not None) / (len(logprobs) - 1)
        print(f"{sampler.name:<18} loss per token {loss:.4f}  {sampler.path}")


def resume(service: lorry.ServiceClient, client: lorry.TrainingClient, batches: list[list[lorry.Datum]]) -> None:
    """Three ways to go on from step 5, beside what went on then, without a pause."""
    path = client.get_checkpoint_metadata("state-step-5").path

    # A new run that is the old one, moments of Adam included. In another program this is the line to use.
    exact = service.create_training_client_from_state_with_optimizer(path)
    # (`create_lora_training_client_from_state(checkpoint_state="state-step-5")` is another name for it.)

    # A new run with the old one's weights and a new optimizer: a start for other data. The path is another job's.
    fresh = service.create_training_client_from_state(path)

    # The old run itself, taken back to the state that it had.
    client.load_state_with_optimizer("state-step-5")

    for name, run in (("with its optimizer", exact), ("with a new optimizer", fresh), ("the same run", client)):
        losses = losses_of_steps(run, batches)
        print(f"{name:<22}{'  '.join(f'{loss:.4f}' for loss in losses)}")


def losses_of_steps(client: lorry.TrainingClient, batches: list[list[lorry.Datum]]) -> list[float]:
    steps = []
    for batch in batches:
        steps.append(client.forward_backward(batch, "cross_entropy"))
        client.optim_step(ADAM)
    return [step.result().loss for step in steps]


def look_after(client: lorry.TrainingClient) -> None:
    """Metadata, time to live, names, and deleting. The client lists its own job's; a ServiceClient, all jobs'."""
    for found in client.list_checkpoints():
        print(f"{found.kind:<16} {found.name:<18} step {found.step:2d}  {found.size / 1e6:5.1f} MB")
    state = client.get_checkpoint_metadata("state-step-5")
    print(f"of {state.base_model}, rank {state.lora_rank}, saved {state.created:%Y-%m-%d %H:%M} UTC, ttl {state.ttl}")

    client.set_checkpoint_ttl("state-step-0", ttl_hours=24)
    print(f"expires by itself: {client.get_checkpoint_metadata('state-step-0').expires:%Y-%m-%d %H:%M} UTC")
    client.save_state("passing", ttl_seconds=3600).result()  # or at once, when it is saved

    try:
        client.save_state("state-step-0").result()
    except lorry.CheckpointExists as error:
        print(f"a name is used once: {error}")
    client.save_state("state-step-0", overwrite=True).result()

    client.delete_checkpoint("passing")
    try:
        client.load_state("passing").result()
    except lorry.CheckpointNotFound as error:
        print(f"deleted: {error}")


def take_away(client: lorry.TrainingClient, folder: Path) -> None:
    """The files, for peft, vLLM or an archive; `merged=True` gives a whole model for plain transformers."""
    exported = client.export_checkpoint("checkpoint-final", folder / "adapter")
    print(f"exported: {', '.join(sorted(file.name for file in exported.iterdir()))}")
    archive = client.download_checkpoint("state-step-5", folder / "state-step-5.tar.gz")
    print(f"downloaded: {archive.name}, {archive.stat().st_size / 1e6:.1f} MB")


def publish(client: lorry.TrainingClient, hub_id: str | None) -> None:
    """To the Hugging Face Hub. Only if you say where (`--hub-id user/repository`), and have a token (HF_TOKEN)."""
    if hub_id is None or "HF_TOKEN" not in os.environ:
        print("not published: give --hub-id user/repository and set HF_TOKEN to do it")
        return
    print(f"published: {client.publish_checkpoint('checkpoint-final', hub_id, private=True).url}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints, from the first save to the last delete.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--hub-id", help="publish the adapter as this private repository, user/repository")
    options = parser.parse_args()

    service = lorry.ServiceClient()
    client = service.create_lora_training_client(options.model, rank=16, seed=0)
    tokenizer = client.get_tokenizer()
    batches = []
    for step in range(STEPS):
        tokens = tokenizer.encode(TEXT.format(place=PLACES[step % len(PLACES)]))
        batches.append([lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})])

    heading("Train and save")
    train_and_save(client, batches)
    heading("Sample from checkpoints")
    sample_from_checkpoints(service, client, batches[0])
    heading("Resume from step 5: losses of steps 6 to 9")
    resume(service, client, batches[6:])
    heading("Look after checkpoints")
    look_after(client)
    heading("Take files away")
    with tempfile.TemporaryDirectory() as folder:
        take_away(client, Path(folder))
    heading("Publish")
    publish(client, options.hub_id)

    for found in client.list_checkpoints():
        client.delete_checkpoint(found.path)
    print(f"\n{len(client.list_checkpoints())} checkpoints are left of this run.")


def heading(text: str) -> None:
    print(f"\n== {text}")


if __name__ == "__main__":
    main()
