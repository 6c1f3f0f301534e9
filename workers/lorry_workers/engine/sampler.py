"""Sampling: the prompt through the model once, then one token at a time for all samples of a request."""

from __future__ import annotations

import copy
import inspect
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lorry_jobs.errors import OpCancelled, UserError
from lorry_jobs.types import SampledSequence, SampleResponse, SamplingParams

from .adapter import Adapter
from .head import Head, LowRank
from .lora_linear import ActiveAdapters
from .stopping import StopRule

if TYPE_CHECKING:
    from ..base_model import BaseModel

ShouldStop = Callable[[], bool]


@dataclass
class _Sample:
    """One sequence while it grows. Its random numbers depend on nothing but the seed and its index."""

    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class Sampler:
    """Samples from one base model, whose projections share `active`.

    At most `max_rows` samples of a request are decoded together, which bounds the memory of their caches.
    """

    def __init__(self, base: BaseModel, active: ActiveAdapters, head: Head, *, max_rows: int = 32) -> None:
        self.base = base
        self.active = active
        self.head = head
        self.max_rows = max_rows
        self.device = head.weight.device
        self.body = base.model.base_model
        # transformers 5.24 renamed the argument and warns about the old name at every call.
        arguments = inspect.signature(type(self.body).forward).parameters
        self.cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @torch.no_grad()
    def sample(
        self,
        adapter: Adapter | None,
        prompt: Sequence[int],
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        should_stop: ShouldStop | None = None,
    ) -> SampleResponse:
        """`num_samples` continuations of `prompt`.

        `should_stop` is asked before each decode step; if it says yes, OpCancelled is raised.
        """
        prompt = [int(token) for token in prompt]
        self._check(prompt, num_samples, topk_prompt_logprobs)
        seed = secrets.randbits(62) if params.seed is None else params.seed
        samples = [_Sample(_generator(seed, index)) for index in range(num_samples)]
        room = self.base.context_length - len(prompt)
        rule = StopRule(params, self.base.eos_token_ids, self.base.tokenizer)
        response: dict[str, Any] = {}

        low_ranks = self.head.everywhere(adapter)
        with self.active.use_one(adapter):
            cache = DynamicCache(config=self.base.model.config)
            hidden = self._run(torch.tensor([prompt], device=self.device), cache)[0]  # (T, H)
            if prompt_logprobs:
                response["prompt_logprobs"] = self._prompt_logprobs(hidden, prompt, low_ranks)
            if topk_prompt_logprobs:
                response["topk_prompt_logprobs"] = self._topk(hidden, topk_prompt_logprobs, low_ranks)
            first = self.head.logits(hidden[-1:], low_ranks)  # (1, V)
            steps = room if params.max_tokens is None else min(room, params.max_tokens)
            for start in range(0, num_samples, self.max_rows):
                group = samples[start : start + self.max_rows]
                last = start + self.max_rows >= num_samples
                rows = cache if last else copy.deepcopy(cache)
                self._decode(group, rows, first, steps, params, rule, low_ranks, should_stop)

        return SampleResponse(
            sequences=[
                SampledSequence(
                    tokens=sample.tokens,
                    logprobs=sample.logprobs,
                    stop_reason="stop" if sample.stopped else "length",
                    text=rule.text(sample.tokens, stopped=sample.stopped),
                )
                for sample in samples
            ],
            **response,
        )

    def _decode(
        self,
        samples: list[_Sample],
        cache: DynamicCache,
        first_logits: Tensor,
        steps: int,
        params: SamplingParams,
        rule: StopRule,
        low_ranks: list[LowRank],
        should_stop: ShouldStop | None,
    ) -> None:
        """Grow every sample by up to `steps` tokens. All start from the same prompt, so they have the same
        length as long as they run, and one that ends leaves the batch."""
        if len(samples) > 1:
            cache.batch_repeat_interleave(len(samples))
        running = samples
        logits = first_logits.expand(len(samples), -1)  # (S, V)
        for step in range(steps):
            if should_stop is not None and should_stop():
                raise OpCancelled("the sampling was stopped before it was done")
            tokens = choose(logits, params, [sample.random for sample in running])  # (S,)
            logprobs = torch.log_softmax(logits, -1).gather(1, tokens[:, None])  # (S, 1)
            for sample, token, logprob in zip(running, tokens.tolist(), logprobs[:, 0].tolist(), strict=True):
                sample.tokens.append(token)
                sample.logprobs.append(logprob)
                sample.stopped = rule.ends(sample.tokens)
            if step + 1 == steps:
                return
            staying = [row for row, sample in enumerate(running) if not sample.stopped]
            if not staying:
                return
            if len(staying) < len(running):
                rows = torch.tensor(staying, device=self.device)
                cache.batch_select_indices(rows)
                tokens, running = tokens[rows], [running[row] for row in staying]
            hidden = self._run(tokens[:, None], cache)  # (S, 1, H)
            logits = self.head.logits(hidden[:, -1], low_ranks)

    def _run(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        """(b, t) tokens after those in `cache`, which grows by them -> (b, t, H)."""
        return self.body(input_ids=tokens, use_cache=True, **{self.cache_argument: cache}).last_hidden_state

    def _prompt_logprobs(self, hidden: Tensor, prompt: list[int], low_ranks: list[LowRank]) -> list[float | None]:
        if len(prompt) == 1:
            return [None]
        targets = torch.tensor(prompt[1:], device=self.device)[:, None]  # (T - 1, 1)
        return [None, *self.head.score(hidden[:-1], targets, low_ranks)[:, 0].tolist()]

    def _topk(self, hidden: Tensor, k: int, low_ranks: list[LowRank]) -> list[list[tuple[int, float]] | None]:
        if len(hidden) == 1:
            return [None]
        top = self.head.top(hidden[:-1], k, low_ranks)  # (T - 1, k)
        rows = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
        return [None, *(list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows)]

    def _check(self, prompt: list[int], num_samples: int, topk: int) -> None:
        context, vocabulary = self.base.context_length, self.base.vocab_size
        if not prompt:
            raise UserError("the prompt is empty: sampling needs at least one token")
        if len(prompt) > context:
            raise UserError(f"the prompt has {len(prompt)} tokens, but the model's context is {context}")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            bad = next(token for token in prompt if not 0 <= token < vocabulary)
            raise UserError(f"the prompt has token {bad}, but the vocabulary has {vocabulary} tokens")
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, got {num_samples}")
        if not 0 <= topk <= vocabulary:
            raise UserError(f"topk_prompt_logprobs must be between 0 and {vocabulary}, got {topk}")


def choose(logits: Tensor, params: SamplingParams, random: Sequence[torch.Generator]) -> Tensor:
    """One token for each row of `logits` (S, V), with one random number from each row's generator.

    The number u picks the first token at which the cumulative probability passes u, after temperature, then
    top_k, then top_p: the fewest most likely tokens whose probabilities reach top_p.
    """
    if params.temperature == 0 or params.top_k == 1:
        return logits.argmax(-1)
    # Shifted first, so that no temperature, however small, makes infinities of the likely tokens.
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature
    ids: Tensor | None = None
    if 0 < params.top_k < scaled.shape[1]:
        scaled, ids = scaled.topk(params.top_k, -1)  # (S, C), sorted
    elif params.top_p < 1:
        scaled, ids = scaled.sort(-1, descending=True)
    weights = torch.softmax(scaled, -1).double()
    if params.top_p < 1:
        if ids is None:
            raise AssertionError("top_p needs sorted candidates")
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(before >= params.top_p, 0.0)
    cumulative = weights.cumsum(-1)  # in float64: a float32 sum over a vocabulary loses small probabilities
    u = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in random])
    point = u.to(logits.device)[:, None] * cumulative[:, -1:]
    last = (weights > 0).long().mul(torch.arange(weights.shape[1], device=logits.device)).amax(-1, keepdim=True)
    index = torch.searchsorted(cumulative, point, right=True).minimum(last)
    return (index if ids is None else ids.gather(1, index))[:, 0]


def _generator(seed: int, index: int) -> torch.Generator:
    """The random numbers of sample `index`. The multiplier (2⁶⁴ / golden ratio) keeps seeds far apart."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) % 2**63
    return torch.Generator().manual_seed(mixed)
