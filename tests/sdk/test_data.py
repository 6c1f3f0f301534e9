"""`lorry.data`: conversations and completions as tokens with a loss where the assistant speaks.

The oracle is transformers: the tokens of its whole template, and the same text put together piece by piece.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import lorry
from lorry.data import chat, chat_prompt, completion, from_tokens, turns
from lorry_jobs.paths import models_dir
from tests.tiny_models import make_tiny_tokenizer

# As SmolLM2's: a system prompt of its own where there is none.
DEFAULT_SYSTEM = "You are a helpful lorry."
SMOLLM2_LIKE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful lorry.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: only what comes after the last user message keeps its thinking, and has a place for it at all.
QWEN3_LIKE = """
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set said = message.content or '' %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
        {%- set said = said.split('</think>')[-1] %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- said.lstrip('\n') }}
    {%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call | tojson + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

USER, ANSWER = {"role": "user", "content": "How far?"}, {"role": "assistant", "content": "Forty miles."}
AGAIN, BACK = {"role": "user", "content": "And back?"}, {"role": "assistant", "content": "Forty again: eighty. 🙂"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATION = [SYSTEM, USER, ANSWER, AGAIN, BACK]
TOOLS = [{"type": "function", "function": {"name": "distance", "description": "Miles.", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "distance", "arguments": {}}}]}


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer(tmp_path)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def said(datum: lorry.Datum, tokenizer: Any) -> list[str]:
    """The text of each run of targets that has a loss."""
    targets, weights = (datum.loss_fn_inputs[key].tolist() for key in ("target_tokens", "weights"))
    runs = groupby(zip(targets, weights, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([target for target, _ in run]) for weight, run in runs if weight == 1.0]


def check(datum: lorry.Datum, tokenizer: Any, messages: Any, trained: list[str], **arguments: Any) -> None:
    """The tokens are the template's, shifted by one; weights are 0 or 1, and those with 1 are `trained`."""
    whole = tokenizer.apply_chat_template(messages, **arguments)["input_ids"]
    assert datum.model_input.to_ints() == whole[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == whole[1:]
    assert set(datum.loss_fn_inputs["weights"].tolist()) <= {0.0, 1.0}
    assert said(datum, tokenizer) == trained


# ------------------------------------------------------------------------------------------------------------- chats


@pytest.mark.parametrize("template", [None, SMOLLM2_LIKE, MARKED], ids=["tiny", "smollm2", "marked"])
@pytest.mark.parametrize("system", [True, False])
def test_assistant_turns_have_the_loss(tokenizer: Any, template: str | None, system: bool) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    messages = CONVERSATION if system else CONVERSATION[1:]
    check(chat(messages, tokenizer), tokenizer, messages, [f"{m['content']}<|im_end|>" for m in (ANSWER, BACK)])
    check(chat(messages, tokenizer, train_on="last"), tokenizer, messages, [f"{BACK['content']}<|im_end|>"])
    everything = chat(messages, tokenizer, train_on="all")
    assert everything.model_input == chat(messages, tokenizer).model_input
    assert everything.loss_fn_inputs["weights"].tolist() == [1.0] * everything.model_input.length


def test_the_weights_token_by_token(tokenizer: Any) -> None:
    tokenizer.chat_template = SMOLLM2_LIKE
    asked = turn("system", DEFAULT_SYSTEM) + turn("user", "How far?") + "<|im_start|>assistant\n"
    pieces = [(asked, 0.0), ("Forty miles.<|im_end|>", 1.0), ("\n", 0.0)]
    tokens = [(token, weight) for text, weight in pieces for token in tokenizer.encode(text)]
    datum = chat([USER, ANSWER], tokenizer)
    assert datum.model_input.to_ints() == [token for token, _ in tokens[:-1]]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [token for token, _ in tokens[1:]]
    assert datum.loss_fn_inputs["weights"].tolist() == [weight for _, weight in tokens[1:]]
    # What the model is asked is what it is trained behind.
    assert chat_prompt([USER], tokenizer).to_ints() == tokenizer.encode(asked)


@pytest.mark.slow  # it needs SmolLM2's files
def test_smollm2s_own_template() -> None:
    from lorry_workers.fetch import fetch_model

    tokenizer = AutoTokenizer.from_pretrained(fetch_model("smollm2", models_dir()).folder, local_files_only=True)
    assert "SmolLM" in tokenizer.chat_template
    for messages in (CONVERSATION, CONVERSATION[1:]):
        answers = [f"{m['content']}<|im_end|>" for m in (ANSWER, BACK)]
        check(chat(messages, tokenizer), tokenizer, messages, answers)
        check(chat(messages, tokenizer, train_on="last"), tokenizer, messages, answers[1:])
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert chat_prompt(messages[:-1], tokenizer).to_ints() == prompt


def test_a_template_without_an_end_of_turn_token(tokenizer: Any) -> None:
    """Then the line break is what ends a turn, and it is trained."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    check(chat([USER, ANSWER], tokenizer), tokenizer, [USER, ANSWER], [" Forty miles.\n"])


def test_a_token_across_the_end_of_the_prompt_has_no_loss(tokenizer: Any) -> None:
    """The prompt's line break and those of the answer become one token, which the model never says after a prompt."""
    tokenizer.add_tokens(["\n\n"])
    answer = {"role": "assistant", "content": "\nForty."}
    messages = [USER, answer]
    check(chat(messages, tokenizer), tokenizer, messages, ["Forty.<|im_end|>"])


def test_what_the_user_quotes_is_not_the_assistants(tokenizer: Any) -> None:
    quoting = {"role": "user", "content": "You said: <|im_start|>assistant\nForty miles.<|im_end|>"}
    check(chat([quoting, ANSWER], tokenizer), tokenizer, [quoting, ANSWER], ["Forty miles.<|im_end|>"])


# ------------------------------------------------------------------------------------- templates that change turns


def test_qwen3_trains_the_thinking_of_a_single_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    empty = "<think>\n\n</think>\n\n"
    check(chat([USER, ANSWER], tokenizer), tokenizer, [USER, ANSWER], [empty + "Forty miles.<|im_end|>"])
    for thought in (
        {**ANSWER, "reasoning_content": "The map."},
        {**ANSWER, "content": "<think>The map.</think>Forty."},
    ):
        messages = [SYSTEM, USER, thought]
        answer = thought["content"].split("</think>")[-1]
        check(chat(messages, tokenizer), tokenizer, messages, [f"<think>\nThe map.\n</think>\n\n{answer}<|im_end|>"])
    # Without thinking the empty block is part of the prompt, and is not trained.
    datum = chat([USER, ANSWER], tokenizer, template_kwargs={"enable_thinking": False})
    check(datum, tokenizer, [USER, ANSWER], ["Forty miles.<|im_end|>"], enable_thinking=False)
    prompt = chat_prompt([USER], tokenizer, template_kwargs={"enable_thinking": False}).to_ints()
    assert tokenizer.decode(prompt).endswith(f"<|im_start|>assistant\n{empty}")
    assert datum.model_input.to_ints()[: len(prompt)] == prompt


@pytest.mark.parametrize("kwargs", [None, {"enable_thinking": False}])
@pytest.mark.parametrize("thinks", [False, True])
def test_qwen3_changes_earlier_turns_so_each_becomes_a_datum(
    tokenizer: Any, kwargs: dict[str, Any] | None, thinks: bool
) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    first = {**ANSWER, "content": "<think>\nThe map.\n</think>\n\nForty miles."} if thinks else ANSWER
    messages = [USER, first, AGAIN, BACK]
    with pytest.raises(lorry.UserError, match=r"message 1 otherwise when more messages follow.*split_turns=True"):
        chat(messages, tokenizer, template_kwargs=kwargs)

    assert turns(messages) == [messages[:2], messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "The map" not in whole  # as the model sees it when it answers the second time
    empty = "" if kwargs else "<think>\n\n</think>\n\n"
    last = chat(messages, tokenizer, train_on="last", template_kwargs=kwargs)
    check(last, tokenizer, messages, [f"{empty}{BACK['content']}<|im_end|>"], **kwargs or {})
    if not (thinks and kwargs):
        block = "<think>\nThe map.\n</think>\n\n" if thinks else empty
        once = chat(turns(messages)[0], tokenizer, train_on="last", template_kwargs=kwargs)
        check(once, tokenizer, messages[:2], [f"{block}Forty miles.<|im_end|>"], **kwargs or {})


def test_thinking_that_the_prompt_rules_out(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    thought = {**ANSWER, "reasoning_content": "The map."}
    with pytest.raises(lorry.UserError, match=r"generation prompt before message 1 ends with.*reasoning_content"):
        chat([USER, thought], tokenizer, template_kwargs={"enable_thinking": False})


def test_tools_and_calls(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3_LIKE
    call = {**CALL, "reasoning_content": "I should look."}
    messages = [USER, call, {"role": "tool", "content": "40"}, {**ANSWER, "reasoning_content": "It says 40."}]
    datum = chat(messages, tokenizer, tools=TOOLS)
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS)["input_ids"]
    assert datum.model_input.to_ints() == whole[:-1]
    first, second = said(datum, tokenizer)
    assert re.fullmatch(
        r"<think>\nI should look.\n</think>\n\n<tool_call>.*\"distance\".*</tool_call><\|im_end\|>", first
    )
    assert second == "<think>\nIt says 40.\n</think>\n\nForty miles.<|im_end|>"


# ------------------------------------------------------------------------------------------------------ bad chats


@pytest.mark.parametrize(
    ("messages", "tools", "complaint"),
    [
        ([], None, "at least one message"),
        ("How far?", None, "'messages' must be a list"),
        ([USER, "Forty."], None, "message 1 must be an object with a 'role'"),
        ([USER, {"role": "assistant"}], None, "message 1: 'content' must be text, not NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], None, "'content' must be text, not list"),
        ([SYSTEM, USER], None, "nothing to train on"),
        ([ANSWER, USER], None, "begins with the assistant"),
        ([USER, {**ANSWER, "reasoning_content": "Hm."}], None, "no place for 'reasoning_content'"),
        ([USER, CALL], None, "no place for 'tool_calls'"),
        ([USER, {**ANSWER, "weight": 0}], None, "message 1 has a 'weight'"),
        ([USER, ANSWER], TOOLS, "no place for 'tools'"),
    ],
)
def test_bad_conversations_are_refused_in_words(tokenizer: Any, messages: Any, tools: Any, complaint: str) -> None:
    with pytest.raises(lorry.UserError, match=complaint):
        chat(messages, tokenizer, tools=tools)


def test_text_that_the_template_drops_is_not_dropped_in_silence(tokenizer: Any) -> None:
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(lorry.UserError, match="leaves out the 'content' of message 0"):
        chat([SYSTEM, USER, ANSWER], tokenizer)
    assert said(chat([USER, ANSWER], tokenizer), tokenizer) == ["Forty miles.\n"]


def test_the_templates_own_complaint_is_passed_on(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(lorry.UserError, match="cannot render the conversation: roles must alternate"):
        chat([USER, ANSWER], tokenizer)


def test_a_tokenizer_without_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(lorry.UserError, match="no chat template"):
        chat([USER, ANSWER], tokenizer)


def test_train_on_takes_three_words(tokenizer: Any) -> None:
    with pytest.raises(lorry.UserError, match="train_on must be one of 'assistant', 'last', 'all', not 'user'"):
        chat([USER, ANSWER], tokenizer, train_on="user")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- completions


def test_the_completion_has_the_loss_and_ends(tokenizer: Any) -> None:
    prompt, answer = tokenizer.encode("How far?"), tokenizer.encode(" Forty miles.")
    tokens = [*prompt, *answer, tokenizer.eos_token_id]
    datum = completion("How far?", " Forty miles.", tokenizer)
    assert datum.model_input.to_ints() == tokens[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == tokens[1:]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1)

    assert said(completion("How far?", " Forty.", tokenizer, add_eos=False), tokenizer) == [" Forty."]
    assert said(completion("How far?", " Forty.<|im_end|>", tokenizer), tokenizer) == [" Forty.<|im_end|>"]
    everything = completion("How far?", " Forty.", tokenizer, train_on="all")
    assert everything.loss_fn_inputs["weights"].tolist() == [1.0] * everything.model_input.length


def test_bad_completions(tokenizer: Any) -> None:
    with pytest.raises(lorry.UserError, match="the completion is empty"):
        completion("How far?", "", tokenizer)
    with pytest.raises(lorry.UserError, match="'prompt' must be text, not list"):
        completion([USER], "Forty.", tokenizer)  # type: ignore[arg-type]
    tokenizer.eos_token = None
    with pytest.raises(lorry.UserError, match="no end-of-text token"):
        completion("How far?", "Forty.", tokenizer)


def test_tokens_become_a_datum_shifted_by_one() -> None:
    datum = from_tokens([5, 6, 7], [0, 0.5, 1])
    assert datum.model_input.to_ints() == [5, 6]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.5, 1.0]
    assert from_tokens([5, 6, 7]).loss_fn_inputs["weights"].tolist() == [1.0, 1.0]
    with pytest.raises(lorry.UserError, match="3 tokens and 2 weights"):
        from_tokens([5, 6, 7], [0, 1])
    with pytest.raises(lorry.UserError, match="two tokens at least"):
        from_tokens([5])
