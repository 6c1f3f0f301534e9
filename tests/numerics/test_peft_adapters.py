"""Adapters that peft made are taken over exactly: the same logits, and they train on as in peft.

That peft loads what Lorry exports is held by tests/workers/test_checkpoints.py and tests/checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lorry_jobs.types import AdamParams
from lorry_workers.engine.adapter import read_adapter
from tests.tiny_engine import create_job, make_engine, peft_model, random_data, targets

JOB = "a1:train:0"
TOKENS = torch.arange(3, 40)[None]


def save_with_peft(folder: Path, family: str, tied: bool, *, unembed: bool, rank: int, alpha: int) -> Any:
    """A model whose adapter is no longer the initial one, and peft's own two files of it."""
    model = peft_model(family, tied, target_modules=targets(unembed=unembed), r=rank, lora_alpha=alpha)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    model.save_pretrained(folder, save_embedding_layers=False)
    assert {path.name for path in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    return model


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
@pytest.mark.parametrize(("unembed", "rank", "alpha"), [(True, 4, 8), (False, 6, 3)])
def test_an_adapter_made_by_peft_loads_and_trains_on_as_it_would_there(tmp_path, family, tied, unembed, rank, alpha):
    model = save_with_peft(tmp_path / "peft", family, tied, unembed=unembed, rank=rank, alpha=alpha)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())

    engine = make_engine(tmp_path / "store", family, tied)
    adapter = read_adapter(tensors, config)
    head = engine.sampler.head
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits[0]
        with model.disable_adapter():
            assert (expected - model(input_ids=TOKENS).logits[0]).abs().max() > 0.01
        with engine.trainer.active.use_one(adapter):
            hidden = engine.trainer.body(input_ids=TOKENS).last_hidden_state[0]
        torch.testing.assert_close(head.logits(hidden, head.everywhere(adapter)), expected, rtol=1e-5, atol=1e-5)

    # As the weights of a job: a step from there is the step that peft and torch take.
    create_job(engine, rank=rank, alpha=alpha, train_unembed=unembed)
    engine.state(JOB).adapter.load_state_dict(tensors)
    data = random_data([20, 7], weights="uniform")
    output = engine.forward_backward(JOB, data, "cross_entropy")
    engine.optim_step(JOB, AdamParams(learning_rate=1e-3, eps=1e-5))
    trained = [p for p in model.parameters() if p.requires_grad]
    loss = torch.zeros(())
    for datum in data:
        inputs = {name: torch.from_numpy(tensor.array) for name, tensor in datum.loss_fn_inputs.items()}
        logprobs = torch.log_softmax(model(input_ids=torch.from_numpy(datum.model_input.tokens)[None]).logits[0], -1)
        loss = loss - (inputs["weights"] * logprobs.gather(1, inputs["target_tokens"][:, None])[:, 0]).sum()
    loss.backward()
    torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0).step()
    assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    for mine, theirs in zip(engine.state(JOB).adapter.parameters(), trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
