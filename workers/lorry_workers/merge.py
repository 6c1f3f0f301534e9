"""A base model with an adapter's weights added, written as a folder that plain transformers loads.

W + (alpha / r) · B·A for each adapted layer, computed in float32 and stored in the base model's dtype. The other
weights go to the file as they are; nothing of the running model changes.
"""

from __future__ import annotations

import copy
import hashlib
import shutil
import time
import uuid
from pathlib import Path

import torch
from torch import Tensor

from lorry_jobs.checkpoint_paths import CheckpointPath
from lorry_jobs.errors import CheckpointNotFound, ServiceError, UserError
from lorry_jobs.types import CheckpointFile, MergedModel

from .engine.adapter import Adapter, head_name, make_shell, read_adapter
from .engine.checkpoint_format import service_errors
from .engine.engine import Engine


class MergedModels:
    """Merged models wait in `root` until somebody has fetched them; `tidy` removes them after a while."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self._engine, self._root = engine, root

    def make(self, path: CheckpointPath) -> MergedModel:
        """Needs the memory of the adapted weights once more, and the disk space of the model."""
        manifest, checkpoint = self._engine.store.load(path)
        if manifest.base_model != self._engine.name:
            raise UserError(f"{path} is of {manifest.base_model}, but this worker serves {self._engine.name}")
        adapter = read_adapter(checkpoint.adapter, checkpoint.adapter_config)
        id = uuid.uuid4().hex
        folder = self._root / id
        with service_errors(f"cannot write the merged model of {path}"):
            try:
                folder.mkdir(parents=True)
                self._write(adapter, folder)
                files = {
                    str(file.relative_to(folder)): CheckpointFile(size=file.stat().st_size, sha256=_sha256(file))
                    for file in sorted(folder.rglob("*"))
                    if file.is_file()
                }
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return MergedModel(id=id, files=files)

    def read_part(self, id: str, file: str, offset: int, size: int) -> bytes:
        folder = self._root / id
        if not id.isalnum() or not folder.is_dir():
            raise CheckpointNotFound("this merged model is not here any more; export it again")
        if file not in {str(entry.relative_to(folder)) for entry in folder.rglob("*") if entry.is_file()}:
            raise UserError(f"the merged model has no file {file!r}")
        with service_errors(f"cannot read {file} of a merged model"), (folder / file).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def tidy(self, age_seconds: float) -> int:
        removed = 0
        if self._root.is_dir():
            for folder in self._root.iterdir():
                if time.time() - folder.stat().st_mtime > age_seconds:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
        return removed

    def _write(self, adapter: Adapter, folder: Path) -> None:
        base = self._engine.base
        head = head_name(base.model)
        weights: dict[str, Tensor] = dict(base.model.state_dict())
        for path, (a, b) in adapter.pairs.items():
            name = f"{path}.weight"
            if name not in weights:
                raise ServiceError(f"the base model has no weight {name}, which the adapter changes")
            weights[name] = _merged(weights[name], a, b, adapter.scaling)
        shell = make_shell(base.model)
        shell.config = copy.deepcopy(base.config)
        if head in adapter.pairs:
            shell.config.tie_word_embeddings = False  # the embedding stays as it was
        elif shell.config.tie_word_embeddings:
            weights.pop(f"{head}.weight", None)
        shell.save_pretrained(folder, state_dict={name: tensor.contiguous() for name, tensor in weights.items()})
        base.tokenizer.save_pretrained(folder)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    with torch.no_grad():
        delta = (b @ a).to(weight.device) * scaling
        return (weight.float() + delta).to(weight.dtype).cpu()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
