"""Commands that look at a running server: `lorry workers`, `lorry jobs`, `lorry drain`."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lorry.cli.output import make_console, make_table
from lorry_jobs.errors import JobNotFound, UserError

if TYPE_CHECKING:
    from lorry_jobs.mailbox import Mailbox

console = make_console()

URL = Annotated[str | None, typer.Option(help="The server's address; default: LORRY_URL, else the local stack.")]

jobs_app = typer.Typer(help="Show the jobs of a server.", no_args_is_help=True)


def workers(url: URL = None) -> None:
    """Show every live worker: model, lease, slots, load, what its last cycles held and took, version."""
    mailbox = _mailbox(url)
    columns = ("model", "host", "lease", "jobs", "free slots", "requests", "queue", "cycle", "version", "")
    table = make_table("worker", *columns, whole="worker")  # `lorry drain` wants the whole name
    recent: list[str] = []
    for name in mailbox.live_workers():
        record = mailbox.worker_record(name)
        if not record:
            continue
        info = json.loads(record["info"])
        slots, _seats = mailbox.free_places(name, record["model"])
        table.add_row(
            name,
            record["model"],
            f"{info['host']} ({info['pid']})",
            f"{mailbox.lease_seconds_left(name):.0f} s",
            f"{info.get('jobs', 0)}",
            f"{slots}",
            f"{info.get('requests', 0)}",
            f"{mailbox.queue_length(name)}",
            f"{info.get('cycle', 0)}",
            info["version"],
            "leaving" if "drain" in record else "",
        )
        if cycles := info.get("recent"):
            recent.append(f"{name}, a cycle of the last {cycles['cycles']:.0f}: {_recent(cycles)}")
    console.print(table if table.row_count else "No worker has a live lease. Start one: lorry worker --model NAME")
    for line in recent:
        console.print(line, markup=False)


def _recent(cycles: dict[str, float]) -> str:
    """Means over the worker's last cycles."""
    busy = cycles["train_ms"] + cycles["step_ms"] + cycles["other_ms"]
    return (
        f"{cycles['jobs']:.1f} jobs, {cycles['tokens']:.0f} tokens in {busy:.0f} ms; "
        f"{cycles['tokens_per_second']:.0f} tokens/s, {cycles['idle']:.0%} idle"
    )


def drain(
    worker: Annotated[str, typer.Argument(help="A worker's name, as `lorry workers` shows it.")], url: URL = None
) -> None:
    """Ask a worker to save its jobs, hand them over one by one, and leave. No client sees an error."""
    mailbox = _mailbox(url)
    if not mailbox.drain(worker):
        known = ", ".join(mailbox.live_workers()) or "none"
        raise UserError(f"there is no live worker '{worker}'; live are: {known}")
    console.print(f"{worker} leaves at its next heartbeat; its jobs move to other workers.", markup=False)


@jobs_app.command("list")
def list_jobs(url: URL = None, limit: Annotated[int, typer.Option(min=1)] = 50) -> None:
    """The newest jobs: model, state, worker, ops done and waiting."""
    mailbox = _mailbox(url)
    columns = ("model", "state", "worker", "done", "snapshot", "bytes", "ms per op", "age")
    table = make_table("job", *columns, whole="job")  # `lorry jobs show` wants the whole id
    for job in mailbox.jobs(limit):
        record = mailbox.job_record(job)
        if record:
            table.add_row(job, *_job_cells(record))
    console.print(table if table.row_count else "There are no jobs.")


@jobs_app.command("show")
def show_job(
    job: str,
    url: URL = None,
    ledger: Annotated[bool, typer.Option("--ledger", help="What became of each op.")] = False,
    last: Annotated[int, typer.Option(min=1, help="How many lines of the ledger.")] = 50,
) -> None:
    """One job, and with --ledger what became of its ops."""
    mailbox = _mailbox(url)
    record = mailbox.job_record(job)
    if not record:
        raise JobNotFound("the server does not know this job; `lorry jobs list` shows those it knows", job=job)
    rows = Table.grid(padding=(0, 2))
    for field in ("state", "model", "owner", "epoch", "committed", "released", "snapshot", "queued_bytes", "session"):
        rows.add_row(field, record.get(field, ""))
    console.print(rows)
    if ledger:
        console.print(_ledger_table(mailbox.ledger(job), last))


def _ledger_table(entries: dict[int, dict[str, Any]], last: int) -> Table:
    table = make_table("seq", "op", "status", "attempt", "worker", "epoch", "cycle", "queued", "waited", "ran", "total")
    for seq, entry in list(entries.items())[-last:]:
        queued, started, committed = entry.get("queued", 0), entry.get("started"), entry.get("committed")
        table.add_row(
            f"{seq}",
            entry.get("op", ""),
            entry.get("status", "waiting"),
            f"{entry.get('attempt', '')}",
            entry.get("worker", ""),
            entry.get("epoch", ""),
            f"{entry.get('cycle', '')}",
            f"{datetime.fromtimestamp(queued / 1000):%H:%M:%S.%f}"[:-3],
            f"{started - queued} ms" if started else "",
            f"{entry['milliseconds']:.1f} ms" if "milliseconds" in entry else "",
            f"{committed - queued} ms" if committed else "",
        )
    return table


def _job_cells(record: dict[str, str]) -> tuple[str, ...]:
    age = time.time() - int(record["created"]) / 1000
    return (
        record["model"],
        record["state"],
        record["owner"] or "none",
        record["committed"],
        record["snapshot"],
        record["queued_bytes"],
        record["cost_ms"],
        f"{age / 3600:.1f} h" if age > 3600 else f"{age:.0f} s",
    )


def _mailbox(url: str | None) -> Mailbox:
    from lorry.discovery import find_url
    from lorry.settings import ClientSettings
    from lorry_jobs.mailbox import Mailbox
    from lorry_jobs.redis_client import connect

    return Mailbox(connect(ClientSettings(url=find_url(url)), name="lorry-cli"))
