"""Settings of a worker process, from LORRY_* variables; `lorry worker` options override them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from lorry_jobs.paths import models_dir, store_dir
from lorry_jobs.settings import QueueSettings


class WorkerSettings(QueueSettings):
    slots: int = Field(32, ge=1)
    """How many jobs' adapters this worker holds at once."""
    seats: int = Field(16, ge=1)
    """How many sampling requests it holds at once."""
    models_dir: Path = Field(default_factory=models_dir)
    store_dir: Path = Field(default_factory=store_dir)
    """Snapshots and merged models; checkpoints, too, if there is no `store`."""
    store: str | None = None
    """Where checkpoints are instead: a URL that fsspec knows, or a folder."""
    reap_seconds: float = Field(30.0, gt=0)
    """How often expired checkpoints are deleted."""
    device: str = "auto"
    """`auto`: cuda if there is one, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the base model. `auto`: bfloat16 on a GPU, float32 on a CPU. Adapters are always float32."""
    threads: int | None = Field(None, ge=1)
    """Torch's CPU threads; None leaves torch's own choice."""
    max_tokens_per_cycle: int = Field(16384, ge=1)
    """So many tokens of all jobs together enter one cycle; 1: every batch is computed alone, and the same every time
    to the last bit."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1)
    """Go through the model at once. None: 4096 on a GPU, 1024 on a CPU, which is no faster with more."""
    activation_checkpointing: bool = False
    snapshot_steps: int = Field(50, ge=1)
    """A job's state is saved in the background after so many optimizer steps ..."""
    snapshot_seconds: float = Field(60.0, gt=0)
    """... or, if it changed, after so many seconds."""
    snapshot_bytes: int = Field(64 * 2**20, ge=1)
    """... or once the requests that a replay would need weigh so much."""
    slot_idle_seconds: float = Field(1.0, ge=0)
    """While jobs wait for a slot: one that had nothing to do for so long gives its slot away ..."""
    slot_seconds: float = Field(30.0, gt=0)
    """... and if there is none, the one that has had its slot for longest, but at least so long."""
    deaf_seconds: float = Field(60.0, gt=0)
    """A worker whose queue holds messages and that has taken none for so long starts itself anew ..."""
    stuck_seconds: float = Field(1800.0, gt=0)
    """... and so does one that has been in a single cycle for so long: its device hangs."""
    log_level: str = "INFO"

    @property
    def store_location(self) -> str:
        return self.store or str(self.store_dir)
