"""The script for GPUs, run on a CPU with a tiny model: a GPU must not be the first to run its code."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import gpu


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    return gpu.main()


def test_all_of_it_runs_on_a_tiny_model(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "--tiny", "--device", "cpu", "--json", str(tmp_path / "gpu.json")) == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    for case in ("one", "eight", "eight_short"):
        assert figures[f"tiny_{case}_tokens_s"] > 0
        assert figures[f"tiny_{case}_ratio"] > 0
    assert "matrix_tflops" in figures


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--device", "cuda"), 2)])
def test_without_a_cuda_device_it_says_so(monkeypatch, capsys, options, status):
    assert run(monkeypatch, *options) == status
    said = capsys.readouterr()
    assert "No CUDA device here: nothing was measured" in said.err
    assert not said.out
