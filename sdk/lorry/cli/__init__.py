"""The command line, `lorry`: `up`, `down`, `status`, `version`, and the commands that plugins add.

What a command needs is imported when it runs, so that `lorry --help` answers at once.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING, Annotated

import typer
from rich.panel import Panel
from rich.table import Table

from lorry.cli.checkpoints import checkpoints_app
from lorry.cli.operate import drain, jobs_app, workers
from lorry.cli.output import make_console
from lorry.cli.plugins import PluginGroup
from lorry_jobs.errors import LorryError, ServiceError
from lorry_jobs.paths import lorry_home

if TYPE_CHECKING:
    from lorry.stack.stack import Stack
    from lorry.stack.state import StackInfo

app = typer.Typer(
    cls=PluginGroup,
    help="LoRA training and sampling as a service of your own.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals hold passwords
)
console = make_console()

app.command()(workers)
app.command()(drain)
app.add_typer(jobs_app, name="jobs")
app.add_typer(checkpoints_app, name="checkpoints")

# `lorry down` waits for what `lorry up` may take: 30 s for workers, 20 s for Redis, and some more.
DOWN_SECONDS = 60.0


def main() -> None:
    """Run the command line. An error that Lorry raised on purpose is shown as its message, with exit code 1."""
    try:
        app(prog_name="lorry")
    except LorryError as error:
        make_console(stderr=True).print(f"lorry: {error}", style="red", markup=False)
        sys.exit(1)


@app.command()
def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PATH]", help="A base model to serve; may be repeated. By default all that are here."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes for each model.")] = None,
    flower: Annotated[bool | None, typer.Option("--flower/--no-flower", help="Run Flower too.")] = None,
) -> None:
    """Run Redis, workers and Flower on this machine until Ctrl-C.

    Settings can also come from LORRY_... variables, such as LORRY_HOME, LORRY_REDIS_PORT or LORRY_MODELS.
    """
    from lorry.stack.programs import default_models
    from lorry.stack.settings import load_settings
    from lorry.stack.stack import Stack

    settings = load_settings(models=model or None, workers=workers, flower=flower)
    if not settings.models:
        settings = settings.model_copy(update={"models": default_models()})
    for name, value in settings.describe().items():
        console.print(f"{name:>15}  {value}", style="dim", markup=False, soft_wrap=True)
    stack = Stack(settings, on_event=lambda line: console.print(line, markup=False, soft_wrap=True))
    _stop_on_signals(stack)
    try:
        with stack:
            _print_stack(stack)
            stack.wait()
            console.print("Stopping: workers finish what they are at. Ctrl-C again ends them now.")
    except ServiceError:
        if not stack.stop_requested:  # else it was stopped while it started, as it was asked to
            raise
    console.print("Stopped.")


@app.command()
def down() -> None:
    """Stop the stack that `lorry up` runs on this machine, and wait until it has stopped."""
    from lorry.stack.state import lock_owner

    home = lorry_home()
    owner = lock_owner(home)
    if owner is None:
        console.print(f"Nothing runs in {home}.", markup=False)
        return
    if owner.started_by != "lorry up":
        # SIGTERM would end somebody's notebook or script and all that it holds in memory.
        raise ServiceError(f"This stack belongs to process {owner.pid}, by {owner.started_by}: stop it there.")
    os.kill(owner.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    while lock_owner(home) == owner:
        if time.monotonic() > deadline:
            raise ServiceError(f"`lorry up` (pid {owner.pid}) has not stopped after {DOWN_SECONDS:g} s.")
        time.sleep(0.1)
    console.print("Stopped.")


@app.command()
def status() -> None:
    """Show what runs on this machine. The exit code is 1 if nothing does."""
    from lorry.stack.state import lock_owner, running_stack

    home = lorry_home()
    info = running_stack(home)
    if info is not None:
        _print_status(info)
        return
    owner = lock_owner(home)
    if owner is not None:
        console.print(f"Starting or stopping: {owner.started_by}, pid {owner.pid}.", markup=False)
    else:
        console.print(f"Nothing runs in {home}. Start it: lorry up", markup=False)
    raise typer.Exit(1)


@app.command()
def version() -> None:
    """Show the versions of Lorry, Celery and Python."""
    for package in ("lorry", "celery"):
        try:
            found = installed_version(package)
        except PackageNotFoundError:
            found = "not installed"
        console.print(f"{package} {found}")
    console.print(f"python {platform.python_version()}")


def _stop_on_signals(stack: Stack) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
            # SIGHUP ignored means `nohup`. SIGINT ignored only means that a shell script used `&`.
            signal.signal(number, lambda *_: stack.request_stop())


def _print_stack(stack: Stack) -> None:
    from lorry_jobs.settings import masked_url

    rows = _rows()
    rows.add_row("Redis", masked_url(stack.url))
    for name, pid in stack.pids.items():
        if name.startswith("worker-"):
            rows.add_row("Worker", f"{name.removeprefix('worker-')} (pid {pid})")
    if stack.flower is not None:
        rows.add_row("Flower", f"{stack.flower.url}  login {stack.flower.user} / {stack.flower.password}")
    rows.add_row("Logs", str(stack.logs))
    console.print(Panel(rows, title="Lorry is up", subtitle="Ctrl-C stops everything", expand=False))
    # Outside of the panel and never wrapped, to be copied. Clients on this machine do not need it.
    console.print("For another shell, or for programs of other users:")
    console.print(f"export LORRY_URL='{stack.url}'", markup=False, soft_wrap=True)


def _print_status(info: StackInfo) -> None:
    rows = _rows()
    rows.add_row("Started", f"{info.started.astimezone():%Y-%m-%d %H:%M:%S} by {info.started_by}, pid {info.pid}")
    rows.add_row("Redis", info.masked_url)
    rows.add_row("Models", ", ".join(info.models) or "none")
    for name, pid in info.pids.items():
        rows.add_row("Process", f"{name} (pid {pid})")
    if info.flower is not None:
        rows.add_row("Flower", f"{info.flower.url}  login {info.flower.user}, password in stack.json")
    console.print(Panel(rows, title="Lorry", expand=False))


def _rows() -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    return rows
