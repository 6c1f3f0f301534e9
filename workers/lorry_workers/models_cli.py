"""`lorry models`: fetch base models and list them. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lorry_jobs.paths import models_dir
from lorry_workers.fetch import fetch_model, is_complete

models = typer.Typer(no_args_is_help=True, help="Base models on this machine: fetch, list.")


@dataclass(frozen=True)
class LocalModel:
    name: str
    folder: Path
    parameters: int
    size_bytes: int
    dtypes: tuple[str, ...]
    complete: bool


@models.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help="smollm2, or a Hugging Face id such as Qwen/Qwen3-0.6B.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch again and replace what is there.")] = False,
) -> None:
    """Download a base model, check it, and put it where `lorry worker --model NAME` finds it."""
    console = Console(stderr=True)
    fetched = fetch_model(name, models_dir(), force=force, console=console)
    if fetched.was_present:
        console.print(f"{name} is there already, complete; --force fetches it again.")
    # The path alone on stdout, so that scripts can use it.
    typer.echo(fetched.folder)


@models.command("list")
def list_command() -> None:
    """Show the models in the models folder (LORRY_MODELS_DIR, else $LORRY_HOME/models)."""
    console = Console()
    found = find_models(models_dir())
    if not found:
        console.print(f"No models in {models_dir()}. Get a small one with `lorry models fetch smollm2`.")
        return

    table = Table("name", "parameters", "size", "dtype", "complete")
    table.add_column("path", overflow="fold")  # a path that is cut short cannot be copied
    for model in found:
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:,.1f} M",
            f"{model.size_bytes / 1e6:,.0f} MB",
            ", ".join(model.dtypes),
            "yes" if model.complete else "no manifest or files missing",
            str(model.folder),
        )
    console.print(table)


def find_models(folder: Path) -> list[LocalModel]:
    """Every model folder one or two levels down (`smollm2`, `Qwen/Qwen3-0.6B`), by name."""
    configs = sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")])
    names = [config.parent.relative_to(folder) for config in configs]
    # A leading dot marks a fetch in progress.
    return [
        _describe(name.as_posix(), folder / name)
        for name in names
        if not any(part.startswith(".") for part in name.parts)
    ]


def _describe(name: str, folder: Path) -> LocalModel:
    parameters = 0
    dtypes: set[str] = set()
    for file in folder.glob("*.safetensors"):
        for tensor in _safetensors_header(file).values():
            parameters += math.prod(tensor["shape"])
            dtypes.add(tensor["dtype"])
    return LocalModel(
        name=name,
        folder=folder,
        parameters=parameters,
        size_bytes=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        dtypes=tuple(sorted(dtypes)),
        complete=is_complete(folder),
    )


def _safetensors_header(path: Path) -> dict[str, dict[str, list[int] | str]]:
    """The tensors of a safetensors file: eight bytes of length, then that much JSON. Weights stay unread."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
