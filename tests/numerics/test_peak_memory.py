"""What forward_backward holds grows with tokens × hidden size and never with tokens × vocabulary.

Counted from the tensors that torch makes, and so exact: the same on every machine and in every run. What a process
really takes is measured by benchmarks/train_throughput.py.
"""

from __future__ import annotations

import functools
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

from lorry_workers.base_model import load_base_model
from lorry_workers.engine.checkpoints import CheckpointStore
from lorry_workers.engine.engine import Batch, Engine, EngineOptions
from tests.new_tensors import NewTensors
from tests.tiny_engine import create_job, random_data
from tests.tiny_models import make_tiny_llama

VOCABULARY = 50_000
CHUNK_ROWS = 16
LENGTH = 32


class Held(NewTensors):
    """The bytes of all tensors made inside that are still there, at their highest, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = self.largest = 0
        self._seen: set[int] = set()

    def made(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        weakref.finalize(storage, self._remove, key, size)
        self.now += size
        self.highest = max(self.highest, self.now)
        self.largest = max(self.largest, size)

    def _remove(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


@functools.cache
def model_folder(hidden: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lorry-large-vocabulary-"))
    return make_tiny_llama(folder, vocab_size=VOCABULARY, hidden=hidden)


def held(store: Path, tokens: int, *, hidden: int, jobs: int, loss_fn: str, unembed: bool) -> Held:
    """In one forward_backward of all jobs together, `tokens` tokens in all."""
    base = load_base_model(str(model_folder(hidden)), dtype=torch.float32, device="cpu")
    options = EngineOptions(head_chunk_elements=CHUNK_ROWS * VOCABULARY)
    engine = Engine(base, "tiny", CheckpointStore(store), options)
    inputs = {"logprobs": "normal", "advantages": "normal"} if loss_fn == "ppo" else {}
    batches = []
    for number in range(jobs):
        create_job(engine, f"{number}", rank=2, train_unembed=unembed)
        data = random_data([LENGTH] * (tokens // jobs // LENGTH), seed=number, vocab=VOCABULARY, **inputs)
        batches.append(Batch(f"{number}", data, loss_fn))

    def run(batches: list[Batch]) -> None:
        results = engine.run_batches(batches)
        assert not any(isinstance(result, Exception) for result in results), results

    run([Batch(batch.job, batch.data[:1], batch.loss_fn) for batch in batches])  # makes what stays
    with Held() as found:
        run(batches)
    return found


def test_the_count_sees_a_plain_loss_and_its_end():
    logits_bytes = 64 * 500 * 4
    with Held() as found:
        logits = torch.randn(64, 500, requires_grad=True)
        torch.log_softmax(logits, -1).sum().backward()
    assert found.largest == logits_bytes
    assert found.highest >= 3 * logits_bytes
    del logits
    assert found.now == 0


@pytest.mark.parametrize("unembed", [True, False])
@pytest.mark.parametrize(
    ("jobs", "loss_fn", "hidden"),
    [(1, "cross_entropy", 32), (1, "cross_entropy", 64), (4, "cross_entropy", 32), (4, "ppo", 32)],
)
def test_no_tensor_of_tokens_times_vocabulary_and_growth_by_the_hidden_size(tmp_path, jobs, loss_fn, hidden, unembed):
    few, many = 512, 2048
    small, large = (
        held(tmp_path, tokens, hidden=hidden, jobs=jobs, loss_fn=loss_fn, unembed=unembed) for tokens in (few, many)
    )
    chunk = CHUNK_ROWS * VOCABULARY * 4  # bytes of the logits that may be held at a time
    assert max(small.largest, large.largest) < chunk
    # Per token there are two layers' activations: 34 numbers per unit of the hidden size. The rest is a few chunks.
    growth = (large.highest - small.highest) / (many - few)
    assert 0 < growth < 40 * hidden * 4
    assert growth < 0.06 * VOCABULARY * 4
    assert small.highest < 4 * chunk + growth * few
