"""All that a worker holds of one job."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lorry_jobs.types import LoraConfig

from .adapter import Adapter
from .optimizer import AdamState

LOSS_HISTORY = 1000


@dataclass
class JobState:
    """`step` counts optim_steps; `accumulated_*` what forward_backward has added since the last one."""

    job: str
    base_model: str
    lora: LoraConfig
    adapter: Adapter
    adam: AdamState
    user_metadata: dict[str, str] = field(default_factory=dict)
    step: int = 0
    accumulated_calls: int = 0
    accumulated_tokens: int = 0
    loss_history: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_HISTORY))

    @property
    def has_gradients(self) -> bool:
        return self.accumulated_calls > 0

    def add_accumulation(self, tokens: int, loss: float) -> None:
        self.accumulated_calls += 1
        self.accumulated_tokens += tokens
        self.loss_history.append(loss)

    def drop_gradients(self) -> bool:
        """Forget what was accumulated; True if there was anything."""
        had = self.has_gradients
        self.adapter.zero_gradients()
        self.accumulated_calls = self.accumulated_tokens = 0
        return had
