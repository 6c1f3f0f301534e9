"""What a user does with checkpoints, from Python and from the command line, against a real stack."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lorry
from lorry.stack import Stack, StackSettings
from lorry_jobs.checkpoint_paths import folder_name

MODEL = "tiny"
TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Stack]:
    """A stack whose reaper comes round every second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORRY_REAP_SECONDS", "1")
        settings = StackSettings(
            home=tmp_path_factory.mktemp("stack"), url=None, models=[f"{MODEL}={tiny_qwen3}"], flower=False
        )
        with Stack(settings, started_by="pytest") as running:
            yield running


@pytest.fixture
def service(own: Stack) -> Iterator[lorry.ServiceClient]:
    with lorry.ServiceClient(base_url=own.url) as service:
        yield service


@pytest.fixture
def client(service: lorry.ServiceClient) -> lorry.TrainingClient:
    client = service.create_lora_training_client(MODEL, rank=4, seed=1, user_metadata={"who": "me"})
    step(client)
    return client


def step(client: lorry.TrainingClient) -> float:
    data = [lorry.Datum(lorry.ModelInput.from_ints(TOKENS[:-1]), {"target_tokens": TOKENS[1:]})]
    loss = client.forward_backward(data)
    client.optim_step(lorry.AdamParams(learning_rate=2e-2)).result(60)
    return loss.result(60).loss


def store_of(stack: Stack, client: lorry.TrainingClient) -> Path:
    return stack.home / "store" / folder_name(client.model_id)


def cli(stack: Stack, *argv: str, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lorry", "checkpoints", *argv, "--url", stack.url],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "COLUMNS": "300"},
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if ok else done.stderr


def test_list_and_delete(service: lorry.ServiceClient, client: lorry.TrainingClient, own: Stack) -> None:
    paths = [client.save_state(f"s{n}").result(60).path for n in range(3)]
    sampler = client.save_weights_for_sampler("s0").result(60)
    assert [found.path for found in client.list_checkpoints()] == [*paths, sampler.path]
    assert [found.path for found in client.list_checkpoints(kind="weights")] == paths
    assert {*paths, sampler.path} <= {found.path for found in service.list_checkpoints()}
    gone = client.delete_checkpoint(paths[1])
    assert gone.path == paths[1]
    assert sorted(os.listdir(store_of(own, client) / "weights")) == ["s0", "s2"]
    assert [found.path for found in asyncio.run(_awaited(client))] == [paths[0], paths[2], sampler.path]
    for call in (client.delete_checkpoint, client.get_checkpoint_metadata, service.create_sampling_client):
        with pytest.raises(lorry.CheckpointNotFound):
            call(paths[1])
    client.save_state("s1").result(60)  # the name is free


async def _awaited(client: lorry.TrainingClient) -> list[lorry.types.CheckpointMetadata]:
    return await client.list_checkpoints_async()


def test_pin_and_prune(client: lorry.TrainingClient) -> None:
    for n in range(5):
        client.save_state(f"s{n}").result(60)
        client.save_weights_for_sampler(f"w{n}").result(60)
    assert client.pin_checkpoint("s0").pinned
    with pytest.raises(lorry.UserError, match="pinned"):
        client.delete_checkpoint("s0")
    gone = client.prune_checkpoints(keep_last=2)
    assert {found.name for found in gone} == {"w0", "w1", "w2", "s1", "s2"}
    assert {found.name for found in client.list_checkpoints()} == {"s0", "s3", "s4", "w3", "w4"}
    client.unpin_checkpoint("s0")
    client.delete_checkpoint("s0")
    with pytest.raises(lorry.UserError, match="1 or more"):
        client.prune_checkpoints(keep_last=0)


def test_a_ttl_ends_and_its_files_go_but_not_under_a_running_evaluation(
    client: lorry.TrainingClient, own: Stack
) -> None:
    folder = store_of(own, client) / "sampler_weights"
    sampler = client.save_weights_for_sampler("brief", ttl_seconds=3).result(60)
    idle = client.save_weights_for_sampler("idle", ttl_seconds=3).result(60)
    prompt = lorry.ModelInput.from_ints(TOKENS)
    before = sampler.compute_logprobs(prompt).result(60)
    deadline = time.monotonic() + 20
    while (folder / "idle").exists():
        assert time.monotonic() < deadline
        assert sampler.compute_logprobs(prompt).result(60) == before  # it has expired, and is in use
        time.sleep(0.2)
    assert (folder / "brief").exists()
    with pytest.raises(lorry.CheckpointNotFound):
        idle.compute_logprobs(prompt).result(60)
    with pytest.raises(lorry.CheckpointNotFound):
        client.create_sampling_client("brief")


def test_download(client: lorry.TrainingClient, own: Stack, tmp_path: Path) -> None:
    client.save_state("whole").result(60)
    source = store_of(own, client) / "weights" / "whole"
    folder = client.download_checkpoint("whole", tmp_path / "folder")
    assert sorted(os.listdir(folder)) == sorted(os.listdir(source))
    for file in source.iterdir():
        if file.name != "manifest.json":
            assert (folder / file.name).read_bytes() == file.read_bytes()
    assert json.loads((folder / "manifest.json").read_text())["user_metadata"] == {"who": "me"}
    for name in ("a.tar", "b.tar.gz"):
        archive = client.download_checkpoint("whole", tmp_path / name)
        listed = subprocess.run(["tar", "-tf", archive], capture_output=True, text=True, check=True).stdout.split()
        stem = name.partition(".")[0]
        assert {f"{stem}/{file.name}" for file in source.iterdir()} <= set(listed)
        with tarfile.open(archive) as opened:
            weights = opened.extractfile(f"{stem}/adapter_model.safetensors").read()
        assert weights == (source / "adapter_model.safetensors").read_bytes()
    with pytest.raises(lorry.UserError, match="exists already"):
        client.download_checkpoint("whole", tmp_path / "folder")

    async def by_await() -> list[Path]:
        return [
            await client.download_checkpoint_async("whole", tmp_path / "c.tgz"),
            await client.export_checkpoint_async("whole", tmp_path / "adapter"),
        ]

    assert asyncio.run(by_await()) == [tmp_path / "c.tgz", tmp_path / "adapter"]
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "adapter", "b.tar.gz", "c.tgz", "folder"]


def test_a_damaged_file_is_not_handed_out(client: lorry.TrainingClient, own: Stack, tmp_path: Path) -> None:
    client.save_state("bad").result(60)
    file = store_of(own, client) / "weights" / "bad" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(lorry.ServiceError, match=r"adapter_model\.safetensors.*damaged"):
        client.download_checkpoint("bad", tmp_path / "bad")
    assert os.listdir(tmp_path) == []
    with pytest.raises(lorry.ServiceError, match=r"adapter_model\.safetensors is damaged"):
        client.load_state("bad").result(60)
    step(client)  # the job goes on


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits[0]


def test_exports_load_in_peft_and_in_transformers(
    client: lorry.TrainingClient, own: Stack, tiny_qwen3: Path, tmp_path: Path
) -> None:
    import peft

    for _ in range(3):
        step(client)
    sampler = client.save_weights_for_sampler("done").result(60)
    ours = sampler.compute_logprobs(lorry.ModelInput.from_ints(TOKENS)).result(60)[1:]

    adapter = client.export_checkpoint("done", tmp_path / "adapter")
    assert sorted(os.listdir(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    plain = logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with_peft = logits(peft.PeftModel.from_pretrained(base, adapter).eval())

    merged = client.export_checkpoint("done", tmp_path / "merged", merged=True)
    with_transformers = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval())
    torch.testing.assert_close(with_transformers, with_peft, atol=2e-5, rtol=1e-5)
    assert (with_peft - plain).abs().max() > 1e-3
    theirs = torch.log_softmax(with_peft[:-1], -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(theirs, torch.tensor(ours), atol=1e-4, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.encode("Hello world") == client.get_tokenizer().encode("Hello world")


def test_the_index_can_be_lost(service: lorry.ServiceClient, client: lorry.TrainingClient, own: Stack) -> None:
    path = client.save_state("kept").result(60).path
    client.set_checkpoint_ttl(path, 24)
    before = client.get_checkpoint_metadata(path)
    with redis.Redis.from_url(own.url) as raw:
        raw.delete("lorry:checkpoints")
    with pytest.raises(lorry.CheckpointNotFound):
        service.create_training_client_from_state(path)
    done = service.reindex_checkpoints()
    assert path in done.added
    assert client.get_checkpoint_metadata(path) == before
    service.create_training_client_from_state(path)


@pytest.mark.parametrize(
    "name",
    ["..", "../x", "a/b", "/etc/passwd", "x" * 300, ".hidden", "a\\b", "nul\0", "lorry://x/weights/y", "ü" * 100, ""],
)
def test_names_that_could_leave_the_store_are_refused_before_they_are_sent(
    client: lorry.TrainingClient, service: lorry.ServiceClient, name: str
) -> None:
    for call in (
        lambda: client.save_state(name),
        lambda: client.save_weights_for_sampler(name),
        lambda: client.load_state(f"lorry://{client.model_id}/weights/{name}"),
        lambda: service.create_sampling_client(f"tinker://{client.model_id}/sampler_weights/{name}"),
        lambda: service.create_training_client_from_state(f"mint://{name}/weights/x"),
        lambda: client.delete_checkpoint(f"lorry://{client.model_id}/weights/{name}"),
    ):
        with pytest.raises(lorry.UserError):
            call()


@pytest.mark.parametrize("name", ["two words", "ünïcode 日本 🚚", "a:b*c?[d]", "%2e%2e%2f", "x" * 150, "-rf", "~root"])
def test_odd_names_stay_in_the_store(
    client: lorry.TrainingClient, service: lorry.ServiceClient, own: Stack, name: str, tmp_path: Path
) -> None:
    outside = sorted(os.listdir(own.home))
    path = client.save_state(name).result(60).path
    (folder,) = (store_of(own, client) / "weights").iterdir()
    assert (folder / "manifest.json").is_file()
    assert sorted(os.listdir(own.home)) == outside
    assert client.get_checkpoint_metadata(name).path == path
    client.load_state(name).result(60)
    client.load_state_with_optimizer(path).result(60)
    assert len(list(client.download_checkpoint(name, tmp_path / "target").iterdir())) == 5
    client.delete_checkpoint(name)
    assert not folder.exists()


@pytest.mark.parametrize(
    "path",
    [
        "file:///etc/passwd",
        "http://host/x",
        "lorry://a",
        "lorry://a/other/b",
        "lorry://a/weights/b/c",
        "lorry://../x/y",
    ],
)
def test_scheme_tricks(client: lorry.TrainingClient, service: lorry.ServiceClient, path: str) -> None:
    for call in (client.load_state, service.create_sampling_client, service.create_training_client_from_state):
        with pytest.raises(lorry.UserError):
            call(path)


def test_the_command_line(client: lorry.TrainingClient, own: Stack, tmp_path: Path) -> None:
    state, sampler = client.save_state("cli").result(60).path, client.save_weights_for_sampler("cli").result(60).path
    listed = cli(own, "list", "--job", client.model_id)
    for text in (state, sampler, MODEL, "MiB", "for ever"):
        assert text in listed
    assert sampler not in cli(own, "list", "--kind", "weights")
    assert "sha256" in cli(own, "show", state)
    assert "two kinds" in cli(own, "show", "cli", ok=False)
    assert "expires at" in cli(own, "ttl", state, "--hours", "5")
    assert "4:59:" in cli(own, "list", "--job", client.model_id)
    assert "say when" in cli(own, "ttl", state, ok=False)
    assert "is pinned" in cli(own, "pin", state)
    assert "pinned" in cli(own, "delete", "--yes", state, ok=False)
    assert "time left: 4:59:" in cli(own, "unpin", state)
    assert "stays for ever" in cli(own, "ttl", state, "--never")
    assert cli(own, "download", state, str(tmp_path / "x.tar")).strip() == str(tmp_path / "x.tar")
    assert tarfile.is_tarfile(tmp_path / "x.tar")
    cli(own, "export", sampler, str(tmp_path / "merged"), "--merged")
    assert (tmp_path / "merged" / "config.json").is_file()
    assert "1 checkpoint" in cli(own, "delete", "--yes", state)
    assert "no checkpoint" in cli(own, "show", state, ok=False)
    client.save_weights_for_sampler("second").result(60)
    assert sampler in cli(own, "prune", client.model_id, "--keep-last", "1")
    assert "in the store" in cli(own, "reindex")
