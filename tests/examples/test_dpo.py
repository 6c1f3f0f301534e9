"""examples/dpo.py: its loss is the paper's, and the preference is learned, on pairs that it did not train on too."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path

import pytest
import torch

import lorry
from lorry.stack import Stack
from tests.examples.run_example import EXAMPLES, run_example


def test_the_loss_is_the_papers() -> None:
    example = runpy.run_path(str(EXAMPLES / "dpo.py"))

    def datum(weights: list[float]) -> lorry.Datum:
        tokens = lorry.ModelInput.from_ints([1] * len(weights))
        return lorry.Datum(tokens, {"target_tokens": [1] * len(weights), "weights": weights})

    pairs = [
        example["Pair"](datum([0, 1, 1]), datum([0, 1]), (-4.0, -2.5)),
        example["Pair"](datum([1, 1]), datum([0, 0, 1]), (-1.0, -3.0)),
    ]
    logprobs = [torch.tensor(row) for row in ([-9.0, -1.0, -2.0], [-9.0, -3.0], [-0.5, -1.0], [-9.0, -9.0, -0.25])]
    # (policy - reference of the chosen) - (policy - reference of the rejected), sums over the answers' tokens
    margins = [0.1 * ((-3.0 + 4.0) - (-3.0 + 2.5)), 0.1 * ((-1.5 + 1.0) - (-0.25 + 3.0))]
    dpo = sum(math.log(1 + math.exp(-margin)) for margin in margins) / 2
    nll = (3.0 / 2 + 1.5 / 2) / 2

    loss, metrics = example["dpo_loss"](pairs, beta=0.1, nll=0.5)(_data(pairs), logprobs)
    assert loss.item() == pytest.approx(dpo + 0.5 * nll)
    assert metrics == pytest.approx({"dpo": dpo, "accuracy": 0.5, "margin": sum(margins) / 2})
    assert example["judge"]([(-3.0, -3.0), (-1.5, -0.25)], pairs, 0.1) == pytest.approx((0.5, sum(margins) / 2, 0.0))


def _data(pairs: list[object]) -> list[lorry.Datum]:
    return [datum for pair in pairs for datum in (pair.chosen, pair.rejected)]  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_preference_is_learned(smollm2_stack: Stack, tmp_path: Path) -> None:
    output = run_example("dpo.py", "--steps", "12", stack=smollm2_stack, folder=tmp_path, timeout=800)

    rows = [tuple(map(float, row.split())) for row in re.findall(r"^ +(\d+ +[\d.]+ +\S+ +\S+ +\S+)$", output, re.M)]
    steps, _, dpo, accuracy, margin = zip(*rows, strict=True)
    assert steps == tuple(range(1, 13))
    assert dpo[0] == pytest.approx(math.log(2), abs=1e-3)  # nothing learned yet: the policy is the reference
    assert margin[0] == pytest.approx(0, abs=1e-3)
    assert dpo[-1] < 0.6
    assert min(accuracy[-4:]) > 0.7
    assert margin[-1] > 0.2

    held_out = re.findall(r"^ 6 held-out pairs +\S+ -> (\S+) +0.000 -> (\S+) +\S+ -> \S+$", output, re.M)
    ((right, apart),) = held_out
    assert float(right) > 0.8
    assert float(apart) > 0.1

    before, after = re.findall(r"^Answers \w+:\n(.*?)\n\n", output, re.M | re.S)
    assert before != after
    assert (tmp_path / "dpo-output" / "dpo.png").read_bytes().startswith(b"\x89PNG")
