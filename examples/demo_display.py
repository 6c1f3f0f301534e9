"""How the demo shows what happens: a live panel in a terminal, plain lines elsewhere, a curve in the terminal and
as a PNG. Nothing here is about Lorry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

CURVE_LINES = 14
CURVE_COLUMNS = 76


class Display:
    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._model = ""
        self._steps = self._step = self._tokens = 0
        self._losses: list[float] = []
        self._began = 0.0
        self._in_flight: Callable[[], int] = lambda: 0

    def say(self, text: str) -> None:
        # Never wrapped: commands and paths are there to be copied.
        self.console.print(text, markup=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", markup=False, soft_wrap=True)

    def answer(self, when: str, question: str, text: str) -> None:
        self.console.print()
        self.console.print(f"{when.capitalize()} training, greedy:", style="bold")
        self.say(f"  Q  {question}")
        style = "green" if when == "after" else "yellow"
        self.console.print(f"  A  {one_line(text)}", style=style, markup=False, soft_wrap=True)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        if self.console.is_terminal:
            return self.console.status(text)
        self.say(f"{text} ...")
        return nullcontext()

    @contextmanager
    def training(self, model: str, steps: int, in_flight: Callable[[], int]) -> Iterator[None]:
        """A live panel for as long as the block runs. `in_flight`: how many ops have no result yet."""
        self._model, self._steps, self._in_flight = model, steps, in_flight
        self._began = time.monotonic()
        self.console.print()
        if self.console.is_terminal:
            with Live(get_renderable=self._panel, console=self.console, refresh_per_second=8):
                yield
        else:
            yield

    def step(self, number: int, loss: float, tokens: int) -> None:
        """A training step is done."""
        self._step = number
        self._tokens += tokens
        self._losses.append(loss)
        if not self.console.is_terminal:
            self.say(
                f"step {number:2d}/{self._steps}  loss {loss:.4f}  {self._tokens_per_second:.0f} tokens/s  "
                f"queue {self._in_flight()} ops"
            )

    def loss_curve(self, losses: Sequence[float]) -> None:
        """The curve in letters."""
        import plotext

        steps = list(range(1, len(losses) + 1))
        figure = plotext.figure
        figure.clear()
        figure.theme("colorless")
        figure.plot_size(min(CURVE_COLUMNS, self.console.width), CURVE_LINES)
        figure.draw(figure.signal(steps, list(losses)).lines())
        figure.ruler("x").ticks(steps)
        figure.title("loss per token, by step")
        self.console.print()
        self.say(plotext.uncolorize(str(figure.build())).rstrip())

    @property
    def _tokens_per_second(self) -> float:
        return self._tokens / max(time.monotonic() - self._began, 1e-9)

    def _panel(self) -> Panel:
        loss = "waiting for the first step"
        if self._losses:
            loss = f"{self._losses[-1]:.4f}   (at first {self._losses[0]:.4f})"
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", width=9)
        rows.add_column()
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(total=self._steps, completed=self._step, width=40), f"{self._step} of {self._steps}")
        rows.add_row("Step", bar)
        rows.add_row("Loss", loss)
        rows.add_row("Speed", f"{self._tokens_per_second:.0f} tokens/s")
        rows.add_row("Queue", f"{self._in_flight()} ops in flight")
        return Panel(rows, title=Text(f"Training {self._model}"), expand=False, width=66)


def one_line(text: str) -> str:
    """`text` with every run of blanks and newlines as one space."""
    return " ".join(text.split()) or "(nothing)"


def save_loss_curve(file: Path, model: str, losses: Sequence[float], question: str, before: str, after: str) -> Path:
    """The curve as a PNG, with the question and both answers below it. Returns `file`."""
    import matplotlib

    matplotlib.use("Agg")  # no window: this may run on a machine without a screen
    from matplotlib import pyplot

    steps = list(range(1, len(losses) + 1))
    figure, axes = pyplot.subplots(figsize=(8, 5.2), dpi=150)
    axes.plot(steps, losses, marker="o", markersize=4.5, linewidth=2, color="#1f6f8b")
    axes.fill_between(steps, losses, color="#1f6f8b", alpha=0.08)
    axes.annotate(
        f"{losses[0]:.2f}", (steps[0], losses[0]), textcoords="offset points", xytext=(12, -3), color="#444444"
    )
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps[-1], losses[-1]),
        textcoords="offset points",
        xytext=(0, 10),
        ha="center",
        color="#444444",
    )
    axes.set_title(f"{model}: three answers, {len(losses)} steps", loc="left", fontsize=13, pad=12)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token (nats)")
    axes.set_xticks(steps)
    axes.set_xlim(0.5, len(losses) + 0.5)
    axes.set_ylim(0, max(losses) * 1.08)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    lines = [("asked", question), ("before", one_line(before)), ("after", one_line(after))]
    figure.subplots_adjust(left=0.09, right=0.97, top=0.91, bottom=0.30)
    for row, (label, text) in enumerate(lines):
        y = 0.145 - 0.05 * row
        figure.text(0.09, y, label, fontsize=10, fontweight="bold", color="#1f6f8b")
        figure.text(0.18, y, text if len(text) < 90 else text[:87] + "...", fontsize=10, color="#222222")
    figure.savefig(file)
    pyplot.close(figure)
    return file
