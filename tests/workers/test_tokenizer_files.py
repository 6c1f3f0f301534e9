"""A tokenizer's way from the worker to a client that has no hub and no torch."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile

import pytest

from lorry.tokenizers import MAX_UNPACKED_BYTES, load_tokenizer, unpack_tokenizer
from lorry_jobs.errors import ServiceError
from lorry_workers.base_model import load_base_model
from lorry_workers.tokenizer_files import pack_tokenizer
from tests.tiny_models import make_tiny_llama

TEXT = "Two  lorries, 12 crates:\n\n\tnaïve 数字 🙂"
MESSAGES = [{"role": "user", "content": "How far?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base_model(str(make_tiny_llama(tmp_path_factory.mktemp("tiny"))), dtype="auto", device="cpu")


@pytest.fixture(scope="module")
def archive(base) -> bytes:
    return pack_tokenizer(base.tokenizer, base.config)


def zip_of(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return buffer.getvalue()


def test_packing_twice_gives_the_same_bytes(base, archive):
    assert pack_tokenizer(base.tokenizer, base.config) == archive
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(opened.namelist())


def test_the_unpacked_tokenizer_is_the_same_tokenizer(base, archive, tmp_path):
    unpacked = load_tokenizer(unpack_tokenizer(archive, tmp_path))
    for special in (True, False):
        ids = base.tokenizer.encode(TEXT, add_special_tokens=special)
        assert unpacked.encode(TEXT, add_special_tokens=special) == ids
        assert unpacked.decode(ids) == TEXT
    assert unpacked.eos_token_id == base.tokenizer.eos_token_id
    assert unpacked.apply_chat_template(MESSAGES, tokenize=False) == base.tokenizer.apply_chat_template(
        MESSAGES, tokenize=False
    )


def test_an_archive_is_unpacked_once(archive, tmp_path):
    folder = unpack_tokenizer(archive, tmp_path)
    (folder / "mark").touch()
    assert unpack_tokenizer(archive, tmp_path) == folder
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_another_archive_gets_another_folder(archive, tmp_path):
    assert unpack_tokenizer(archive, tmp_path) != unpack_tokenizer(zip_of(a=b"1"), tmp_path)


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "..\\evil", "C:\\evil"])
def test_a_name_that_leaves_the_folder_is_refused(name, tmp_path):
    with pytest.raises(ServiceError, match="unsafe file name"):
        unpack_tokenizer(zip_of(**{"tokenizer.json": b"{}", name: b"x"}), tmp_path / "cache")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_archive_is_refused_and_leaves_nothing(archive, tmp_path):
    for damaged in (archive[:-100], b"not a zip", archive[:200] + b"\0" * 50 + archive[250:]):
        with pytest.raises(ServiceError, match="damaged"):
            unpack_tokenizer(damaged, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path):
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as opened, opened.open("zeros", "w") as entry:
        for _ in range(MAX_UNPACKED_BYTES // (16 * 1024 * 1024) + 1):
            entry.write(bytes(16 * 1024 * 1024))
    with pytest.raises(ServiceError, match="more than"):
        unpack_tokenizer(bomb.getvalue(), tmp_path)


CLIENT = """
import json, sys
from pathlib import Path

sys.modules["torch"] = None  # any `import torch` now raises ModuleNotFoundError
from lorry.tokenizers import load_tokenizer, unpack_tokenizer

assert "transformers" not in sys.modules
archive, cache, text = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), sys.argv[3]
tokenizer = load_tokenizer(unpack_tokenizer(archive, cache))
chat = tokenizer.apply_chat_template([{"role": "user", "content": "How far?"}], add_generation_prompt=True)
print(json.dumps({
    "plain": tokenizer.encode(text, add_special_tokens=False),
    "special": tokenizer.encode(text, add_special_tokens=True),
    "decoded": tokenizer.decode(tokenizer.encode(text)),
    "chat": chat["input_ids"],
}))
"""


def test_a_client_without_torch_loads_and_uses_the_tokenizer(base, archive, tmp_path):
    packed = tmp_path / "tokenizer.zip"
    packed.write_bytes(archive)
    finished = subprocess.run(
        [sys.executable, "-c", CLIENT, str(packed), str(tmp_path / "cache"), TEXT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr

    found = json.loads(finished.stdout)
    assert found["plain"] == base.tokenizer.encode(TEXT, add_special_tokens=False)
    assert found["special"] == base.tokenizer.encode(TEXT, add_special_tokens=True)
    assert found["decoded"] == TEXT
    assert found["chat"] == base.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
