"""Finding a base model and loading it, from safetensors and from GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lorry_jobs.errors import UnknownModel, UserError
from lorry_workers.base_model import load_base_model, parse_model_spec, resolve_model_path
from tests.tiny_models import CONTEXT_LENGTH, make_tiny_llama, make_tiny_qwen3


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_base_model(str(folder), dtype=dtype, device="cpu")


# --- specs and places ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("smollm2", ("smollm2", "smollm2")),
        ("Qwen/Qwen3-0.6B", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")),
        ("big=/data/model.gguf", ("big", "/data/model.gguf")),
        ("big=/data/a=b", ("big", "/data/a=b")),
    ],
)
def test_a_spec_names_a_model_and_its_place(spec, expected):
    assert parse_model_spec(spec) == expected


@pytest.mark.parametrize("spec", ["", "=path", "name="])
def test_a_spec_needs_both_halves(spec):
    with pytest.raises(UserError, match="NAME=PATH"):
        parse_model_spec(spec)


def test_an_existing_path_with_an_equals_sign_is_a_path(tmp_path):
    folder = tmp_path / "run=3"
    folder.mkdir()
    assert parse_model_spec(str(folder)) == (str(folder), str(folder))


def test_a_folder_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_path(str(tmp_path), tmp_path / "models") == str(tmp_path)
    assert resolve_model_path(f"mine={tmp_path}", tmp_path / "models") == str(tmp_path)


def test_a_gguf_file_is_a_model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model_path(str(file), tmp_path / "models") == str(file)


@pytest.mark.parametrize("name", ["smollm2", "Qwen/Qwen3-0.6B"])
def test_a_fetched_name_is_found_in_the_models_folder(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert resolve_model_path(name, tmp_path) == str(folder)


def test_an_unknown_name_is_left_for_the_hub(tmp_path):
    assert resolve_model_path("Qwen/Qwen3-0.6B", tmp_path) == "Qwen/Qwen3-0.6B"


def test_a_path_that_is_not_there_is_refused_at_once(tmp_path):
    with pytest.raises(UnknownModel, match="no such file or folder"):
        resolve_model_path(str(tmp_path / "nothing"), tmp_path)
    with pytest.raises(UnknownModel, match="no such file or folder"):
        resolve_model_path("nothing.gguf", tmp_path)
    with pytest.raises(UnknownModel, match=r"no config\.json"):
        resolve_model_path(str(tmp_path), tmp_path)


def test_a_model_that_is_nowhere_says_what_was_tried_and_what_to_do():
    # Without a network the hub cannot be reached; with one it answers that there is no such repository.
    with pytest.raises(UnknownModel, match="Hugging Face hub") as raised:
        load(Path("lorry-tests/there-is-no-such-model"))
    assert "lorry models fetch lorry-tests/there-is-no-such-model" in str(raised.value)


# --- safetensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_qwen3])
def test_a_loaded_model_is_frozen_and_knows_its_limits(tmp_path, make):
    base = load(make(tmp_path, vocab_size=640))

    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.context_length == CONTEXT_LENGTH
    assert base.vocab_size == 640 > len(base.tokenizer)
    assert base.eos_token_ids == (base.tokenizer.eos_token_id,)
    assert base.model.config._attn_implementation == "sdpa"


def test_dtype_is_the_one_asked_for(tmp_path):
    base = load(make_tiny_llama(tmp_path), torch.bfloat16)
    assert {parameter.dtype for parameter in base.model.parameters()} == {torch.bfloat16}


def test_all_ids_that_end_a_text_are_known(tmp_path):
    make_tiny_llama(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [0, 2]}))
    assert load(tmp_path).eos_token_ids == (0, 2)


def test_missing_weights_are_an_error_and_not_random_numbers(tmp_path):
    make_tiny_llama(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        load(tmp_path)


def test_a_folder_without_weights_is_an_error_that_names_it(tmp_path):
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=str(tmp_path)):
        load(tmp_path)


# --- GGUF ---------------------------------------------------------------------------------------------


def write_gguf(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """The tiny Llama of `folder` as a GGUF file, its down projections in Q8_0. Returns what those unpack to."""
    base = load(folder)
    config, tokenizer = base.config, base.tokenizer
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special = set(tokenizer.all_special_ids) | {1}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)

    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {name: tensor.numpy() for name, tensor in base.model.state_dict().items()}
    unpacked: dict[str, torch.Tensor] = {}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            source = f"model.layers.{layer}.{ours}.weight"
            weight, name = weights[source], f"blk.{layer}.{theirs}.weight"
            if theirs in heads:
                # llama.cpp pairs neighbouring rows for its rotary embedding; transformers pairs the two halves.
                rows, columns = weight.shape
                weight = weight.reshape(heads[theirs], 2, -1, columns).swapaxes(1, 2).reshape(rows, columns)
            if theirs == "ffn_down":
                packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
                unpacked[source] = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
                writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unpacked


def test_gguf_weights_are_dequantized_to_the_same_model(tmp_path):
    folder = make_tiny_llama(tmp_path / "tiny")
    unpacked = write_gguf(folder, tmp_path / "tiny.gguf")
    expected = load(folder)
    expected.model.load_state_dict({**expected.model.state_dict(), **unpacked})

    base = load_base_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32, device="cpu")

    ids = torch.arange(40).reshape(2, 20)
    torch.testing.assert_close(base.model(ids).logits, expected.model(ids).logits, rtol=0, atol=1e-6)
    assert base.context_length == expected.context_length
    assert base.vocab_size == expected.vocab_size
    assert base.eos_token_ids == expected.eos_token_ids
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    # Nothing is left that says "quantized": the model can be saved.
    base.model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_the_tokenizer_of_a_gguf_splits_digits_as_its_model_did(tmp_path):
    folder = make_tiny_llama(tmp_path / "tiny")
    write_gguf(folder, tmp_path / "tiny.gguf")
    tokenizer = load_base_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32, device="cpu").tokenizer

    text = "a  1984 <|im_end|>\n\n 3.14 数字 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # Every digit alone, and the spaces before it not joined with it: GPT-2's split would give "Ġ1" or "Ġ", "Ġ".
    pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  1984")]
    assert pieces == ["a", "ĠĠ", "1", "9", "8", "4"]
    assert tokenizer.model_max_length == CONTEXT_LENGTH
