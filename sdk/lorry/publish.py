"""Publishing an adapter on the Hugging Face Hub. The token never leaves this process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lorry_jobs.errors import ServiceUnavailable, UserError
from lorry_jobs.tensors import LorryModel
from lorry_jobs.types import CheckpointMetadata

if TYPE_CHECKING:
    from .checkpoints import Checkpoints

FILES = ("adapter_model.safetensors", "adapter_config.json")


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
    import httpx
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
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
    try:
        api.whoami()
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(f"the hub at {api.endpoint} refuses this token; nothing was uploaded ({error})") from None
        raise ServiceUnavailable(f"the hub at {api.endpoint} failed; nothing was uploaded ({error})") from None
    except (httpx.HTTPError, OSError) as error:
        raise ServiceUnavailable(
            f"the hub at {api.endpoint} cannot be reached; nothing was uploaded ({error})"
        ) from None
    return api


def _upload(api: Any, found: CheckpointMetadata, folder: Path, hub_id: str, private: bool) -> PublishedCheckpoint:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(hub_id, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=hub_id, folder_path=folder, commit_message=f"Lorry checkpoint {found.name}, step {found.step}"
        )
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(f"the token may not write to {hub_id} on {api.endpoint}: {error}") from None
        raise ServiceUnavailable(f"the hub at {api.endpoint} failed while {hub_id} was uploaded: {error}") from None
    except (httpx.HTTPError, OSError) as error:
        raise ServiceUnavailable(f"the hub at {api.endpoint} went away while {hub_id} was uploaded: {error}") from None
    return PublishedCheckpoint(path=found.path, hub_id=hub_id, url=f"{api.endpoint}/{hub_id}", commit=done.oid)


def model_card(found: CheckpointMetadata, hub_id: str) -> str:
    """What people read on the adapter's page."""
    return f"""---
base_model: {found.base_model}
library_name: peft
tags:
- lora
- lorry
---

# {hub_id.rpartition("/")[2]}

A LoRA adapter of [{found.base_model}](https://huggingface.co/{found.base_model}), trained with Lorry.

| | |
|---|---|
| base model | `{found.base_model}` |
| rank | {found.lora_rank} |
| optimizer steps | {found.step} |
| saved | {found.created:%Y-%m-%d %H:%M} UTC, as `{found.name}` |

## How to load it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{found.base_model}")
model = PeftModel.from_pretrained(base, "{hub_id}")
tokenizer = AutoTokenizer.from_pretrained("{found.base_model}")
```
"""
