"""Checks that need the base model's size, made before anything is sent. The worker makes them again."""

from __future__ import annotations

from collections.abc import Sequence

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import IGNORED_TARGET, Datum, ModelInput
from lorry_jobs.types import ModelInfo


def check_batch(data: Sequence[Datum], loss_fn: str, model: ModelInfo, op: str) -> list[Datum]:
    if isinstance(data, Datum):
        raise UserError(f"{op} takes a list of Datum; put the one you have in a list", op=op)
    rows = list(data)
    if not rows:
        raise UserError(f"{op}: the batch is empty", op=op)
    if not isinstance(loss_fn, str):
        raise UserError(
            f"{op}: loss_fn is the name of a loss; for your own function use forward_backward_custom", op=op
        )
    for index, datum in enumerate(rows):
        if not isinstance(datum, Datum):
            raise UserError(f"{op}: item {index} is {type(datum).__name__}, not a Datum", op=op)
        where = f"{op}: datum {index}"
        check_prompt(datum.model_input, model, where)
        targets = datum.loss_fn_inputs["target_tokens"].array
        top = int(targets.max(initial=IGNORED_TARGET))
        if top >= model.vocab_size:
            raise UserError(f"{where}: target_tokens has {top}, but the vocabulary ends at {model.vocab_size - 1}")
    return rows


def check_prompt(prompt: ModelInput, model: ModelInfo, where: str) -> None:
    if prompt.length == 0:
        raise UserError(f"{where}: the input has no tokens")
    if prompt.length > model.context_length:
        raise UserError(
            f"{where}: {prompt.length} tokens exceed the context of {model.name}, {model.context_length} tokens"
        )
    low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
    if low < 0 or high >= model.vocab_size:
        raise UserError(
            f"{where}: token {low if low < 0 else high} is outside the vocabulary of {model.name} (0 to "
            f"{model.vocab_size - 1})"
        )
