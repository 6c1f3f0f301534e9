"""Commands that other packages add to `lorry` through entry points of the group `lorry.commands`.

An entry point names a Typer app (a group of commands) or a function (one command). It is loaded when its
command is called, not before: the workers' commands import torch, and `lorry --help` must not.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from lorry_jobs.errors import UserError

GROUP = "lorry.commands"

# What `lorry --help` says of a command that is not loaded yet, and the extra that brings what it needs.
HELP = {
    "models": "Fetch, list and remove base models.",
    "worker": "Run one worker for a base model, on this machine's device.",
}
EXTRA = "lorry[worker]"


class CommandUnavailable(UserError):
    """A plugin's command cannot be loaded here."""

    code = "command_unavailable"


class PluginGroup(TyperGroup):
    """A group that knows its own commands and those of the plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(_plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        plugin = None if own else _plugins().get(cmd_name)
        return PluginCommand(plugin) if plugin else own


class PluginCommand(TyperCommand):
    """Stands for a plugin's command in `lorry --help`; becomes the command when it is called."""

    def __init__(self, entry_point: EntryPoint) -> None:
        source = entry_point.dist.name if entry_point.dist else entry_point.module
        text = HELP.get(entry_point.name, f"A command of {source}.")
        super().__init__(entry_point.name, help=text, short_help=text)
        self._entry_point = entry_point

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        # The context carries the real command, and the group then invokes what the context carries.
        return load(self._entry_point).make_context(info_name, args, parent, **extra)


def load(entry_point: EntryPoint) -> Any:
    """The click command behind an entry point. Raises `CommandUnavailable`, which names what is missing."""
    try:
        found = entry_point.load()
    except ModuleNotFoundError as error:
        raise CommandUnavailable(
            f"`lorry {entry_point.name}` needs the module {error.name!r}, which is not installed. "
            f"Try: pip install '{EXTRA}'"
        ) from error
    except (ImportError, AttributeError) as error:
        raise CommandUnavailable(f"`lorry {entry_point.name}` cannot be loaded: {error}") from error
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    single.command(entry_point.name)(found)
    return typer.main.get_command(single)


def _plugins() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP)}
