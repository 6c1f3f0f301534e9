"""Publishing on a hub, through the real `huggingface_hub` and `hf_xet`, to a stand-in that speaks the hub's protocol.

Each call is a process of its own, as a user's: the hub's client reads HF_ENDPOINT when it is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

import lorry
from lorry.stack import Stack, StackSettings
from lorry.stack.programs import free_port
from lorry_jobs.checkpoint_paths import CheckpointPath
from tests.checkpoints.hub_stand_in import TOKEN, Hub, Repository
from tests.conftest import QWEN_SMALL

LOCAL_NAME = "tiny"
FILES = ("adapter_model.safetensors", "adapter_config.json")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Stack]:
    """One model under an id as hubs have them, and under a name that only this server knows."""
    settings = StackSettings(
        home=tmp_path_factory.mktemp("stack"),
        url=None,
        models=[f"{QWEN_SMALL}={tiny_qwen3}", f"{LOCAL_NAME}={tiny_qwen3}"],
        flower=False,
    )
    with Stack(settings, started_by="pytest") as running:
        yield running


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture(scope="module")
def sampler(own: Stack) -> lorry.SamplingClient:
    return trained(own, QWEN_SMALL)


def trained(own: Stack, model: str) -> lorry.SamplingClient:
    client = lorry.ServiceClient(base_url=own.url).create_lora_training_client(model, rank=4, seed=1)
    data = [lorry.Datum(lorry.ModelInput.from_ints([5, 6, 7, 8]), {"target_tokens": [6, 7, 8, 9]})]
    for _ in range(3):
        client.forward_backward(data)
        client.optim_step(lorry.AdamParams(learning_rate=2e-2))
    return client.save_weights_for_sampler(f"for-{model.rpartition('/')[2]}").result(60)


@dataclass
class User:
    """Someone with this environment."""

    stack: Stack
    home: Path
    env: dict[str, str]

    def runs(self, *argv: str, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, *argv],
            env={
                **inherited, "LORRY_URL": self.stack.url, "HF_HOME": str(self.home / "hf"), "COLUMNS": "300",
                "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",  # else it tries for minutes
                **self.env, **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )  # fmt: skip
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def publishes(self, sampler: lorry.SamplingClient, hub_id: str, *options: str, **env: str) -> str:
        """-> the address that `lorry checkpoints publish` prints"""
        return self.runs(*self._command(sampler, hub_id, options), **env).stdout.strip()

    def is_refused(self, sampler: lorry.SamplingClient, hub_id: str, *options: str, **env: str) -> str:
        """-> the error"""
        return self.runs(*self._command(sampler, hub_id, options), ok=False, **env).stderr

    def _command(self, sampler: lorry.SamplingClient, hub_id: str, options: tuple[str, ...]) -> list[str]:
        return ["-m", "lorry", "checkpoints", "publish", str(sampler.path), hub_id, *options]


@pytest.fixture
def user(own: Stack, hub: Hub, tmp_path: Path) -> User:
    return User(own, tmp_path, {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN})


def folder_of(own: Stack, sampler: lorry.SamplingClient) -> Path:
    return (own.home / "store").joinpath(*CheckpointPath.parse(str(sampler.path)).folders)


FETCH = """
import shutil, sys, warnings
import peft, torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForCausalLM

base, saved, hub_id, target = sys.argv[1:]
for name in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
    shutil.copyfile(hf_hub_download(hub_id, name), f"{target}/{name}")
warnings.simplefilter("ignore")
for name, adapter in (("saved", saved), ("published", hub_id)):
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    with torch.no_grad():
        torch.save(model.eval()(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits, f"{target}/{name}.pt")
"""


@pytest.mark.parametrize("way", ["xet", "lfs"])
def test_the_adapter_arrives_byte_for_byte_and_loads_in_peft(
    own: Stack, hub: Hub, user: User, sampler: lorry.SamplingClient, tiny_qwen3: Path, tmp_path: Path, way: str
) -> None:
    user.env["HF_HUB_DISABLE_XET"] = "1" if way == "lfs" else "0"
    assert user.publishes(sampler, "user/adapter") == f"{hub.endpoint}/user/adapter"
    assert {"xet", "lfs"} & set(hub.steps) == {way}
    published = hub.repositories["user/adapter"]
    assert set(published.files) == {*FILES, "README.md"}
    assert not published.private
    assert published.commits == ["Lorry checkpoint for-Qwen3-0.6B, step 3"]

    source, target = folder_of(own, sampler), tmp_path / "fetched"
    target.mkdir()
    user.runs("-c", FETCH, str(tiny_qwen3), str(source), "user/adapter", str(target))
    for name in FILES:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert torch.equal(torch.load(target / "saved.pt"), torch.load(target / "published.pt"))
    card = (target / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {"base_model": QWEN_SMALL, "library_name": "peft", "tags": ["lora", "lorry"]}
    for line in ("| rank | 4 |", "| optimizer steps | 3 |", 'from_pretrained(base, "user/adapter")'):
        assert line in text


def test_a_base_model_that_only_this_server_knows(own: Stack, hub: Hub, user: User) -> None:
    """Its name is no id on the hub, which would refuse the card."""
    user.publishes(trained(own, LOCAL_NAME), "user/of-a-local-model")
    card = (hub.repositories["user/of-a-local-model"].files["README.md"].content or b"").decode()
    assert "base_model:" not in card
    assert f"`{LOCAL_NAME}`" in card
    assert f'from_pretrained("{LOCAL_NAME}")' not in card


def test_from_python_again_and_private(own: Stack, hub: Hub, user: User, sampler: lorry.SamplingClient) -> None:
    program = (
        "import json, lorry\n"
        f"service, name = lorry.ServiceClient(), {sampler.path!r}\n"
        "first = service.publish_checkpoint(name, 'user/own', private=True)\n"
        "again = service.publish_checkpoint(name, hub_id='user/own', private=True)\n"
        "async def third():\n"
        "    return await service.publish_checkpoint_async(name, 'user/own', private=True)\n"
        "import asyncio\n"
        "print(json.dumps([each.model_dump() for each in (first, again, asyncio.run(third()))]))\n"
    )
    first, again, third = json.loads(user.runs("-c", program).stdout)
    found = hub.repositories["user/own"]
    assert found.private
    assert first == again == third  # nothing has changed, so nothing was committed
    assert first == {
        "path": sampler.path, "hub_id": "user/own", "url": f"{hub.endpoint}/user/own", "commit": found.head,
    }  # fmt: skip
    assert len(found.commits) == 1


def test_a_repository_that_exists_gets_a_commit_and_keeps_its_other_files(
    hub: Hub, user: User, sampler: lorry.SamplingClient
) -> None:
    hub.repositories["user/there"] = Repository(private=True, commits=["before"])
    user.publishes(sampler, "user/there")
    assert len(hub.repositories["user/there"].commits) == 2
    assert hub.repositories["user/there"].private


def test_private_is_never_public(hub: Hub, user: User, sampler: lorry.SamplingClient) -> None:
    hub.repositories["user/public"] = Repository(private=False)
    error = user.is_refused(sampler, "user/public", "--private")
    assert "user/public exists and is public" in error
    assert "nothing was uploaded" in error
    assert hub.repositories["user/public"].files == {}
    assert "preupload" not in hub.steps


@pytest.mark.parametrize(
    ("token", "said"), [("hf_a-wrong-one", "refuses this token"), ("", "needs a Hugging Face token")]
)
def test_a_wrong_token_and_none(hub: Hub, user: User, sampler: lorry.SamplingClient, token: str, said: str) -> None:
    error = user.is_refused(sampler, "user/x", HF_TOKEN=token)
    assert said in error
    assert "othing was uploaded" in error
    assert hub.steps == (["whoami"] if token else [])
    assert hub.repositories == {}


def test_a_token_that_may_not_write_there(hub: Hub, user: User, sampler: lorry.SamplingClient) -> None:
    error = user.is_refused(sampler, "somebody-else/x")
    assert "may not write to somebody-else/x" in error
    assert hub.repositories == {}


@pytest.mark.parametrize("hub_id", ["no-owner", "a/b/c", "user/two words", "user/..", ""])
def test_what_is_no_repository(hub: Hub, user: User, sampler: lorry.SamplingClient, hub_id: str) -> None:
    assert repr(hub_id) in user.is_refused(sampler, hub_id)
    assert hub.steps == []


def test_no_network(user: User, sampler: lorry.SamplingClient) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    error = user.is_refused(sampler, "user/x", HF_ENDPOINT=nobody)
    assert f"the hub at {nobody} cannot be reached" in error
    assert "nothing was uploaded" in error
    assert "HF_HUB_OFFLINE" in user.is_refused(sampler, "user/x", HF_HUB_OFFLINE="1")


FAILURES = [
    ("whoami", 500, "cannot be reached, or failed; nothing was uploaded"),
    ("create", 500, "the upload to user/again on .* failed; .* Publish again"),
    ("preupload", 403, "may not write to user/again"),
    ("xet", 403, "the upload to user/again on .* failed; .* Publish again"),
    ("lfs", 403, r"the upload to user/again on .* failed; .* Publish again.*adapter_model\.safetensors.*403"),
    ("commit", 403, "may not write to user/again"),
]
# These the hub's client tries again for 23 s.
PATIENT = [
    ("preupload", 503, "failed; .* Publish again.*503"),
    ("xet", 500, "failed; .* Publish again"),
    ("lfs", 0, "failed; .* Publish again"),
    ("commit", 500, "failed; .* Publish again.*500"),
    ("commit", 0, "failed; .* Publish again"),
]


CASES = [
    pytest.param(way, *each, marks=pytest.mark.slow if each in PATIENT else ())
    for way, other in (("xet", "lfs"), ("lfs", "xet"))
    for each in [*FAILURES, *PATIENT]
    if each[0] != other
]


@pytest.mark.parametrize(("way", "step", "status", "said"), CASES)
def test_an_upload_that_fails_and_works_again(
    hub: Hub, user: User, sampler: lorry.SamplingClient, way: str, step: str, status: int, said: str
) -> None:
    user.env["HF_HUB_DISABLE_XET"] = "1" if way == "lfs" else "0"
    hub.refuse[step] = [status] * 50
    assert re.search(said, user.is_refused(sampler, "user/again"))
    assert all(not found.commits for found in hub.repositories.values())
    hub.refuse.clear()
    user.publishes(sampler, "user/again")
    assert set(hub.repositories["user/again"].files) == {*FILES, "README.md"}
