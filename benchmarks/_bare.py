"""The bare loop that the service is measured against: plain torch and peft, in this process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100


class BareLoop:
    """Forward, backward and AdamW step on a batch, as a researcher would write it."""

    def __init__(self, model: Path | Any, *, rank: int, learning_rate: float = 1e-4) -> None:
        """`model`: a folder, loaded in float32, or a model, which peft then puts its layers into."""
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) if isinstance(model, Path) else model
        self.model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS))
        self.optimizer = torch.optim.AdamW(
            [p for p in self.model.parameters() if p.requires_grad],
            lr=learning_rate,
            betas=(0.9, 0.95),
            eps=1e-12,
            weight_decay=0.0,
        )

    def step(self, tokens: NDArray[np.int64]) -> float:
        """One update on tokens (batch, length + 1): each position predicts the next. -> mean loss per token."""
        ids = torch.from_numpy(tokens)
        return self.update(ids[:, :-1], ids[:, 1:]).item()

    def update(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """One update on token ids and labels, (batch, length) each. -> mean loss per label, on the device.

        Labels that are `IGNORED` do not count. Padding has to be on the right: there causal attention needs no
        mask, which would only slow the loop down.
        """
        logits = self.model(input_ids=inputs).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() / (labels != IGNORED).sum()


def twin(model: Any) -> Any:
    """The same model once more, on the same weights: each job can have peft layers of its own, so that changing
    from one job to the next costs the bare loop nothing (peft's `set_adapter` walks through all modules)."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def pad(rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of each sequence, (length,) each, of different lengths -> (rows, longest) each."""
    longest = max(len(inputs) for inputs, _ in rows)
    inputs = np.zeros((len(rows), longest), np.int64)
    labels = np.full((len(rows), longest), IGNORED, np.int64)
    for number, (own, wanted) in enumerate(rows):
        inputs[number, : len(own)], labels[number, : len(own)] = own, wanted
    return torch.from_numpy(inputs), torch.from_numpy(labels)
