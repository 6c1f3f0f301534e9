"""examples/rl.py: the reward rises, on questions that it did not train on too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lorry.stack import Stack
from tests.examples.run_example import run_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_reward_rises(smollm2_stack: Stack, tmp_path: Path) -> None:
    output = run_example("rl.py", "--steps", "8", stack=smollm2_stack, folder=tmp_path, timeout=800)

    rows = re.findall(r"^ +(\d+) +([\d.]+) +(\d) of 8 +(\d+) +(\S+) +[\d.]+$", output, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == list(range(1, 9))
    rewards = [float(reward) for _, reward, *_ in rows]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.6
    assert sum(int(mixed) for _, _, mixed, *_ in rows) > 16
    # Every step is on the policy that sampled: sampler and trainer agree on each token.
    assert max(float(drift) for *_, drift in rows) < 1e-3

    (after, before) = map(float, re.findall(r"held-out questions after: (\S+) \(before: (\S+)\)", output)[0])
    assert before < 0.3
    assert after > before + 0.3
    assert re.search(r"^The policy: lorry://\S+/sampler_weights/step-8$", output, re.MULTILINE)
    assert (tmp_path / "rl-output" / "reward.png").read_bytes().startswith(b"\x89PNG")
