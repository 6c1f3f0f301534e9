"""`make demo`: on SmolLM2 as a newcomer runs it, and quickly on a tiny model under the same name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from lorry.stack import running_stack
from lorry_jobs.paths import models_dir
from tests.conftest import StackMaker

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
ANSWER = "trio is emotionmachine's AI Infra products."
PNG = b"\x89PNG\r\n\x1a\n"


def test_the_demo_trains_on_a_server_that_is_there(make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path) -> None:
    stack = make_stack(models=[f"smollm2={tiny_qwen3}"])
    done = _run(DEMO, tmp_path, {"LORRY_URL": stack.url, "LORRY_HOME": str(tmp_path)}, timeout=120)
    assert "Training on the server that LORRY_URL names." in done.stdout, done.stderr
    _check_output(done.stdout, tmp_path)
    # Fifteen steps do not teach a random model: the demo must say so, and not call it a success.
    assert done.returncode == (0 if ANSWER in _after(done.stdout) else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_on_smollm2_and_its_checkpoint_afterwards(tmp_path: Path) -> None:
    env = {"LORRY_HOME": str(tmp_path / "home"), "LORRY_MODELS_DIR": str(models_dir())}
    done = _run(DEMO, tmp_path, env, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    _check_output(done.stdout, tmp_path)
    assert _after(done.stdout) == ANSWER
    assert running_stack(tmp_path / "home") is None

    # Then what it says: bring the stack up again, and sample the checkpoint with the script that it wrote.
    up = re.findall(r"^  (\S+/lorry) up --model smollm2$", done.stdout, re.MULTILINE)
    script = re.findall(r"^  \S+/python (\S+/sample\.py)$", done.stdout, re.MULTILINE)
    assert len(up) == len(script) == 1
    with (tmp_path / "up.log").open("w") as log:
        stack = subprocess.Popen(
            [up[0], "up", "--model", "smollm2"], env=_environment(env), cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 180
        while (info := running_stack(tmp_path / "home")) is None:
            assert stack.poll() is None, (tmp_path / "up.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert info.flower is not None
        sampled = _run(Path(script[0]), tmp_path, env, timeout=120)
        assert sampled.stdout.strip() == ANSWER, sampled.stderr
        again = _run(DEMO, tmp_path, env, timeout=300)
        assert "Training on the stack that runs in" in again.stdout, again.stderr
        assert again.returncode == 0
        assert running_stack(tmp_path / "home") is not None
    finally:
        subprocess.run([up[0], "down"], env=_environment(env), check=True, timeout=120)
        stack.wait(timeout=60)


def _run(script: Path, folder: Path, env: Mapping[str, str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    if script == DEMO:
        command += ["--output", str(folder / "demo-output")]
    return subprocess.run(
        command, env=_environment(env), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
    )


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what would send the demo to another server or store."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LORRY_")} | dict(env)


def _check_output(text: str, folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"^step +\d+/15  loss (\S+)", text, re.MULTILINE)]
    assert len(losses) == 15
    assert losses[-1] < losses[0]
    assert "loss per token, by step" in text
    curve = (folder / "demo-output" / "loss.png").read_bytes()
    assert curve.startswith(PNG)
    assert len(curve) > 10_000


def _after(text: str) -> str:
    """The model's answer after training."""
    return re.findall(r"^  A  (.*)$", text, re.MULTILINE)[-1]
