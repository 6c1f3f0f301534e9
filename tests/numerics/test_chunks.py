"""How a batch is cut up, by the caller or by the engine, does not change the gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lorry_jobs.types import Datum
from tests.tiny_engine import create_job, make_engine, random_data, randomize

JOB = "a1:train:0"
LENGTHS = [31, 8, 8, 64, 3, 1, 17, 40]
TOLERANCE = 1e-6
"""|gradient - gradient of the whole batch at once| over |gradient|. Gradients are summed up in float32."""


def make_data(store: Path) -> list[Datum]:
    """Sampling log-probabilities near the adapter's own, so that ratios lie on both sides of the thresholds."""
    data = random_data(LENGTHS, weights="uniform", logprobs="normal", advantages="normal")
    engine = make_engine(store)
    create_job(engine)
    randomize(engine)
    near = []
    for datum, output in zip(data, engine.forward(JOB, data, "cross_entropy").loss_fn_outputs, strict=True):
        inputs = {name: tensor.array for name, tensor in datum.loss_fn_inputs.items()}
        inputs["logprobs"] = output["logprobs"].array + 0.3 * inputs["logprobs"]
        near.append(Datum(datum.model_input, inputs))
    return near


def gradient(store: Path, parts: list[list[Datum]], dtype: torch.dtype, loss_fn: str, **options: int) -> torch.Tensor:
    engine = make_engine(store, dtype=dtype, **options)
    # The output layer's adapter works in float32, which a float64 base cannot join.
    create_job(engine, train_unembed=dtype == torch.float32)
    randomize(engine)
    for part in parts:
        engine.forward_backward(JOB, part, loss_fn)
    return engine.state(JOB).adapter.require_gradients().double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo", "gspo"])
def test_any_chunks_in_any_micro_batch_size_give_the_same_gradient(tmp_path, dtype, loss_fn):
    random = np.random.default_rng(11)
    data = make_data(tmp_path)
    whole = gradient(tmp_path, [data], dtype, loss_fn)
    assert whole.norm() > 1
    for _ in range(8):
        shuffled = [data[i] for i in random.permutation(len(data))]
        cuts = np.sort(random.choice(np.arange(1, len(data)), random.integers(0, len(data)), replace=False)).tolist()
        parts = [shuffled[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        options = {
            "max_tokens_per_microbatch": int(random.choice([1, 10, 33, 70, 4096])),
            "head_chunk_elements": int(random.choice([1, 500 * 7, 500 * 50, 2**24])),
        }
        cut = gradient(tmp_path, parts, dtype, loss_fn, **options)
        assert (cut - whole).norm() <= TOLERANCE * whole.norm(), (list(map(len, parts)), options)
