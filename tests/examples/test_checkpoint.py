"""examples/advanced/checkpoint.py: it resumes exactly, its samplers are frozen, and it cleans up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lorry.stack import Stack
from tests.examples.run_example import run_example, sections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_from_the_first_save_to_the_last_delete(
    smollm2_stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    text = run_example("advanced/checkpoint.py", "--hub-id", "user/repo", stack=smollm2_stack, folder=tmp_path)
    output = sections(text)

    losses = re.findall(r"^step \d  loss (\S+)$", output["Train and save"], re.MULTILINE)
    assert len(losses) == 10
    assert float(losses[-1]) < float(losses[0]) - 1

    resumed = output["Resume from step 5: losses of steps 6 to 9"]
    ways = {name: values.split() for name, values in re.findall(r"^(\D+?)  +(\d.*)$", resumed, re.MULTILINE)}
    assert ways["with its optimizer"] == ways["the same run"] == losses[6:]
    assert ways["with a new optimizer"][0] == losses[6]  # the same weights
    assert ways["with a new optimizer"][1:] != losses[7:]  # and other steps from there

    sampled = re.findall(r"^(\S+) +loss per token (\S+)  (\S+)$", output["Sample from checkpoints"], re.MULTILINE)
    (old, early, old_path), (new, late, _) = sampled
    assert (old, new) == ("checkpoint-step-0", "checkpoint-final")
    assert float(late) < float(early) - 1
    assert re.fullmatch(r"lorry://\S+/sampler_weights/checkpoint-step-0", old_path)

    kept = output["Look after checkpoints"]
    sizes = {name: float(size) for name, size in re.findall(r"weights +(\S+) +step +\d+ +(\S+) MB", kept)}
    assert set(sizes) == {*(f"{kind}-step-{step}" for kind in ("checkpoint", "state") for step in (0, 5)),
                          "checkpoint-final"}  # fmt: skip
    assert sizes["state-step-5"] > 2 * sizes["checkpoint-step-5"]
    assert "state-step-0 exists already" in kept
    assert "deleted: there is no checkpoint" in kept

    assert "exported: adapter_config.json, adapter_model.safetensors" in output["Take files away"]
    assert "downloaded: state-step-5.tar.gz" in output["Take files away"]
    assert "not published" in output["Publish"]
    assert text.endswith("0 checkpoints are left of this run.\n")
