"""The benchmarks' own sums: what they compare must be the same work on both sides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks._bare import IGNORED, BareLoop, twin
from benchmarks._cases import RAGGED_LENGTHS, RAGGED_RANKS, ragged, rectangular
from benchmarks._matrix import adapter_flops, base_flops, matrix_rate, product_parameters, utilisation
from benchmarks.train_throughput import phase_seconds
from lorry_jobs.types import AdamParams, CreateModelRequest, LoraConfig
from tests.tiny_engine import load_base, make_engine, model_folder


@pytest.mark.parametrize("tied", [True, False])
def test_product_parameters_are_what_the_profiler_counts(tied):
    """4 × parameters × tokens, against the operations that torch itself counts in a frozen model's two passes."""
    from torch.utils.flop_counter import FlopCounterMode

    model = load_base("llama", tied).model
    tokens = torch.arange(3, 67)[None]
    with FlopCounterMode(display=False) as counter:
        states = model.get_input_embeddings()(tokens).requires_grad_()
        model(inputs_embeds=states).logits.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)  # not in any product
    assert products == base_flops(product_parameters(model) - norms, 64)
    assert norms < 0.01 * product_parameters(model)


def test_utilisation_and_rate():
    assert base_flops(134_500_000, 512) == 4 * 134_500_000 * 512
    assert adapter_flops(10, 3) == 180
    assert utilisation(base_flops(1000, 50), 2.0, 400_000.0) == pytest.approx(0.25)
    assert matrix_rate(torch.float32, size=64, times=1) > 0


def test_rectangular_cases_mask_the_prompt_alike_on_both_sides():
    case = rectangular(2, 3, 10, 100, masked=0.5)
    assert (case.tokens, case.ranks) == (60, (16, 16))
    for job in range(2):
        inputs, labels = case.padded(job)
        assert inputs.shape == labels.shape == (3, 10)
        for row, datum in enumerate(case.data(job)):
            fields = {name: tensor.array for name, tensor in datum.loss_fn_inputs.items()}
            assert datum.model_input.to_ints() == inputs[row].tolist()
            assert fields["weights"].tolist() == [0.0] * 5 + [1.0] * 5
            assert torch.equal(labels[row] != IGNORED, torch.from_numpy(fields["weights"] == 1))
            assert labels[row][5:].tolist() == fields["target_tokens"][5:].tolist()
    assert (rectangular(1, 1, 8, 100).padded(0)[1] != IGNORED).all()


def test_ragged_data_is_fixed_and_covers_its_range():
    case = ragged(400)
    lengths = [len(row) - 1 for rows in case.batches for row in rows]
    assert (min(lengths), max(lengths)) == RAGGED_LENGTHS
    assert case.tokens == sum(lengths)
    assert sorted(case.ranks) == sorted(RAGGED_RANKS)
    again = ragged(400)
    assert again.ranks == case.ranks
    for mine, theirs in zip(case.batches, again.batches, strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(mine, theirs, strict=True))
    for job, rows in enumerate(case.batches):
        inputs, labels = case.padded(job)
        assert inputs.shape[1] == max(len(row) - 1 for row in rows)
        assert (labels != IGNORED).sum() == sum(len(row) - 1 for row in rows)


def test_the_bare_loop_and_the_engine_do_the_same_updates(tmp_path):
    """Padding and the prompt included; the loops share one base model and do not see each other."""
    vocabulary = load_base().vocab_size
    cases = [rectangular(2, 2, 12, vocabulary, masked=0.5), ragged(vocabulary)]
    for case in cases:
        base = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
        frozen = {name: p.clone() for name, p in base.named_parameters()}
        loops = [BareLoop(twin(base), rank=rank, learning_rate=1e-3) for rank in case.ranks]
        engine = make_engine(tmp_path)
        for job, rank in enumerate(case.ranks):
            lora = LoraConfig(rank=rank, train_unembed=False)
            engine.create_model(f"{job}", CreateModelRequest(base_model="tiny", lora=lora))
            with torch.no_grad():
                trained = [p for p in loops[job].model.parameters() if p.requires_grad]
                for theirs, mine in zip(trained, engine.state(f"{job}").adapter.parameters(), strict=True):
                    theirs.copy_(mine)
        for _ in range(3):
            for job, loop in enumerate(loops):
                expected = loop.update(*case.padded(job)).item()
                assert engine.forward_backward(f"{job}", case.data(job), "cross_entropy").loss == pytest.approx(
                    expected, rel=1e-4
                )
                engine.optim_step(f"{job}", AdamParams(learning_rate=1e-3))
        assert all(torch.equal(p, frozen[name]) for name, p in base.named_parameters())


def test_ops_of_a_cycle_that_ran_together_count_once():
    def entry(op: str, cycle: int, milliseconds: float) -> dict[str, object]:
        return {"op": op, "cycle": cycle, "milliseconds": milliseconds}

    together = [entry("forward_backward", 1, 200.0), entry("forward_backward", 1, 200.0), entry("optim_step", 1, 30.0)]
    later = [entry("forward_backward", 2, 100.0), entry("optim_step", 2, 10.0), entry("optim_step", 2, 10.0)]
    found = phase_seconds([*together, *later])
    assert found == pytest.approx({"forward_backward": 0.3, "optim_step": 0.04})
    assert phase_seconds([]) == {"forward_backward": 0, "optim_step": 0}
