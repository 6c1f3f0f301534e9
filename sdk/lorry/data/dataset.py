"""Rows and files of them as `Datum`s, with a report of what became of each row."""

from __future__ import annotations

import json
import logging
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import Datum

from .encode import Encoded, TrainOn, check_train_on, encode_chat, encode_completion, from_tokens, turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("lorry")

T = TypeVar("T")

FORMS = '{"messages": [...]} or {"prompt": "...", "completion": "..."}'
NAMED = 10
"""So many rows are named in a warning; the report has them all."""


@dataclass(frozen=True)
class Skipped:
    """`row` counts from 1; in a file it is the line."""

    row: int
    reason: str


@dataclass
class Report:
    """What became of the rows. `tokens` and `trained_tokens` (those with a loss) are sums over all datums.

    `truncated` has the row of each datum that was cut to `max_length`. `ignored` counts the keys of rows that mean
    nothing here.
    """

    source: str
    rows: int = 0
    datums: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    max_length: int | None = None
    truncated: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.rows} rows, {self.datums} datums, {self.tokens} tokens, "
            f"{self.trained_tokens} of them trained"
        ]
        if self.truncated:
            rows = [str(row) for row in self.truncated]
            lines.append(f"cut to {self.max_length} tokens: {len(rows)} ({_some('row', rows)})")
        if self.skipped:
            rows = [f"{skipped.row} ({skipped.reason})" for skipped in self.skipped]
            lines.append(f"skipped: {len(rows)}: {_some('row', rows)}")
        if self.ignored:
            counts = ", ".join(f"'{key}' in {count} rows" for key, count in self.ignored.items())
            lines.append(f"not read: {counts}")
        return "\n  ".join(lines)


def _some(noun: str, items: list[str]) -> str:
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return f"{noun} {', '.join(items[:NAMED])}{more}"


class Dataset(Sequence[Datum]):
    """The datums, in the order of the rows. A slice is a list.

    `rows[i]` is the row that datum i came from, counted from 1; in a file it is the line. `report`: what became of
    all rows.
    """

    def __init__(self, data: list[Datum], rows: list[int], report: Report) -> None:
        self._data = data
        self.rows = rows
        self.report = report

    def __len__(self) -> int:
        return len(self._data)

    @overload
    def __getitem__(self, index: int) -> Datum: ...
    @overload
    def __getitem__(self, index: slice) -> list[Datum]: ...
    def __getitem__(self, index: int | slice) -> Datum | list[Datum]:
        return self._data[index]

    def __repr__(self) -> str:
        return f"<Dataset of {len(self)} datums from {self.report.source}>"


def load_jsonl(
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    train_on: TrainOn = "assistant",
    split_turns: bool = False,
    add_eos: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    skip_bad_rows: bool = False,
) -> Dataset:
    """The datums of a file with one JSON object per line (UTF-8; empty lines are passed over).

    A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, with `"tools"` if the assistant has any, or
    `{"prompt": "...", "completion": "..."}`. Other keys are not read; the report names them.

    `max_length`: most tokens of a row; what is longer loses its end. None: no limit (a datum longer than the model's
    context is refused when it is submitted).
    `train_on`: "assistant" is every assistant turn, or the completion; "last" the last assistant turn; "all" every
    token. See `chat`.
    `split_turns`: each assistant turn becomes a datum of its own, behind what came before it. Templates that change
    earlier turns need it, such as Qwen3's.
    `add_eos`, `template_kwargs`: see `completion` and `chat`.

    A row of which nothing is left to train on after truncation is skipped. A row that cannot be read raises
    UserError with the file and line, or is skipped too with `skip_bad_rows`. What was cut or skipped is in the
    dataset's `report`, and is logged as a warning. Raises UserError if no row is left.
    """
    path = Path(path)
    options = _Options(tokenizer, max_length, train_on, split_turns, add_eos, template_kwargs, skip_bad_rows)
    try:
        with path.open("rb") as file:
            # By line breaks only: JSON text may hold other characters that Python takes for the end of a line.
            return _build(enumerate(file, start=1), str(path), "line", options)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    train_on: TrainOn = "assistant",
    split_turns: bool = False,
    add_eos: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    skip_bad_rows: bool = False,
) -> Dataset:
    """As `load_jsonl`, of rows that are here already: a list of dicts, or a dataset of the library `datasets`."""
    options = _Options(tokenizer, max_length, train_on, split_turns, add_eos, template_kwargs, skip_bad_rows)
    return _build(enumerate(rows, start=1), "rows", "row", options)


def batches(data: Sequence[T], size: int, *, seed: int | None = None, epochs: int | None = 1) -> Iterator[list[T]]:
    """Lists of `size` items. The last one of an epoch may be shorter; nothing is left out.

    With a `seed` every epoch is shuffled anew, always in the same way; None keeps the order. `epochs` None: no end.
    """
    if size < 1:
        raise UserError(f"the size of a batch must be at least 1, got {size}")
    if epochs is not None and epochs < 0:
        raise UserError(f"epochs must not be negative, got {epochs}")
    if not len(data):
        raise UserError("there is no data to make batches of")
    return _batches(data, size, seed, epochs)


def _batches(data: Sequence[T], size: int, seed: int | None, epochs: int | None) -> Iterator[list[T]]:
    order = list(range(len(data)))
    shuffler = random.Random(seed)
    epoch = 0
    while epochs is None or epoch < epochs:
        if seed is not None:
            shuffler.shuffle(order)
        for start in range(0, len(order), size):
            yield [data[index] for index in order[start : start + size]]
        epoch += 1


# ------------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class _Options:
    tokenizer: PreTrainedTokenizerBase
    max_length: int | None
    train_on: TrainOn
    split_turns: bool
    add_eos: bool
    template_kwargs: Mapping[str, Any] | None
    skip_bad_rows: bool

    def __post_init__(self) -> None:
        check_train_on(self.train_on)
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"max_length must be at least 2, got {self.max_length}")
        if self.split_turns and self.train_on == "all":
            raise UserError("split_turns with train_on='all' would train early turns again and again; use one of them")


def _build(rows: Iterable[tuple[int, bytes | Mapping[str, Any]]], source: str, noun: str, options: _Options) -> Dataset:
    report = Report(source, max_length=options.max_length)
    data: list[Datum] = []
    numbers: list[int] = []
    for number, raw in rows:
        if isinstance(raw, bytes) and not raw.strip():
            continue
        report.rows += 1
        try:
            row = _parse(raw)
            encoded = _encode(row, options)
        except UserError as error:
            if not options.skip_bad_rows:
                raise UserError(f"{source}, {noun} {number}: {error.message}") from error
            report.skipped.append(Skipped(number, error.message))
            continue
        report.ignored.update(key for key in row if key not in ("messages", "tools", "prompt", "completion"))
        for sequence in encoded:
            limit = len(sequence.tokens) if options.max_length is None else options.max_length
            is_long = len(sequence.tokens) > limit
            sequence = sequence.first(limit)
            if not sequence.trained_tokens:
                among = f" among the first {limit} tokens" if is_long else ": no token but the first one"
                report.skipped.append(Skipped(number, f"nothing to train on{among}"))
                continue
            if is_long:
                report.truncated.append(number)
            data.append(from_tokens(sequence.tokens, sequence.weights))
            numbers.append(number)
            report.datums += 1
            report.tokens += len(sequence.tokens)
            report.trained_tokens += sequence.trained_tokens
    if report.truncated or report.skipped:
        log.warning("%s", report)
    if not data:
        raise UserError(f"no row can be used. {report}")
    return Dataset(data, numbers, report)


def _parse(raw: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw.decode("utf-8-sig").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"this is not UTF-8: {error}") from None
        except json.JSONDecodeError as error:
            raise UserError(f"this is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(raw, Mapping):
        raise UserError(f"a row must be an object, {FORMS}, not {type(raw).__name__}")
    return raw


def _encode(row: Mapping[str, Any], options: _Options) -> list[Encoded]:
    """One sequence, or one per assistant turn with `split_turns`."""
    # A dataset with columns has them all in each row; those of the other form are None then.
    is_chat = row.get("messages") is not None
    is_pair = row.get("prompt") is not None or row.get("completion") is not None
    if is_chat == is_pair:
        raise UserError(f"a row must be either {FORMS}; this one has {', '.join(map(repr, row)) or 'no keys'}")
    if is_pair:
        pair = encode_completion(
            row.get("prompt"),  # type: ignore[arg-type]  # it checks
            row.get("completion"),  # type: ignore[arg-type]
            options.tokenizer,
            train_on=options.train_on,
            add_eos=options.add_eos,
        )
        return [pair]
    messages, tools = row["messages"], row.get("tools")
    conversations = [messages]
    if options.split_turns and isinstance(messages, Sequence) and all(isinstance(item, Mapping) for item in messages):
        # Without an assistant turn: as it is, so that it is refused in words.
        conversations = turns(messages) or [messages]
    return [
        encode_chat(
            conversation,
            options.tokenizer,
            train_on="last" if options.split_turns else options.train_on,
            tools=tools,
            template_kwargs=options.template_kwargs,
        )
        for conversation in conversations
    ]
