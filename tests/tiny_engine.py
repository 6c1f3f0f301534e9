"""An engine over a tiny model, its plain torch + peft counterpart, and data for both."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from lorry_jobs.types import CreateModelRequest, Datum, LoraConfig, ModelInput
from lorry_workers.base_model import BaseModel, load_base_model
from lorry_workers.engine.checkpoints import CheckpointStore
from lorry_workers.engine.engine import Engine, EngineOptions
from tests.tiny_models import make_tiny_llama, make_tiny_qwen3

MAKERS = {"llama": make_tiny_llama, "qwen3": make_tiny_qwen3}


@functools.cache
def model_folder(family: str = "llama", tied: bool = True) -> Path:
    """One folder per kind of model and test run."""
    folder = Path(tempfile.mkdtemp(prefix=f"lorry-{family}-"))
    return MAKERS[family](folder, tie_word_embeddings=tied)


def load_base(family: str = "llama", tied: bool = True, dtype: torch.dtype = torch.float32) -> BaseModel:
    return load_base_model(str(model_folder(family, tied)), dtype=dtype, device="cpu")


def make_engine(
    store: Path, family: str = "llama", tied: bool = True, dtype: torch.dtype = torch.float32, **options: Any
) -> Engine:
    return Engine(load_base(family, tied, dtype), "tiny", CheckpointStore(store), EngineOptions(**options))


def create_job(engine: Engine, job: str = "a1:train:0", **lora: Any) -> None:
    config = {"rank": 4, "alpha": 8.0, "seed": 7, **lora}
    engine.create_model(job, CreateModelRequest(base_model="tiny", lora=LoraConfig(**config)))


def peft_model(family: str = "llama", tied: bool = True, adapter: Path | None = None, **lora: Any) -> Any:
    """Plain transformers + peft, with a fresh adapter of seed 7 or the one in a folder."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(family, tied), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie.*")
        if adapter is not None:
            return peft.PeftModel.from_pretrained(model, adapter)
        config = {"r": 4, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM", **lora}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return peft.get_peft_model(model, peft.LoraConfig(**config))


def targets(*, attn: bool = True, mlp: bool = True, unembed: bool = True) -> list[str]:
    names = ["q_proj", "k_proj", "v_proj", "o_proj"] if attn else []
    names += ["gate_proj", "up_proj", "down_proj"] if mlp else []
    return names + (["lm_head"] if unembed else [])


def random_data(lengths: list[int], seed: int = 0, vocab: int = 400, **inputs: str) -> list[Datum]:
    """Datums of random tokens. `inputs` are loss inputs by kind: "uniform" or "normal" numbers."""
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = random.integers(0, vocab, length + 1)
        fields: dict[str, Any] = {"target_tokens": tokens[1:]}
        for name, kind in inputs.items():
            values = random.uniform(0, 1, length) if kind == "uniform" else random.normal(0, 1, length)
            fields[name] = values.astype(np.float32)
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), fields))
    return data


def randomize(engine: Engine, job: str = "a1:train:0", scale: float = 0.05) -> None:
    """Give A and B values at which nothing is zero by accident."""
    flat = engine.state(job).adapter.flat
    flat.add_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(3)) * scale)
