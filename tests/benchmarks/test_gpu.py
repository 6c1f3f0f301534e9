"""The script for GPUs, run on a CPU with a tiny model: a GPU must not be the first to run its code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_all_of_it_runs_on_a_tiny_model(tmp_path):
    found = run("--tiny", "--device", "cpu", "--json", str(tmp_path / "gpu.json"))
    assert found.returncode == 0, found.stderr
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert json.loads(found.stdout.splitlines()[-1]) == figures
    for case in ("one", "eight", "eight_short"):
        assert figures[f"tiny_{case}_tokens_s"] > 0
        assert figures[f"tiny_{case}_ratio"] > 0
    assert "matrix_tflops" in figures


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--device", "cuda"), 2)])
def test_without_a_cuda_device_it_says_so(options, status):
    found = run(*options)
    assert found.returncode == status
    assert "No CUDA device here: nothing was measured" in found.stderr
    assert not found.stdout
