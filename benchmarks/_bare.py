"""The bare loop that the service is measured against: plain torch and peft, float32, in this process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class BareLoop:
    """Forward, backward and AdamW step on a rectangular batch, as a researcher would write it."""

    def __init__(self, model: Path, *, rank: int, learning_rate: float = 1e-4) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
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
        logits = self.model(input_ids=ids[:, :-1]).logits.float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        loss = -logprobs.sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item() / logprobs.numel()
