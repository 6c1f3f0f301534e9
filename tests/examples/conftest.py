"""One server with SmolLM2 for all examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lorry.stack import Stack, StackSettings
from lorry_jobs.paths import models_dir
from lorry_workers.fetch import fetch_model


@pytest.fixture(scope="session")
def smollm2_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = fetch_model("smollm2", models_dir()).folder
    settings = StackSettings(
        home=tmp_path_factory.mktemp("examples"), url=None, models=[f"smollm2={folder}"], flower=False
    )
    with Stack(settings, started_by="pytest") as running:
        yield running
