"""Attention over packed rows: sequences lie one behind the other in a single row, and none sees another.

A packed row has no padding, so every product of the model is spent on real tokens. Attention alone must know
where a sequence ends: each run of sequences of one length is one call of torch's scaled dot-product attention.

transformers finds the function by the name in the model's config, builds no mask for a name it has no mask
function of, and hands on the keyword arguments of the model's call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

log = logging.getLogger(__name__)

NAME = "lorry_packed"


class Run(NamedTuple):
    """`count` sequences of `length` tokens each, one behind the other."""

    count: int
    length: int


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    runs: Sequence[Run],
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. (1, heads, T, d) each -> (1, T, heads, d)."""
    outputs, start = [], 0
    for run in runs:
        rows = slice(start, start + run.count * run.length)
        start = rows.stop
        # (1, h, n·t, d) -> (n, h, t, d), without a copy
        q, k, v = (x[0, :, rows].unflatten(1, run).transpose(0, 1) for x in (query, key, value))
        output, _ = sdpa_attention_forward(module, q, k, v, None, **options)  # (n, t, h, d)
        outputs.append(output.flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


AttentionInterface.register(NAME, packed_attention)


def runs_of(lengths: Sequence[int]) -> tuple[Run, ...]:
    """[8, 8, 5] -> (Run(2, 8), Run(1, 5))"""
    runs: list[Run] = []
    for length in lengths:
        if runs and runs[-1].length == length:
            runs[-1] = Run(runs[-1].count + 1, length)
        else:
            runs.append(Run(1, length))
    return tuple(runs)


class Packing:
    """Runs the model's body on packed rows.

    Where its attention is not plain causal attention over the whole sequence (sliding windows, chunks), or does
    not take part in transformers' attention interface, transformers' own mask for packed rows is used, which
    costs T × T. A body that mixes tokens in any other way (a convolution, a recurrent state) takes no packed
    rows at all: `one_by_one`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.body = model.base_model
        self.config = model.config.get_text_config()
        self.own_attention = _plain_causal(self.config)
        self.one_by_one = False
        if not self._is_exact():
            self.own_attention = False
            self.one_by_one = not self._is_exact()

    @contextmanager
    def use(self, runs: Sequence[Run]) -> Iterator[None]:
        """Around the forward pass over `runs` and the backward pass, which may compute layers again."""
        before = self.config._attn_implementation
        if self.own_attention and not _alone(runs):
            self.config._attn_implementation = NAME
        try:
            yield
        finally:
            self.config._attn_implementation = before

    def hidden(self, tokens: Tensor, position_ids: Tensor, runs: Sequence[Run]) -> Tensor:
        """Packed tokens (1, T) and their positions in their own sequences (1, T) -> last hidden states (T, H)."""
        options: dict[str, Any] = {}
        if not _alone(runs):
            options["position_ids"] = position_ids
            if self.own_attention:
                options["runs"] = runs
        return self.body(input_ids=tokens, use_cache=False, **options).last_hidden_state[0]

    @torch.no_grad()
    def _is_exact(self) -> bool:
        """Whether sequences in a packed row give what each gives alone."""
        embedding = self.body.get_input_embeddings().weight
        tokens = torch.arange(1, 13, device=embedding.device)[None] % embedding.shape[0]
        positions = torch.arange(4, device=embedding.device).repeat(3)[None]
        runs = runs_of([4, 4, 4])
        alone = torch.cat([self.hidden(part, positions, runs_of([4])) for part in tokens.split(4, 1)])
        try:
            with self.use(runs):
                packed = self.hidden(tokens, positions, runs)
        except (TypeError, ValueError, RuntimeError) as error:
            log.info("packed rows are not for %s: %s", type(self.body).__name__, error)
            return False
        gap = (packed - alone).abs().max().item()
        allowed = 1e-3 if alone.dtype == torch.float32 else 0.05
        return gap <= allowed * max(1.0, alone.abs().max().item())


def _alone(runs: Sequence[Run]) -> bool:
    return len(runs) == 1 and runs[0].count == 1


def _plain_causal(config: Any) -> bool:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    return config._attn_implementation == "sdpa" and kinds == {"full_attention"} and not windowed
