"""examples/concepts/async_patterns.py: every pattern does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lorry.stack import Stack
from tests.examples.run_example import run_example, sections

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_pattern(smollm2_stack: Stack, tmp_path: Path) -> None:
    output = sections(run_example("concepts/async_patterns.py", stack=smollm2_stack, folder=tmp_path))

    table = re.findall(r"^(\w+) +(\d+) +[\d.]+ +([\d.]+)$", output["Naive, overlapped, pipelined"], re.MULTILINE)
    cycles = {name: int(count) for name, count, _ in table}
    assert list(cycles) == ["one_after_the_other", "submit_then_await", "look_ahead"]
    assert cycles["one_after_the_other"] == 24  # two for each update
    assert cycles["submit_then_await"] <= 24
    assert cycles["look_ahead"] < 20
    assert len({loss for *_, loss in table}) == 1  # and the same steps

    gathered = output["Gather: four batches, one step"]
    (losses,) = re.findall(r"^losses (.*)$", gathered, re.MULTILINE)
    assert len(losses.split()) == 4
    assert re.search(r"^one step, gradient norm [1-9]", gathered, re.MULTILINE)

    reported = [float(loss) for loss in re.findall(r"update \d: loss (\S+)", output["Report while training"])]
    (mean,) = re.findall(r"mean of 4 losses (\S+)", output["Report while training"])
    assert float(mean) == pytest.approx(sum(reported) / 4, abs=2e-4)
    assert "the same object three times: True" in output["Await a future twice"]

    waited = output["Give up waiting"]
    assert re.search(r"^no result after 1 ms\nwaited again: loss \d", waited, re.MULTILINE)
    assert re.search(r"^WaitTimeout: no result after 0.001 s: .+The op goes on", waited, re.MULTILINE)

    failed = output["Survive a failure"]
    assert "at the call:  Datum: target_tokens has shape (3,)" in failed
    assert "one failed:   unknown loss_fn 'cross_entorpy'" in failed
    assert "so no step:   the forward_backward with seq" in failed
    fine, after = re.findall(r"(?:one is fine|and goes on): +loss (\S+)", failed)
    assert fine == after  # nothing of the failed accumulation was applied
