"""The README is true: its training loop runs as printed, its table of settings is whole, its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from lorry.settings import ClientSettings
from lorry.stack import StackSettings
from lorry_jobs.settings import QueueSettings
from lorry_workers.settings import WorkerSettings
from tests.conftest import StackMaker

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SETTINGS: tuple[type[BaseSettings], ...] = (QueueSettings, ClientSettings, WorkerSettings, StackSettings)
FOLDERS = ("docs", "jobs", "sdk", "workers", "tests", "benchmarks", "examples")
PAGES = [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def test_the_training_loop_runs_as_printed(make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path) -> None:
    (loop,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    stack = make_stack(models=[f"smollm2={tiny_qwen3}"])
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", loop],
        env={**os.environ, "LORRY_URL": stack.url, "LORRY_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert done.stdout.splitlines()[-1].endswith("/sampler_weights/first-try")


def test_every_setting_is_in_the_table_and_no_other() -> None:
    fields = {f"LORRY_{name.upper()}" for settings in SETTINGS for name in settings.model_fields}
    assert set(_table()) == fields


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_defaults_in_the_table_are_true(settings: type[BaseSettings]) -> None:
    table = _table()
    for name, field in settings.model_fields.items():
        default = field.default
        if default is None or default is PydanticUndefined:  # said in words
            continue
        said = table[f"LORRY_{name.upper()}"].split(",")[0]
        if said.endswith(" MiB"):
            said = str(int(said.removesuffix(" MiB")) * 2**20)
        shown = f"{default:g}" if type(default) is float else str(default)
        assert said.lower() == shown.lower(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def _table() -> dict[str, str]:
    """Variable -> what the table says its default is."""
    return dict(re.findall(r"^\| `(LORRY_\w+)` \| (.*?) \|", README, re.MULTILINE))
