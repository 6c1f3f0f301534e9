"""Where Lorry keeps its files on this machine.

    LORRY_HOME          everything below; by default ~/.local/share/lorry
    LORRY_MODELS_DIR    base models, one folder each; by default $LORRY_HOME/models
    LORRY_STORE_DIR     checkpoints of the local store; by default $LORRY_HOME/store

The variables are read at each call, so that a program or a test can set them after the import. Nothing
is created here: whoever writes a file makes its folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def lorry_home() -> Path:
    """The folder under which Lorry keeps all its files, unless one of them is sent elsewhere."""
    return _from_environment("LORRY_HOME", Path("~/.local/share/lorry"))


def models_dir() -> Path:
    """The folder of the base models that `lorry models fetch` wrote and `lorry worker` reads."""
    return _from_environment("LORRY_MODELS_DIR", lorry_home() / "models")


def store_dir() -> Path:
    """The folder of the local checkpoint store."""
    return _from_environment("LORRY_STORE_DIR", lorry_home() / "store")


def _from_environment(variable: str, default: Path) -> Path:
    # An empty variable means "not set": `LORRY_HOME= lorry up` must not write into the current folder.
    return Path(os.environ.get(variable) or default).expanduser().absolute()
