"""examples/resume.py, killed twice: its losses are those of a run that was left alone, to the last digit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import lorry
from lorry.stack import Stack
from tests.examples.run_example import command, environment, run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 16
OPTIONS = ("--steps", str(STEPS), "--save-every", "4")


def test_killed_twice_equals_undisturbed(smollm2_stack: Stack, tmp_path: Path) -> None:
    first = _killed_after_step(6, smollm2_stack, tmp_path)
    assert first.startswith("A new run.\n")

    second = _killed_after_step(11, smollm2_stack, tmp_path)
    # From a checkpoint whose losses are all in the log: that of step 4, or, at 8 logged steps, of step 8.
    assert _went_on_after(second) in (4, 8)

    third = run_example("resume.py", "--run", "killed", *OPTIONS, stack=smollm2_stack, folder=tmp_path)
    assert _went_on_after(third) in (8, 12)
    assert f"All {STEPS} steps are done." in third

    undisturbed = run_example("resume.py", "--run", "undisturbed", *OPTIONS, stack=smollm2_stack, folder=tmp_path)
    assert undisturbed.startswith("A new run.\n")
    losses = _losses(tmp_path, "killed")
    assert len(losses) == STEPS
    assert losses == _losses(tmp_path, "undisturbed")
    assert float(losses[-1]) < float(losses[0]) - 0.5

    # A run that is done stays done, and of its checkpoints the last is left; of each start at most one copy of it.
    again = run_example("resume.py", "--run", "killed", *OPTIONS, stack=smollm2_stack, folder=tmp_path)
    assert _went_on_after(again) == STEPS
    assert losses == _losses(tmp_path, "killed")
    kept = lorry.ServiceClient(base_url=smollm2_stack.url).list_checkpoints(kind="weights")
    assert {found.step for found in kept if found.user_metadata == {"run": "killed"}} == {STEPS}


def _killed_after_step(last: int, stack: Stack, folder: Path) -> str:
    """Run it until it has printed the loss of step `last`, then SIGKILL. -> what it printed"""
    running = subprocess.Popen(
        command("resume.py", "--run", "killed", *OPTIONS),
        env=environment(stack, folder),
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    output = ""
    try:
        assert running.stdout is not None
        for line in running.stdout:
            output += line
            if line.startswith(f"step {last:3d} "):
                break
        assert line.startswith(f"step {last:3d} "), output
    finally:
        running.kill()
        running.wait()
    return output


def _went_on_after(output: str) -> int:
    ((step, path),) = re.findall(r"^Going on after step (\d+), from (\S+)$", output, re.MULTILINE)
    assert path.endswith(f"/weights/step-{step}")
    return int(step)


def _losses(folder: Path, run: str) -> list[str]:
    rows = [row.split(",") for row in (folder / "resume-output" / f"{run}.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(1, len(rows) + 1))
    return [loss for _, loss in rows]
