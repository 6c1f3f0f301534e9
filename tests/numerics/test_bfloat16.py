"""A bfloat16 base trains as a float32 base does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorry_jobs.types import AdamParams
from lorry_workers.engine.engine import Batch
from tests.tiny_engine import create_job, make_engine, random_data

STEPS = 50
TOLERANCE = 0.01
"""Of each step's loss. bfloat16 keeps 8 bits of every weight and activation, an error of up to 2⁻⁹ = 0.2 % each, and
what a step of training makes of it goes into the next. Over nine runs of other seeds the largest was 0.3 %."""
MEAN_TOLERANCE = 0.001
"""Of the mean over all steps: rounding errors have no preferred sign. The largest of the nine was 0.05 %."""


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_fifty_steps_of_two_jobs_keep_the_losses_of_float32(tmp_path, family, tied):
    jobs = {"a": {"rank": 4, "seed": 1}, "b": {"rank": 16, "seed": 2, "train_unembed": False}}
    data = {
        job: [random_data([24, 9, 40, 16], 10 * n + i, weights="uniform") for i in range(5)]
        for n, job in enumerate(jobs)
    }
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = make_engine(tmp_path, family, tied, dtype=dtype)
        for job, lora in jobs.items():
            create_job(engine, job, **lora)
        found = []
        for step in range(STEPS):
            results = engine.run_batches([Batch(job, data[job][step % 5], "cross_entropy") for job in jobs])
            found.append([result.loss for result in results])
            for response in engine.optim_steps([(job, AdamParams(learning_rate=3e-3)) for job in jobs]):
                assert response.metrics["grad_norm"] > 0
        losses[dtype] = np.array(found)  # (steps, jobs)
    exact, rounded = losses[torch.float32], losses[torch.bfloat16]
    assert (exact[-5:].mean(0) < 0.8 * exact[:5].mean(0)).all()  # they have learned, so there is something to keep
    assert not np.array_equal(exact, rounded)
    np.testing.assert_allclose(rounded, exact, rtol=TOLERANCE)
    np.testing.assert_allclose(rounded.mean(0), exact.mean(0), rtol=MEAN_TOLERANCE)
