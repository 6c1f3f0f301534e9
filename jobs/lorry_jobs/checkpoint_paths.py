"""The names of checkpoints, as users write them and as folders.

    lorry://<job>/weights/<name>            training state (save_state)
    lorry://<job>/sampler_weights/<name>    an adapter for sampling (save_weights_for_sampler)

The schemes tinker://, mint://, mindlab-toolkit:// and trio:// mean the same. `<job>/<name>` without a kind
(PyTRIO) and a bare `<name>` are understood where the caller says which kind, or which job, is meant.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import quote, unquote

from .errors import UserError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEMES = ("lorry", "tinker", "mint", "mindlab-toolkit", "trio")

MAX_NAME_LENGTH = 200
MAX_FOLDER_BYTES = 240
"""File systems allow 255 bytes; the rest is for the prefixes of folders that are being written."""

_PLAIN = "=@+,"  # kept as they are in folder names, beside letters, digits and "-._~"


@dataclass(frozen=True)
class CheckpointPath:
    job: str
    kind: Kind
    name: str

    def __post_init__(self) -> None:
        check_name(self.job, "job id")
        check_name(self.name)
        if self.kind not in KINDS:
            raise UserError(f"a checkpoint's kind is one of {', '.join(KINDS)}, not {self.kind!r}")

    def __str__(self) -> str:
        return f"lorry://{self.job}/{self.kind}/{self.name}"

    @property
    def folders(self) -> tuple[str, str, str]:
        """The folders below the store, one in the other. They hold no separator and never start with a dot."""
        return folder_name(self.job), self.kind, folder_name(self.name)

    @classmethod
    def parse(cls, text: str, *, job: str | None = None, kind: Kind = "weights") -> CheckpointPath:
        """What `text` names. `job` and `kind` are used where it does not say them itself."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            if job is None:
                raise UserError(f"{text!r} names no job: give the whole path, lorry://<job>/{kind}/<name>")
            return cls(job, kind, text)
        if scheme not in SCHEMES:
            raise UserError(f"{text!r} is no checkpoint: the scheme must be one of {', '.join(SCHEMES)}")
        match rest.split("/"):
            case [named_job, "weights" | "sampler_weights" as named_kind, name]:
                return cls(named_job, named_kind, name)
            case [named_job, name]:
                return cls(named_job, kind, name)
        raise UserError(f"{text!r} is no checkpoint path: it must look like {scheme}://<job>/{kind}/<name>")


def check_name(name: str, what: str = "checkpoint name") -> str:
    """`name`, if it can be part of a path; else a `UserError` that says why not."""
    if not name:
        raise UserError(f"a {what} must not be empty")
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(f"a {what} has at most {MAX_NAME_LENGTH} characters, this one has {len(name)}")
    if "/" in name or "\\" in name:
        raise UserError(f"a {what} must not contain a slash: {name!r}")
    if name.startswith(".") or ".." in name:
        raise UserError(f"a {what} must not start with a dot or contain '..': {name!r}")
    if any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in name):
        raise UserError(f"a {what} must not contain control characters: {name!r}")
    encoded = len(folder_name(name))
    if encoded > MAX_FOLDER_BYTES:
        raise UserError(f"this {what} takes {encoded} bytes as a folder name, of at most {MAX_FOLDER_BYTES}: {name!r}")
    return name


def folder_name(name: str) -> str:
    """`name` with everything that a file system may refuse percent-encoded: "a1:train:0" is a1%3Atrain%3A0."""
    return quote(name, safe=_PLAIN)


def name_of_folder(folder: str) -> str:
    """The reverse of `folder_name`."""
    return unquote(folder)
