"""The frozen base model of a worker: from what a user typed to a model on a device.

    spec                 location               source                          BaseModel
    smollm2          ->  smollm2            ->  <models_dir>/smollm2        ->  model, tokenizer, limits
    big=/data/q.gguf ->  /data/q.gguf       ->  /data/q.gguf
    Qwen/Qwen3-0.6B  ->  Qwen/Qwen3-0.6B    ->  <models_dir>/…, else the Hugging Face hub

Weights come from safetensors or GGUF only, never from pickles, and no code of a model's repository is run
(`trust_remote_code` stays off).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.errors import HTTPError as HubTransportError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf import read_gguf_metadata

from lorry_jobs.errors import UnknownModel, UserError

# What a causal LM needs. Repositories often carry the same weights again as pickles or in other formats.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
HUB_IGNORED = ("original/*", "onnx/*", "openvino/*")

# llama.cpp's names of the pre-tokenizers that put every digit alone and then split as GPT-2 does.
SINGLE_DIGIT_PRE_TOKENIZERS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)


@dataclass(frozen=True)
class BaseModel:
    """A causal LM in eval mode with every parameter frozen, and the limits that callers must respect."""

    model: Any
    tokenizer: Any
    config: Any
    context_length: int
    vocab_size: int  # rows of the embedding; may exceed the tokenizer's vocabulary
    eos_token_ids: tuple[int, ...]


def parse_model_spec(spec: str) -> tuple[str, str]:
    """(name, location) of `--model NAME[=PATH]`; NAME alone is its own location.

    A spec that is an existing path is taken whole, so that a path with "=" in it needs no NAME.
    """
    if "=" not in spec or Path(spec).expanduser().exists():
        name, location = spec, spec
    else:
        name, _, location = spec.partition("=")
    if not name.strip() or not location.strip():
        raise UserError(f"--model takes NAME or NAME=PATH, not {spec!r}.")
    return name, location


def resolve_model_path(spec: str, models_dir: Path) -> str:
    """Where the model of `spec` is: a folder with config.json, a .gguf file, or else a Hugging Face id.

    The hub is not asked here. A location that can only be a path and is not there raises `UnknownModel`.
    """
    _, location = parse_model_spec(spec)
    path = Path(location).expanduser()
    if _is_model_folder(path) or _is_gguf_file(path):
        return str(path.absolute())

    if _looks_like_a_path(location):
        missing = "it has no config.json" if path.is_dir() else "there is no such file or folder"
        raise UnknownModel(
            f"No model at {path}: {missing}. Give a folder with config.json and safetensors weights, or a .gguf file."
        )

    fetched = models_dir / location
    if _is_model_folder(fetched):
        return str(fetched.absolute())
    return location


def load_base_model(
    location: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str,
    attn_implementation: str = "sdpa",
) -> BaseModel:
    """The model at `location` (as `resolve_model_path` gave it), on `device`, frozen.

    "auto" is the dtype of the files. GGUF weights are dequantized to `dtype`. A Hugging Face id is downloaded into
    the hub's cache first.
    """
    path = Path(location)
    if _is_gguf_file(path):
        source, gguf_file = path.parent, path.name
    elif path.is_dir():
        source, gguf_file = path, None
    else:
        source, gguf_file = download_from_hub(location), None

    try:
        model = _load_weights(source, gguf_file, dtype, device, attn_implementation)
        tokenizer = load_gguf_tokenizer(path) if gguf_file else AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot load the model at {location}: {error}") from error

    model.eval()
    model.requires_grad_(False)
    config = model.config.get_text_config()
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        context_length=config.max_position_embeddings,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(model, tokenizer, vocab_size),
    )


def download_from_hub(repo_id: str, folder: Path | None = None) -> Path:
    """A snapshot of a Hugging Face repository, in `folder` or, without one, in the hub's own cache.

    Asked for once and as a whole: transformers would retry each of its files for half a minute when there
    is no network.
    """
    try:
        snapshot = snapshot_download(
            repo_id,
            local_dir=folder,
            allow_patterns=list(HUB_PATTERNS),
            ignore_patterns=list(HUB_IGNORED),
        )
    except (OSError, HFValidationError, HubTransportError) as error:
        reason = " ".join(str(error).split())
        raise UnknownModel(
            f"No model {repo_id!r}: it is no folder, no .gguf file and no model that was fetched before, and "
            f"the Hugging Face hub did not give it ({type(error).__name__}: {reason}). Fetch it where there "
            f"is a network with `lorry models fetch {repo_id}`, or name a folder: --model {repo_id}=PATH."
        ) from error
    return Path(snapshot)


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer inside a GGUF file, splitting text as the model's own tokenizer does.

    transformers (5.24) does not know the pre-tokenizers of `SINGLE_DIGIT_PRE_TOKENIZERS` and splits as GPT-2
    instead, which gives other tokens for spaces before digits than the model was trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    metadata, _ = read_gguf_metadata(str(path))
    if metadata.get("tokenizer.ggml.pre") in SINGLE_DIGIT_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    # GGUF states the model's context, and transformers leaves the tokenizer's limit at infinity.
    architecture = metadata["general.architecture"]
    tokenizer.model_max_length = int(metadata[f"{architecture}.context_length"])
    return tokenizer


def _load_weights(
    source: Path,
    gguf_file: str | None,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str,
    attn_implementation: str,
) -> Any:
    if gguf_file:
        # Unpacked, even where a kernel could use the packed blocks: LoRA layers need the plain weight.
        # The config is parsed once and passed on, as reading it takes seconds.
        format_options = {
            "gguf_file": gguf_file,
            "config": AutoConfig.from_pretrained(source, gguf_file=gguf_file),
            "quantization_config": GgufConfig(dequantize=True),
        }
    else:
        format_options = {"use_safetensors": True}

    model, loading = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=attn_implementation,
        output_loading_info=True,
        **format_options,
    )
    # transformers only warns, and fills what is missing with random numbers.
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"The weights at {source} are not whole: {len(missing)} tensors are missing, {missing[0]} first."
        )
    return model


def _eos_token_ids(model: Any, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """All ids that end a text. The three places often disagree: a chat model's generation config names its
    end of turn, its tokenizer sometimes only the end of a document."""
    stated = (
        model.generation_config.eos_token_id,
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    )
    found: dict[int, None] = {}
    for ids in stated:
        for token_id in ids if isinstance(ids, (list, tuple)) else [ids]:
            if token_id is not None and 0 <= token_id < vocab_size:
                found[int(token_id)] = None
    return tuple(found)


def _is_model_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def _is_gguf_file(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _looks_like_a_path(location: str) -> bool:
    return location.startswith(("/", "./", "../", "~")) or location.endswith(".gguf")
