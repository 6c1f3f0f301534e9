"""`lorry checkpoints`: look at saved checkpoints, and do something with them.

A checkpoint is named by its path, as `list` shows it, or by its name alone where only one job has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Column, Table

from lorry.cli.operate import URL
from lorry.cli.output import make_console, make_table
from lorry_jobs.errors import UserError

if TYPE_CHECKING:
    from lorry import ServiceClient
    from lorry_jobs.checkpoint_paths import Kind
    from lorry_jobs.types import CheckpointMetadata

console = make_console()

NAME = Annotated[str, typer.Argument(help="A checkpoint's path, or its name where only one job has it.")]
JOB = Annotated[str | None, typer.Option(help="Only this job's.")]
KIND = Annotated[str | None, typer.Option(help="Only `weights` (training states) or `sampler_weights`.")]
TARGET = Annotated[Path | None, typer.Argument(help="Where to; default: the checkpoint's name, in this folder.")]

checkpoints_app = typer.Typer(help="List, keep, fetch, publish and delete checkpoints.", no_args_is_help=True)


@checkpoints_app.command("list")
def list_checkpoints(job: JOB = None, kind: KIND = None, url: URL = None) -> None:
    """The checkpoints, the oldest first: path, model, step, size, age, time left."""
    with _service(url) as service:
        found = service.list_checkpoints(job, cast("Kind | None", kind))
    table = make_table("path", "model", "rank", "step", "size", "saved", "time left")
    for each in found:
        size, saved = f"{each.size / 2**20:.1f} MiB", f"{each.created:%Y-%m-%d %H:%M}"
        table.add_row(each.path, each.base_model, f"{each.lora_rank}", f"{each.step}", size, saved, _left(each))
    console.print(table if found else "There are no checkpoints.")


@checkpoints_app.command()
def show(name: NAME, url: URL = None) -> None:
    """Everything that is known of one checkpoint."""
    with _service(url) as service:
        found = service.get_checkpoint_metadata(name)
    rows = Table.grid("", Column(overflow="fold"), padding=(0, 2))
    for field in ("path", "kind", "base_model", "lora_rank", "step", "size", "created", "expires", "pinned"):
        rows.add_row(field, str(getattr(found, field)))
    for key, value in found.user_metadata.items():
        rows.add_row(key, value)
    for file, entry in found.files.items():
        rows.add_row(file, f"{entry.size} bytes, sha256 {entry.sha256}")
    console.print(rows, soft_wrap=True)


@checkpoints_app.command()
def delete(
    names: Annotated[list[str], typer.Argument(help="Paths or names.", metavar="NAME...")],
    url: URL = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete checkpoints now. Pinned ones are refused."""
    with _service(url) as service:
        found = [service.get_checkpoint_metadata(name) for name in names]  # all are there, or nothing is deleted
        for each in found:
            _say(each.path)
        _confirm(f"Delete {_count(len(found))}?", yes)
        for each in found:
            service.delete_checkpoint(each.path)
    _say(f"Deleted {_count(len(found))}.")


@checkpoints_app.command()
def ttl(
    name: NAME,
    hours: Annotated[float | None, typer.Option(help="Hours from now.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds from now.")] = None,
    never: Annotated[bool, typer.Option("--never", help="Let it stay for ever.")] = False,
    url: URL = None,
) -> None:
    """Say when a checkpoint expires."""
    if (hours is not None) + (seconds is not None) + never != 1:
        raise UserError("say when: --hours, --seconds or --never")
    with _service(url) as service:
        found = service.set_checkpoint_ttl(name, hours, ttl_seconds=seconds)
    _say(f"{found.path}: {f'expires at {found.expires:%Y-%m-%d %H:%M:%S} UTC' if found.expires else 'stays for ever'}")


@checkpoints_app.command()
def pin(name: NAME, url: URL = None) -> None:
    """Keep a checkpoint from expiring and from being deleted."""
    with _service(url) as service:
        _say(f"{service.pin_checkpoint(name).path} is pinned")


@checkpoints_app.command()
def unpin(name: NAME, url: URL = None) -> None:
    """Undo `pin`; a TTL counts again."""
    with _service(url) as service:
        found = service.unpin_checkpoint(name)
    _say(f"{found.path} is not pinned; time left: {_left(found)}")


@checkpoints_app.command()
def download(name: NAME, target: TARGET = None, url: URL = None) -> None:
    """Fetch all files of a checkpoint into a folder, or into an archive if TARGET ends in .tar, .tar.gz or .tgz."""
    with _service(url) as service:
        _say(f"{service.download_checkpoint(name, target)}")


@checkpoints_app.command()
def export(
    name: NAME,
    target: TARGET = None,
    merged: Annotated[bool, typer.Option("--merged", help="The whole model, with the adapter added.")] = False,
    url: URL = None,
) -> None:
    """Write an adapter as peft loads it, or with --merged a model as transformers loads it."""
    with _service(url) as service:
        _say(f"{service.export_checkpoint(name, target, merged=merged)}")


@checkpoints_app.command()
def publish(
    name: NAME,
    hub_id: Annotated[str, typer.Argument(help="user/repository on the Hugging Face Hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    url: URL = None,
) -> None:
    """Upload an adapter with a model card to the Hugging Face Hub. Needs HF_TOKEN or `hf auth login`."""
    with _service(url) as service:
        _say(service.publish_checkpoint(name, hub_id, private=private).url)


@checkpoints_app.command()
def reindex(url: URL = None) -> None:
    """Rebuild the index in Redis from the store."""
    with _service(url) as service:
        done = service.reindex_checkpoints()
    _say(f"{_count(done.checkpoints)} in the store; index: {len(done.added)} added, {len(done.removed)} removed")
    for problem in done.unreadable:
        _say(f"cannot be read: {problem}")
    if done.unreadable:
        raise typer.Exit(1)


@checkpoints_app.command()
def prune(
    job: Annotated[str, typer.Argument(help="The job, as `lorry jobs list` shows it.")],
    keep_last: Annotated[int, typer.Option(min=1, help="How many of each kind stay.")],
    kind: KIND = None,
    url: URL = None,
) -> None:
    """Delete all but a job's newest checkpoints. Pinned ones stay and do not count."""
    with _service(url) as service:
        gone = service.prune_checkpoints(keep_last, job, cast("Kind | None", kind))
    for each in gone:
        _say(each.path)
    _say(f"Deleted {_count(len(gone))}.")


@contextmanager
def _service(url: str | None) -> Iterator[ServiceClient]:
    from lorry import ServiceClient

    with ServiceClient(base_url=url) as service:
        yield service


def _left(found: CheckpointMetadata) -> str:
    if found.pinned:
        return "pinned"
    if found.ttl is None:
        return "for ever"
    return str(timedelta(seconds=round(found.ttl.total_seconds())))


def _count(number: int) -> str:
    return f"{number} checkpoint{'' if number == 1 else 's'}"


def _confirm(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)


def _say(text: Any) -> None:
    console.print(str(text), markup=False, soft_wrap=True)
