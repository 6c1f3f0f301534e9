"""`examples/lr_sweep.py`: on SmolLM2 as its reader runs it, and quickly on a tiny model under the same name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lorry
from lorry.stack import Stack
from tests.conftest import StackMaker
from tests.examples.run_example import run_example

PNG = b"\x89PNG\r\n\x1a\n"


def test_a_sweep_on_a_tiny_model_outlives_a_rate_that_diverges(
    make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path
) -> None:
    stack = make_stack(models=[f"smollm2={tiny_qwen3}"])
    options = ("--steps", "6", "--learning-rates", "1e-4", "1e-2", "1e30")
    text = run_example("lr_sweep.py", *options, stack=stack, folder=tmp_path, timeout=150)
    table = check(text, tmp_path, stack)
    assert [row[-1] for row in table] == ["", "best", "failed"]
    assert "Learning rate 1e+30: " in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_sweep_on_smollm2(smollm2_stack: Stack, tmp_path: Path) -> None:
    options = ("--steps", "4", "--batch-size", "4", "--learning-rates", "1e-5", "1e-3")
    text = run_example("lr_sweep.py", *options, stack=smollm2_stack, folder=tmp_path, timeout=900)
    slow, fast = check(text, tmp_path, smollm2_stack)
    assert [slow[-1], fast[-1]] == ["", "best"]
    assert float(fast[4]) < float(slow[4]) - 0.1


def check(text: str, folder: Path, stack: Stack) -> list[list[str]]:
    """The rows of the table: rate, first and last loss, held-out loss before and after, a note."""
    table = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")
    ]
    # Each run began with the same adapter and the same data, and the others did not touch it.
    assert len({row[1] for row in table}) == len({row[3] for row in table}) == 1
    for *_, before, after, note in table:
        if note != "failed":
            assert float(after) < float(before)
    assert (folder / "sweep-output" / "lr_sweep.png").read_bytes().startswith(PNG)
    (path,) = re.findall(r"^Best adapter +(lorry://\S+)$", text, re.MULTILINE)
    service = lorry.ServiceClient(base_url=stack.url)
    best = next(place for place, row in enumerate(table) if row[-1] == "best")
    assert path.split("/")[2].endswith(f":train:{best}")
    assert service.create_sampling_client(model_path=path).path == path
    return table
