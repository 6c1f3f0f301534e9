"""What `import lorry` brings, and what it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lorry

ASYNC_NAMES = [
    (lorry.ServiceClient, "create_lora_training_client"),
    (lorry.ServiceClient, "create_sampling_client"),
    (lorry.ServiceClient, "create_training_client_from_state"),
    (lorry.ServiceClient, "create_training_client_from_state_with_optimizer"),
    (lorry.SamplingClient, "sample"),
    (lorry.SamplingClient, "compute_logprobs"),
    (lorry.TrainingClient, "forward"),
    (lorry.TrainingClient, "forward_backward"),
    (lorry.TrainingClient, "forward_backward_custom"),
    (lorry.TrainingClient, "optim_step"),
    (lorry.TrainingClient, "save_state"),
    (lorry.TrainingClient, "save_weights_for_sampler"),
    (lorry.TrainingClient, "create_sampling_client"),
    (lorry.TrainingClient, "save_weights_and_get_sampling_client"),
]


@pytest.mark.parametrize("module", ["lorry", "lorry_jobs", "lorry.cli"])
def test_heavy_packages_are_not_loaded(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'transformers', 'peft', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    assert [name for name in lorry.__all__ if not hasattr(lorry, name)] == []
    assert [name for name in lorry.types.__all__ if not hasattr(lorry.types, name)] == []
    assert lorry.APIFutureResult is lorry.APIFuture


@pytest.mark.parametrize(("client", "name"), ASYNC_NAMES)
def test_methods_come_in_both_forms(client: type, name: str) -> None:
    assert callable(getattr(client, name))
    assert callable(getattr(client, f"{name}_async"))
