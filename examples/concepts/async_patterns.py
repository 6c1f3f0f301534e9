"""How to wait, and how not to: the async patterns, each one a function that prints what it saw.

Three rules carry all of it:

- An op is submitted when its method is called, in the order of the calls. Awaiting only waits.
- `future = await client.op_async(...)` gives the `APIFuture`; `await future` gives the result. Leaving out the first
  await is fine: what `op_async` returns can be gathered, and has `.result_async()`.
- The server may take a `forward_backward` and its `optim_step` into one cycle of its clock, if both are there when the
  cycle begins. Each result says which `cycle` it was.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/concepts/async_patterns.py`.
It takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import lorry

TEXTS = [
    "A lorry with eight crates of pears leaves the market before the sun is up.",
    "The driver writes down the distance, the hour and the price of the fuel.",
    "Behind the second bridge the road is closed, so she takes the one along the river.",
    "By noon every crate is at its shop, and the lorry is on its way back.",
]
ADAM = lorry.AdamParams(learning_rate=1e-4)

Update = tuple[lorry.APIFuture[lorry.ForwardBackwardOutput], lorry.APIFuture[lorry.OptimStepResponse]]
Updated = tuple[lorry.ForwardBackwardOutput, lorry.OptimStepResponse]
Batches = Sequence[list[lorry.Datum]]


# ---------------------------------------------------------------------------------------------- three ways to train


async def one_after_the_other(client: lorry.TrainingClient, batches: Batches) -> list[Updated]:
    """Slow: each call waits for the one before. The server idles while its answer travels and the next call does,
    and each optim_step comes too late for its forward_backward's cycle."""
    updates = []
    for batch in batches:
        output = await client.forward_backward_async(batch, "cross_entropy").result_async()
        step = await client.optim_step_async(ADAM).result_async()
        updates.append((output, step))
    return updates


async def submit_then_await(client: lorry.TrainingClient, batches: Batches) -> list[Updated]:
    """Both ops of an update are submitted before either is awaited. For loops whose next batch depends on the last
    result, and for debugging."""
    updates = []
    for batch in batches:
        fwdbwd_future, optim_future = await submit_update(client, batch)
        updates.append((await fwdbwd_future, await optim_future))
    return updates


async def look_ahead(client: lorry.TrainingClient, batches: Batches) -> list[Updated]:
    """The next update is submitted before this one is awaited, so that the server always has one to begin with.
    At most two are in flight, however many batches there are."""
    updates = []
    current: Update | None = None
    for batch in batches:
        following = await submit_update(client, batch)
        if current is not None:
            updates.append((await current[0], await current[1]))
        current = following
    if current is not None:
        updates.append((await current[0], await current[1]))
    return updates


async def submit_update(client: lorry.TrainingClient, batch: list[lorry.Datum]) -> Update:
    fwdbwd_future = await client.forward_backward_async(batch, "cross_entropy")
    optim_future = await client.optim_step_async(ADAM)
    return fwdbwd_future, optim_future


async def compare(client: lorry.TrainingClient, batches: Batches) -> None:
    """All three compute the same steps. The cycles are the worker's: those of other jobs on it count as well."""
    print(f"{len(batches)} updates, each a forward_backward and an optim_step\n")
    print(f"{'':<22}cycles  seconds  last loss")
    ways: list[Callable[[lorry.TrainingClient, Batches], Awaitable[list[Updated]]]] = [
        one_after_the_other,
        submit_then_await,
        look_ahead,
    ]
    await client.save_state_async("start").result_async()
    for train in ways:
        await client.load_state_async("start").result_async()
        began = time.monotonic()
        updates = await train(client, batches)
        seconds = time.monotonic() - began
        cycles = {result.cycle for update in updates for result in update}
        print(f"{train.__name__:<22}{len(cycles):6d}  {seconds:7.2f}  {updates[-1][0].loss:9.4f}")


# ------------------------------------------------------------------------------------------------ more than one wait


async def gather_a_large_batch(client: lorry.TrainingClient, batches: Batches) -> None:
    """Several batches, one step: gradients add up over all forward_backward calls since the last optim_step.

    Nothing is awaited until all are submitted. `gather` takes what `forward_backward_async` returned as it is, and
    gives the results in the order of the calls.
    """
    futures = [client.forward_backward_async(batch, "cross_entropy") for batch in batches]
    step = client.optim_step_async(ADAM)
    results: list[lorry.ForwardBackwardOutput] = await asyncio.gather(*futures)
    print("losses", " ".join(f"{result.loss:.4f}" for result in results))
    print(f"one step, gradient norm {(await step.result_async()).metrics['grad_norm']:.2f}")


async def report_while_training(client: lorry.TrainingClient, batches: Batches) -> None:
    """A coroutine for each update waits and reports; they are gathered at the end. Any number may be in flight."""

    async def report(number: int, update: Update) -> float:
        output = await update[0]
        print(f"update {number}: loss {output.loss:.4f}")
        return output.loss

    reports = [report(number, await submit_update(client, batch)) for number, batch in enumerate(batches, 1)]
    losses = await asyncio.gather(*reports)
    print(f"mean of {len(losses)} losses {sum(losses) / len(losses):.4f}")


async def await_twice(client: lorry.TrainingClient, batch: list[lorry.Datum]) -> None:
    """A future keeps its result: it may be awaited again, in another task, or asked with `.result()`. The op ran
    once."""
    future = await client.forward_async(batch, "cross_entropy")
    first = await future
    second, third = await asyncio.gather(future, future.result_async())
    print(f"the same object three times: {first is second is third is future.result()}")


# ---------------------------------------------------------------------------------------------- timeouts and errors


async def give_up_waiting(client: lorry.TrainingClient, batch: list[lorry.Datum]) -> None:
    """A timeout ends the wait and never the op. Afterwards: wait again, or withdraw the op with `cancel()`."""
    future = await client.forward_async(batch, "cross_entropy")
    try:
        await asyncio.wait_for(future, timeout=0.001)
        print("that was quick")
    except TimeoutError:
        print("no result after 1 ms")
    print(f"waited again: loss {(await future).loss:.4f}")

    future = await client.forward_async(batch, "cross_entropy")
    try:
        await future.result_async(timeout=0.001)  # this one says what the op waits for
        print("that was quick")
    except lorry.WaitTimeout as error:
        print(f"WaitTimeout: {error}")
    await future


async def survive_a_failure(client: lorry.TrainingClient, batch: list[lorry.Datum]) -> None:
    """What is wrong with the data themselves is raised at the call, and nothing is submitted. What the server refuses
    is raised where the future is awaited: its own future, and the optim_step that would have used its gradients. The
    step after that is as ever."""
    too_short = {"target_tokens": [1, 2, 3]}
    try:
        client.forward_backward_async([lorry.Datum(batch[0].model_input, too_short)], "cross_entropy")
    except lorry.UserError as error:
        print(f"at the call:  {error}")

    futures = [client.forward_backward_async(batch, loss) for loss in ("cross_entropy", "cross_entorpy")]
    step = client.optim_step_async(ADAM)
    good, bad = await asyncio.gather(*futures, return_exceptions=True)  # without it, gather raises the first error
    print(f"one is fine:  loss {good.loss:.4f}")
    print(f"one failed:   {bad}")
    try:
        await step.result_async()
    except lorry.AccumulationIncomplete as error:
        print(f"so no step:   {error}")

    fwdbwd_future, optim_future = await submit_update(client, batch)
    await optim_future
    print(f"and goes on:  loss {(await fwdbwd_future).loss:.4f}")


# -------------------------------------------------------------------------------------------------------------- main


async def main() -> None:
    parser = argparse.ArgumentParser(description="The async patterns, one after the other.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    options = parser.parse_args()

    service = lorry.ServiceClient()
    client = await service.create_lora_training_client_async(base_model=options.model, rank=16, seed=0)
    tokenizer = client.get_tokenizer()
    batches = []
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        batches.append([lorry.Datum(lorry.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})])

    await client.forward_async(batches[0], "cross_entropy").result_async()  # the first op warms the worker up
    heading("Naive, overlapped, pipelined")
    await compare(client, batches * 3)
    heading("Gather: four batches, one step")
    await gather_a_large_batch(client, batches)
    heading("Report while training")
    await report_while_training(client, batches)
    heading("Await a future twice")
    await await_twice(client, batches[0])
    heading("Give up waiting")
    await give_up_waiting(client, batches[0])
    heading("Survive a failure")
    await survive_a_failure(client, batches[0])


def heading(text: str) -> None:
    print(f"\n== {text}")


if __name__ == "__main__":
    asyncio.run(main())
