"""Programs in the manner of the cookbooks, quickstarts and skills that the dialects list names, run as they are."""

from __future__ import annotations

from pathlib import Path

from lorry.stack import Stack
from tests.seeds.test_seeds import losses, run

PROGRAMS = Path(__file__).parent / "programs"


def output_of(name: str, stack: Stack, tmp_path: Path) -> str:
    return run((PROGRAMS / name).read_text(), stack, tmp_path)


def test_quickstart(stack: Stack, tmp_path: Path) -> None:
    output = output_of("quickstart.py", stack, tmp_path)
    found = losses(output)
    assert len(found) == output.count("the same True") == 8
    assert found[-1] < found[0] - 1
    assert output.count("importance_sampling True") == output.count("ppo True") == 2
    assert "/weights/quickstart-rl" in output


def test_cookbook_async(stack: Stack, tmp_path: Path) -> None:
    assert output_of("cookbook_async.py", stack, tmp_path).splitlines() == [
        "learned True",
        "the same answer True",
        "resumed True",
    ]


def test_cookbook_custom_loss(stack: Stack, tmp_path: Path) -> None:
    assert output_of("cookbook_custom_loss.py", stack, tmp_path) == "the margin grew True\n"


def test_skill_async(stack: Stack, tmp_path: Path) -> None:
    output = output_of("skill_async.py", stack, tmp_path)
    assert output.count("outputs 12") == 2
    assert "base '" in output or 'base "' in output
    assert "tuned '" in output or 'tuned "' in output
    assert "step True" in output
