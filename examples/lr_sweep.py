"""Many jobs at once: the same fine-tuning with several learning rates, each a training run of its own.

The runs share a server, a base model and nothing else: same data, same order, same first adapter (`seed`), so that
they differ in the learning rate alone. Every run submits all its steps at the start; the server works through them
in turn, and the program only waits.

Start a server in another terminal, `lorry up --model smollm2`, then run `python examples/lr_sweep.py`. It takes a few
minutes on two cores. The table says which learning rate was best on rows that no run has seen; the curves go to
sweep-output/lr_sweep.png, and the best adapter is saved.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

import lorry

DATA = Path(__file__).parent / "data" / "radio.jsonl"


@dataclass
class Run:
    """One training run. `losses`: of each step, in nats per trained token. `held_out`: before and after training."""

    learning_rate: float
    trainer: lorry.TrainingClient
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    error: lorry.LorryError | None = None

    async def train(
        self, batches: Sequence[list[lorry.Datum]], held_out: list[lorry.Datum], bars: Progress, bar: TaskID
    ) -> None:
        adam = lorry.AdamParams(learning_rate=self.learning_rate)
        before = await self.trainer.forward_async(held_out, "cross_entropy")
        steps = []
        for batch in batches:
            steps.append(await self.trainer.forward_backward_async(batch, "cross_entropy"))  # submitted, not yet run
            await self.trainer.optim_step_async(adam)
        after = await self.trainer.forward_async(held_out, "cross_entropy")
        try:
            self.held_out.append((await before).loss)
            for step in steps:
                self.losses.append((await step).loss)
                bars.update(bar, advance=1, loss=f"{self.losses[-1]:.4f}")
            self.held_out.append((await after).loss)
        except lorry.LorryError as error:  # such as a loss that is not finite any more; the other runs go on
            self.error = error


async def sweep(options: argparse.Namespace, console: Console) -> list[Run]:
    service = lorry.ServiceClient()
    # The rate is a parameter of each optim_step, so one run could change it; here each run has its own.
    trainers = await asyncio.gather(
        *(
            service.create_lora_training_client_async(options.model, rank=options.rank, seed=0)
            for _ in options.learning_rates
        )
    )
    data = lorry.data.load_jsonl(options.data, service.get_tokenizer(options.model), max_length=options.max_length)
    if not 0 < options.held_out < len(data):
        sys.exit(f"--held-out must leave rows on both sides: 1 to {len(data) - 1}")
    training, held_out = data[: -options.held_out], data[-options.held_out :]
    batches = list(islice(lorry.data.batches(training, options.batch_size, seed=0, epochs=None), options.steps))

    runs = [Run(rate, trainer) for rate, trainer in zip(options.learning_rates, trainers, strict=True)]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as bars:
        await asyncio.gather(
            *(
                run.train(
                    batches, held_out, bars, bars.add_task(f"{run.learning_rate:g}", total=len(batches), loss="-")
                )
                for run in runs
            )
        )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description="Try several learning rates at once.")
    parser.add_argument("--model", default="smollm2", help="a base model that the server serves")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--held-out", type=int, default=8, help="rows at the end of the file that are not trained on")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4, 1e-3])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=512, help="tokens; longer rows lose their end")
    parser.add_argument("--output", type=Path, default=Path("sweep-output"), help="folder of the plot")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    console = Console(highlight=False)

    runs = asyncio.run(sweep(options, console))
    finished = [run for run in runs if run.error is None]
    best = min(finished, key=lambda run: run.held_out[1], default=None)
    console.print(table(runs, best))
    for run in runs:
        if run.error is not None:
            console.print(f"Learning rate {run.learning_rate:g}: {run.error}", markup=False, soft_wrap=True)
    if best is None:
        sys.exit("No run came to its end.")
    saved = best.trainer.save_weights_for_sampler("best-of-sweep").result()
    console.print(f"Best adapter  {saved.path}", markup=False, soft_wrap=True)
    console.print(f"Curves        {plot(finished, options.model, options.output)}", markup=False, soft_wrap=True)


def table(runs: Sequence[Run], best: Run | None) -> Table:
    shown = Table("learning rate", "first loss", "last loss", "unseen before", "after", "")
    for run in runs:
        numbers = [run.losses[:1], run.losses[-1:], run.held_out[:1], run.held_out[1:2]]
        note = "best" if run is best else "failed" if run.error else ""
        shown.add_row(f"{run.learning_rate:g}", *(f"{n[0]:.4f}" if n else "-" for n in numbers), note)
    return shown


def plot(runs: Sequence[Run], model: str, folder: Path) -> Path:
    """The training loss of each run by step, and the held-out loss by learning rate. Returns the file."""
    import matplotlib

    matplotlib.use("Agg")  # no window: this may run on a machine without a screen
    from matplotlib import pyplot

    runs = sorted(runs, key=lambda run: run.learning_rate)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), dpi=150, layout="constrained")
    colours = pyplot.get_cmap("viridis")
    for place, run in enumerate(runs):
        steps = range(1, len(run.losses) + 1)
        colour = colours(place / max(len(runs), 2))
        left.plot(steps, run.losses, color=colour, linewidth=2, label=f"{run.learning_rate:g}")
        right.plot(run.learning_rate, run.held_out[1], marker="o", color=colour)
    left.set(title=f"{model}: training", xlabel="step", ylabel="loss per token (nats)")
    left.legend(title="learning rate", frameon=False)
    rates, losses = [run.learning_rate for run in runs], [run.held_out[1] for run in runs]
    right.plot(rates, losses, color="#bbbbbb", zorder=0)
    right.axhline(runs[0].held_out[0], color="#999999", linestyle="--", linewidth=1, label="before")
    right.set(title="held-out rows", xlabel="learning rate", ylabel="loss per token (nats)", xscale="log")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "lr_sweep.png"
    figure.savefig(file)
    pyplot.close(figure)
    return file


if __name__ == "__main__":
    try:
        main()
    except lorry.LorryError as error:
        sys.exit(f"lorry: {error}")
