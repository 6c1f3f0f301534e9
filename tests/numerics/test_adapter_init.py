"""A new adapter has peft's own values and names, and costs the base model nothing."""

from __future__ import annotations

import warnings

import peft
import pytest
import torch
from torch import nn

from lorry_jobs.errors import UserError
from lorry_jobs.types import LoraConfig
from lorry_workers.engine.adapter import create_adapter, make_shell, read_adapter, target_modules
from tests.tiny_engine import load_base, peft_model, targets


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
@pytest.mark.parametrize("unembed", [True, False])
def test_initial_values_and_names_are_those_of_plain_peft(family, tied, unembed):
    base = load_base(family, tied)
    config = LoraConfig(rank=4, alpha=8, seed=7, train_unembed=unembed)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        adapter = create_adapter(make_shell(base.model), config, base_model="tiny")

    reference = peft.get_peft_model_state_dict(
        peft_model(family, tied, target_modules=targets(unembed=unembed)), save_embedding_layers=False
    )
    ours = adapter.state_dict()
    assert list(ours) == list(reference)
    assert all(torch.equal(ours[name], reference[name]) for name in reference)
    assert adapter.scaling == 2.0
    assert ("lm_head" in adapter.pairs) == unembed


def test_the_shell_holds_no_memory_and_the_callers_random_state_stays():
    base = load_base()
    shell = make_shell(base.model)
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in shell.parameters())
    assert {name: p.shape for name, p in shell.named_parameters()} == {
        name: p.shape for name, p in base.model.named_parameters()
    }

    before = torch.get_rng_state()
    create_adapter(shell, LoraConfig(rank=2, seed=1), base_model="tiny")
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_one_is_drawn_and_kept():
    shell = make_shell(load_base().model)
    first, second = (create_adapter(shell, LoraConfig(rank=2), base_model="tiny") for _ in range(2))
    assert first.seed != second.seed
    again = create_adapter(shell, LoraConfig(rank=2, seed=first.seed), base_model="tiny")
    assert torch.equal(again.flat, first.flat)


def test_state_dict_round_trip_is_strict():
    shell = make_shell(load_base().model)
    config = LoraConfig(rank=4, seed=7, train_unembed=False)
    adapter = create_adapter(shell, config, base_model="tiny")
    other = create_adapter(shell, config.model_copy(update={"seed": 8}), base_model="tiny")
    saved = adapter.state_dict()
    other.load_state_dict(saved)
    assert torch.equal(other.flat, adapter.flat)

    copy = read_adapter(saved, adapter.adapter_config())
    assert torch.equal(copy.flat, adapter.flat)
    assert not any(p.requires_grad for p in copy.parameters())

    name = next(iter(saved))
    with pytest.raises(UserError, match="1 tensors are missing"):
        other.load_state_dict({key: value for key, value in saved.items() if key != name})
    with pytest.raises(UserError, match="has shape"):
        other.load_state_dict({**saved, name: saved[name][:2]})


def test_a_model_without_the_named_layers_is_refused_with_what_it_has():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 8)

        def get_output_embeddings(self):
            return self.lm_head

    with pytest.raises(UserError, match=r"Odd cannot be trained with train_attn=True: .*q_proj.*c_attn, lm_head"):
        target_modules(Odd(), LoraConfig(rank=1))
    only_head = LoraConfig(rank=1, train_attn=False, train_mlp=False)
    assert target_modules(Odd(), only_head) == ["lm_head"]
