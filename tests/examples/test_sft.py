"""`examples/sft.py`: on SmolLM2 as its reader runs it, and quickly on a tiny model under the same name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lorry
from lorry.stack import Stack
from tests.conftest import StackMaker
from tests.examples.run_example import EXAMPLES, run_example


def test_sft_on_a_tiny_model(make_stack: StackMaker, tiny_qwen3: Path, tmp_path: Path) -> None:
    stack = make_stack(models=[f"smollm2={tiny_qwen3}"])
    options = ("--steps", "12", "--learning-rate", "1e-2")
    text = run_example("sft.py", *options, stack=stack, folder=tmp_path, timeout=150)
    check(text, stack)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sft_teaches_smollm2_the_manner(smollm2_stack: Stack, tmp_path: Path) -> None:
    text = run_example("sft.py", "--steps", "12", stack=smollm2_stack, folder=tmp_path, timeout=900)
    check(text, smollm2_stack)
    before, after = (re.findall(rf"^Asked {when}: .*\n  (.*)$", text, re.MULTILINE)[0] for when in ("before", "after"))
    assert "Roger" not in before
    assert after.startswith("Roger. ")


def check(text: str, stack: Stack) -> None:
    rows = (EXAMPLES / "data" / "radio.jsonl").read_text().count("\n")
    assert f"radio.jsonl: {rows} rows, {rows} datums" in text
    for name, words in (("Training", "at first, (.*) at last"), ("Held-out", "before, (.*) after")):
        ((first, last),) = re.findall(rf"^{name} loss (\S+) {words}$", text, re.MULTILINE)
        assert float(last) < float(first) - 0.5
    (path,) = re.findall(r"^Checkpoint +(lorry://\S+)$", text, re.MULTILINE)
    service = lorry.ServiceClient(base_url=stack.url)
    assert service.get_checkpoint_metadata(path).step == 12
    assert service.create_sampling_client(model_path=path).path == path
