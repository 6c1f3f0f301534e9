"""`lorry.data`: rows and JSONL files, what is said of each row, and batches."""

from __future__ import annotations

import json
import logging
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import lorry
from lorry.data import Skipped, batches, chat, completion, from_rows, load_jsonl
from tests.sdk.test_data import AGAIN, ANSWER, BACK, CONVERSATION, QWEN3_LIKE, TOOLS, USER
from tests.tiny_models import make_tiny_tokenizer

CHAT: dict[str, Any] = {"messages": [USER, ANSWER]}
PAIR: dict[str, Any] = {"prompt": "Two plus two is", "completion": " four"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return make_tiny_tokenizer(tmp_path / "tokenizer")


def write(folder: Path, *lines: Any) -> Path:
    """Strings as they are, everything else as JSON."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def same(one: lorry.Datum, other: lorry.Datum) -> bool:
    return one.model_input == other.model_input and one.loss_fn_inputs == other.loss_fn_inputs


def test_both_forms_in_one_file(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, CHAT, "", {**PAIR, "source": "arithmetic"}, {"messages": CONVERSATION})
    data = load_jsonl(path, tokenizer)
    expected = [
        chat([USER, ANSWER], tokenizer),
        completion(PAIR["prompt"], PAIR["completion"], tokenizer),
        chat(CONVERSATION, tokenizer),
    ]
    assert len(data) == len(expected)
    assert all(same(one, other) for one, other in zip(data, expected, strict=True))
    assert data.rows == [1, 3, 4]  # the lines
    assert all(same(one, other) for one, other in zip(data[1:], expected[1:], strict=True))

    report = data.report
    assert (report.source, report.rows, report.datums) == (str(path), 3, 3)
    assert report.tokens == sum(datum.model_input.length + 1 for datum in expected)
    assert report.trained_tokens == sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in expected)
    assert (report.truncated, report.skipped) == ([], [])
    assert report.ignored == {"source": 1}
    assert "'source' in 1 rows" in str(report)
    assert caplog.records == []  # all went well


def test_rows_in_memory_give_the_same(tokenizer: Any, tmp_path: Path) -> None:
    """Also as `datasets` gives them: every row with every column, those of the other form None."""
    columns = dict.fromkeys(("messages", "tools", "prompt", "completion"))
    rows = [{**columns, **CHAT}, {**columns, **PAIR}]
    from_memory, from_file = from_rows(rows, tokenizer), load_jsonl(write(tmp_path, CHAT, PAIR), tokenizer)
    assert all(same(one, other) for one, other in zip(from_memory, from_file, strict=True))
    assert from_memory.rows == [1, 2]


def test_options_reach_the_rows(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    kwargs = {"enable_thinking": False}
    rows = [{"messages": [USER, ANSWER], "tools": TOOLS}, PAIR]
    data = from_rows(rows, tokenizer, train_on="all", add_eos=False, template_kwargs=kwargs)
    assert same(data[0], chat([USER, ANSWER], tokenizer, train_on="all", tools=TOOLS, template_kwargs=kwargs))
    assert same(data[1], completion(PAIR["prompt"], PAIR["completion"], tokenizer, train_on="all", add_eos=False))


def test_long_rows_are_cut_and_named(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    whole = chat(CONVERSATION, tokenizer)
    length = whole.model_input.length - 3  # the tokens are one more: four go, of them all but one trained
    with caplog.at_level(logging.WARNING, logger="lorry"):
        data = from_rows([CHAT, {"messages": CONVERSATION}], tokenizer, max_length=length)
    assert data.report.truncated == [2]
    assert data[1].model_input.to_ints() == whole.model_input.to_ints()[: length - 1]
    for key, values in whole.loss_fn_inputs.items():
        assert data[1].loss_fn_inputs[key].tolist() == values.tolist()[: length - 1]
    assert same(data[0], chat([USER, ANSWER], tokenizer))
    assert data.report.tokens == data[0].model_input.length + 1 + length
    assert f"cut to {length} tokens: 1 (row 2)" in caplog.text

    exact = from_rows([CHAT], tokenizer, max_length=data[0].model_input.length + 1)
    assert exact.report.truncated == []


def test_a_row_with_nothing_left_to_train_is_skipped_and_named(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"messages": [{"role": "user", "content": "How far? " * 30}, ANSWER]}
    with caplog.at_level(logging.WARNING, logger="lorry"):
        data = from_rows([CHAT, long, PAIR], tokenizer, max_length=60)
    assert data.rows == [1, 3]
    assert data.report.skipped == [Skipped(2, "nothing to train on among the first 60 tokens")]
    assert data.report.rows == 3
    assert "skipped: 1: row 2 (nothing to train on" in caplog.text
    with pytest.raises(lorry.UserError, match=r"no row can be used.*1 rows, 0 datums"):
        from_rows([long], tokenizer, max_length=60)


def test_a_row_of_one_token_has_nothing_that_predicts_it(tokenizer: Any) -> None:
    data = from_rows([PAIR, {"prompt": "", "completion": "a"}], tokenizer, add_eos=False)
    assert data.rows == [1]
    assert data.report.skipped == [Skipped(2, "nothing to train on: no token but the first one")]


def test_a_warning_names_ten_rows_and_the_report_all(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lorry"):
        data = from_rows([CHAT, *[{"messages": CONVERSATION}] * 15], tokenizer, max_length=40)
    assert data.report.truncated == list(range(2, 17))
    assert "9, 10, 11 and 5 more" in caplog.text


def test_turns_become_datums_of_their_own(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    messages = [USER, ANSWER, AGAIN, BACK]
    with pytest.raises(lorry.UserError, match=r"row 2: the chat template renders message 1 otherwise"):
        from_rows([CHAT, {"messages": messages}], tokenizer)
    data = from_rows([CHAT, {"messages": messages}], tokenizer, split_turns=True)
    assert data.rows == [1, 2, 2]
    assert same(data[1], chat(messages[:2], tokenizer, train_on="last"))
    assert same(data[2], chat(messages, tokenizer, train_on="last"))
    with pytest.raises(lorry.UserError, match="split_turns with train_on='all'"):
        from_rows([CHAT], tokenizer, split_turns=True, train_on="all")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [', "this is not JSON: Expecting value at column 15"),
        ("[1, 2]", r"a row must be an object, \{\"messages\": \[...\]\} or .*, not list"),
        ('{"text": "How far?"}', "must be either .*; this one has 'text'"),
        ("{}", "this one has no keys"),
        ({**CHAT, **PAIR}, "must be either"),
        ({"prompt": "How far?"}, "'completion' must be text, not NoneType"),
        ({"messages": "How far?"}, "'messages' must be a list"),
        ({"messages": ["How far?"]}, "message 0 must be an object"),
        ({"messages": [USER]}, "nothing to train on"),
        ({**CHAT, "tools": TOOLS}, "no place for 'tools'"),
    ],
)
@pytest.mark.parametrize("split_turns", [False, True])
def test_bad_lines_are_named(tokenizer: Any, tmp_path: Path, line: Any, complaint: str, split_turns: bool) -> None:
    path = write(tmp_path, CHAT, "", line, PAIR)
    with pytest.raises(lorry.UserError, match=rf"rows\.jsonl, line 3: .*{complaint}"):
        load_jsonl(path, tokenizer, split_turns=split_turns)
    data = load_jsonl(path, tokenizer, split_turns=split_turns, skip_bad_rows=True)
    assert data.rows == [1, 4]
    assert [skipped.row for skipped in data.report.skipped] == [3]
    assert data.report.rows == 3


def test_bytes_that_are_not_utf8_are_named_too(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b'\n{"prompt": "\xe9", "completion": "e"}\n')
    with pytest.raises(lorry.UserError, match=r"latin\.jsonl, line 2: this is not UTF-8"):
        load_jsonl(path, tokenizer)


def test_only_line_breaks_end_a_line(tokenizer: Any, tmp_path: Path) -> None:
    """Not U+2028, which JSON may hold as it is; and a byte order mark is no part of the JSON."""
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "one\u2028two\u0085", "completion": "three"}
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n" + json.dumps(PAIR).encode()
    )
    data = load_jsonl(path, tokenizer)
    assert data.rows == [1, 2]
    assert same(data[0], completion(row["prompt"], row["completion"], tokenizer))


def test_a_missing_file_and_bad_options(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(lorry.UserError, match=r"cannot read .*none\.jsonl: No such file"):
        load_jsonl(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(lorry.UserError, match="max_length must be at least 2"):
        from_rows([CHAT], tokenizer, max_length=1)
    with pytest.raises(lorry.UserError, match="no row can be used"):
        from_rows([], tokenizer)
    with pytest.raises(lorry.UserError, match="train_on must be one of"):
        from_rows([CHAT], tokenizer, train_on="assistants")  # type: ignore[arg-type]


def test_batches_leave_nothing_out() -> None:
    data = list(range(10))
    assert list(batches(data, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    two = list(batches(data, 4, seed=3, epochs=2))
    assert [len(batch) for batch in two] == [4, 4, 2, 4, 4, 2]
    first, second = (list(chain(*epoch)) for epoch in (two[:3], two[3:]))
    assert sorted(first) == sorted(second) == data
    assert first != second != data
    assert two == list(batches(data, 4, seed=3, epochs=2))
    assert two != list(batches(data, 4, seed=4, epochs=2))
    endless = batches(data, 10, seed=3, epochs=None)
    assert all(sorted(next(endless)) == data for _ in range(50))
    for arguments in ({"size": 0}, {"size": 1, "epochs": -1}):
        with pytest.raises(lorry.UserError, match="must"):
            batches(data, **arguments)  # at the call, not at the first batch
    with pytest.raises(lorry.UserError, match="no data"):
        batches([], 4)
