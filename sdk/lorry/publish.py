"""Publishing an adapter on the Hugging Face Hub. The token never leaves this process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorry_jobs.errors import LorryError, ServiceUnavailable, UserError
from lorry_jobs.tensors import LorryModel
from lorry_jobs.types import CheckpointMetadata

if TYPE_CHECKING:
    from .checkpoints import Checkpoints

FILES = ("adapter_model.safetensors", "adapter_config.json")
ID_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
HUB_IDS = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Base models that Lorry knows by a name of its own."""


class PublishedCheckpoint(LorryModel):
    """Where it is now. `commit`: the revision on the hub."""

    path: str
    hub_id: str
    url: str
    commit: str


def publish(
    checkpoints: Checkpoints, name: str, hub_id: str, *, private: bool, token: str | None
) -> PublishedCheckpoint:
    """Upload the adapter of a checkpoint and a model card. Everything that can be wrong is looked at first."""
    found = checkpoints.find(name, ("sampler_weights", "weights"))
    api = _hub(hub_id, token)
    with tempfile.TemporaryDirectory(prefix="lorry-publish-") as room:
        folder = Path(room)
        checkpoints.fetch_files(found, folder, only=FILES)
        (folder / "README.md").write_text(model_card(found, hub_id))
        return _upload(api, found, folder, hub_id, private)


def _hub(hub_id: str, token: str | None) -> Any:
    """The hub's client, once it is known that the name is one, and that the token is good."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(hub_id)
    except HFValidationError as error:
        raise UserError(f"{hub_id!r} cannot be a repository on the hub: {error}") from None
    if "/" not in hub_id:
        raise UserError(f"{hub_id!r} names no owner: give 'user/repository'")
    token = token or get_token()
    if not token:
        raise UserError(
            "publishing needs a Hugging Face token with write access: set HF_TOKEN, or run `hf auth login`. "
            "Nothing was uploaded"
        )
    api = HfApi(token=token)
    with _explained(
        refused=f"the hub at {api.endpoint} refuses this token; nothing was uploaded",
        failed=f"the hub at {api.endpoint} cannot be reached, or failed; nothing was uploaded",
    ):
        api.whoami()
    return api


def _upload(api: Any, found: CheckpointMetadata, folder: Path, hub_id: str, private: bool) -> PublishedCheckpoint:
    with _explained(
        refused=f"the token may not write to {hub_id} on {api.endpoint}; nothing was changed there",
        failed=f"the upload to {hub_id} on {api.endpoint} failed; what is there now is all of it, or what was there "
        "before. Publish again",
    ):
        # None, not False: then an organization's own default counts.
        api.create_repo(hub_id, private=private or None, exist_ok=True)
        if private and not api.repo_info(hub_id).private:
            raise UserError(
                f"{hub_id} exists and is public, but the upload is to be private; nothing was uploaded. "
                "Make it private on the hub first, or choose another name"
            )
        done = api.upload_folder(
            repo_id=hub_id, folder_path=folder, commit_message=f"Lorry checkpoint {found.name}, step {found.step}"
        )
    return PublishedCheckpoint(path=found.path, hub_id=hub_id, url=f"{api.endpoint}/{hub_id}", commit=done.oid)


@contextmanager
def _explained(*, refused: str, failed: str) -> Iterator[None]:
    """Turn whatever the hub's client raises into an error of ours that begins with one of these texts."""
    # HTTPError comes from there because its module, httpx or httpx2, depends on the client's version.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except LorryError:
        raise
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(f"{refused} ({error})") from None
        raise ServiceUnavailable(f"{failed} ({error})") from None
    # RuntimeError: hf_xet, and one large file of several. ValueError: answers that are not the hub's.
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        reason = f"{error}" + (f" {error.__cause__}" if error.__cause__ else "")
        raise ServiceUnavailable(f"{failed} ({reason})") from None


def model_card(found: CheckpointMetadata, hub_id: str) -> str:
    """What people read on the adapter's page. The hub refuses a `base_model` in its head that cannot be an id there."""
    known = HUB_IDS.get(found.base_model, found.base_model)
    on_hub = ID_ON_HUB.fullmatch(known) is not None
    base = known if on_hub else "path/to/the/base/model"
    head = f"base_model: {known}\n" if on_hub else ""
    linked = f"[{known}](https://huggingface.co/{known})" if on_hub else f"the base model `{found.base_model}`"
    return f"""---
{head}library_name: peft
tags:
- lora
- lorry
---

# {hub_id.rpartition("/")[2]}

A LoRA adapter of {linked}, trained with Lorry.

| | |
|---|---|
| base model | `{known}` |
| rank | {found.lora_rank} |
| optimizer steps | {found.step} |
| saved | {found.created:%Y-%m-%d %H:%M} UTC, as `{found.name}` |

## How to load it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{hub_id}")
tokenizer = AutoTokenizer.from_pretrained("{base}")
```
"""
