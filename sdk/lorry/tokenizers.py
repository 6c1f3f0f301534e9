"""Tokenizers without a hub and without torch: unpack what the worker published, load it from disk.

transformers is imported in `load_tokenizer` only, so that `import lorry` stays quick.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from lorry_jobs.errors import ServiceError
from lorry_jobs.paths import lorry_home

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The largest tokenizers (256k tokens and their merges) unpack to about 40 MB.
MAX_UNPACKED_BYTES = 512 * 1024 * 1024


def tokenizer_cache() -> Path:
    """Where unpacked tokenizers are kept on this machine."""
    return lorry_home() / "cache" / "tokenizers"


def unpack_tokenizer(archive: bytes, cache_dir: Path) -> Path:
    """The folder `cache_dir/<sha256 of archive>` with the archive's files; made once, then reused.

    The folder appears whole or not at all: processes that unpack at the same time do no harm.
    """
    folder = cache_dir / hashlib.sha256(archive).hexdigest()
    if folder.is_dir():
        return folder

    cache_dir.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=cache_dir))
    try:
        _extract(archive, temporary)
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """transformers' own tokenizer from an unpacked folder. Needs no torch; the hub is never asked."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _extract(archive: bytes, folder: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            entries = [entry for entry in opened.infolist() if not entry.is_dir()]
            _refuse_unsafe(entries)
            for entry in entries:
                target = folder.joinpath(*PurePosixPath(entry.filename).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(opened.read(entry))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ServiceError(
            f"The tokenizer that the worker published is damaged ({error}). Restart the worker: "
            "it publishes the tokenizer again."
        ) from error


def _refuse_unsafe(entries: list[zipfile.ZipInfo]) -> None:
    """Every file must land inside the folder, and all of them together must be of a tokenizer's size."""
    for entry in entries:
        name = entry.filename
        # Backslashes and drive letters mean something on Windows only; no tokenizer file needs them.
        if name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise ServiceError(f"The tokenizer archive holds an unsafe file name: {name!r}. It was not unpacked.")

    unpacked_bytes = sum(entry.file_size for entry in entries)
    if unpacked_bytes > MAX_UNPACKED_BYTES:
        raise ServiceError(
            f"The tokenizer archive would unpack to {unpacked_bytes} bytes, more than the {MAX_UNPACKED_BYTES} "
            "allowed. It was not unpacked."
        )


def _move_into_place(temporary: Path, folder: Path) -> None:
    # mkdtemp makes the folder private; a shared cache must stay readable for its other users.
    temporary.chmod(0o755)
    try:
        os.replace(temporary, folder)
    except OSError:
        # Another process was first. Its folder has the same digest, so the same files.
        if not folder.is_dir():
            raise
