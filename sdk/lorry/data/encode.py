"""One conversation, or one prompt with its completion, as tokens and loss weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lorry_jobs.errors import UserError
from lorry_jobs.tensors import Datum, ModelInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""`{"role": "user", "content": "..."}`, and whatever else the chat template knows, such as `tool_calls`."""

TrainOn = Literal["assistant", "last", "all"]

GENERATION_BLOCK = re.compile(r"{%-?\s*generation\s*-?%}")
"""How a chat template marks by itself what the assistant says."""

MEANT_TO_BE_READ = ("tool_calls", "reasoning_content", "thinking")
"""Keys of a message that hold part of what was said. A template that does not know one would drop it."""

SPLIT_TURNS = (
    "Make a datum of each assistant turn instead (split_turns=True, or lorry.data.turns), or train on the last one "
    "only (train_on='last')"
)


# --------------------------------------------------------------------------------------------------------- for users


def from_tokens(tokens: Sequence[int], weights: Sequence[float] | None = None) -> Datum:
    """The datum of a sequence in which every token predicts the next one.

    `weights[i]` is what token i counts in the loss, by default 1. The first token is predicted by nothing, so of N
    tokens N - 1 have a loss at most: `model_input` is tokens[:-1], `target_tokens` tokens[1:], `weights` weights[1:].
    """
    tokens = [int(token) for token in tokens]
    weights = [1.0] * len(tokens) if weights is None else [float(weight) for weight in weights]
    if len(weights) != len(tokens):
        raise UserError(f"{len(tokens)} tokens and {len(weights)} weights: each token needs one")
    if len(tokens) < 2:
        raise UserError(f"a datum needs two tokens at least, one to predict the other, and got {len(tokens)}")
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Datum:
    """The datum of a conversation, in the tokens of the tokenizer's own chat template.

    `train_on` says which tokens have weight 1, all others have 0:
      "assistant": every assistant turn, from where the generation prompt ends up to its end-of-turn token;
      "last": the last assistant turn only;
      "all": every token.

    `tools`: JSON schemas of the functions the assistant may call. `template_kwargs` go to the template, such as
    `{"enable_thinking": False}`.

    Raises UserError if the template refuses the conversation or would drop a part of it, and if it renders a turn
    that is trained otherwise than it looked when the model had to say it (see docs/data.md).
    """
    encoded = encode_chat(messages, tokenizer, train_on=train_on, tools=tools, template_kwargs=template_kwargs)
    return from_tokens(encoded.tokens, encoded.weights)


def completion(
    prompt: str,
    completion: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    add_eos: bool = True,
) -> Datum:
    """The datum of a prompt and its completion, without a chat template. The completion has weight 1, the prompt 0.

    The two are encoded apart, as they are when the prompt is sampled from: a blank between them belongs to the start
    of the completion. The tokenizer's end-of-text token is put behind, so that the model learns to stop, unless
    `add_eos` is False or it is there already. `train_on="all"`: the prompt has a loss too.
    """
    encoded = encode_completion(prompt, completion, tokenizer, train_on=train_on, add_eos=add_eos)
    return from_tokens(encoded.tokens, encoded.weights)


def chat_prompt(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ModelInput:
    """What to sample from so that the assistant answers: the conversation so far, then the generation prompt."""
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    template.check(messages)
    text = template.render(messages, generation_prompt=True)
    _refuse_lost_text(messages, text, trained=[])
    return ModelInput.from_ints(tokenizer(text, add_special_tokens=False)["input_ids"])


def turns(messages: Messages) -> list[Messages]:
    """For each assistant turn, the conversation up to its end. Use `chat(..., train_on="last")` on each."""
    return [messages[: index + 1] for index, message in enumerate(messages) if message.get("role") == "assistant"]


# ---------------------------------------------------------------------------------------------- tokens and weights


@dataclass(frozen=True)
class Encoded:
    """`weights[i]` is 1 if token i has a loss, else 0."""

    tokens: list[int]
    weights: list[float]

    @property
    def trained_tokens(self) -> int:
        return int(sum(self.weights[1:]))

    def first(self, length: int) -> Encoded:
        return Encoded(self.tokens[:length], self.weights[:length])


def encode_chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Encoded:
    check_train_on(train_on)
    template = ChatTemplate(tokenizer, tools, template_kwargs)
    template.check(messages)
    text = template.render(messages)
    encoded = _weighted(template, messages, text, train_on)
    trained = {"assistant": _assistant_turns(messages), "last": _assistant_turns(messages)[-1:], "all": []}[train_on]
    _refuse_lost_text(messages, text, trained)
    return encoded


def encode_completion(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase, *, train_on: TrainOn, add_eos: bool
) -> Encoded:
    check_train_on(train_on)
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            raise UserError(f"'{name}' must be text, not {type(value).__name__}; conversations go into 'messages'")
    if not completion:
        raise UserError("the completion is empty, so there is nothing to train on")
    before: list[int] = tokenizer.encode(prompt)
    after: list[int] = tokenizer.encode(completion, add_special_tokens=False)
    if add_eos:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-text token; say add_eos=False, or set tokenizer.eos_token")
        if after[-1] != tokenizer.eos_token_id:
            after.append(tokenizer.eos_token_id)
    return Encoded(before + after, [1.0 if train_on == "all" else 0.0] * len(before) + [1.0] * len(after))


def check_train_on(train_on: str) -> None:
    if train_on not in get_args(TrainOn):
        raise UserError(f"train_on must be one of {', '.join(map(repr, get_args(TrainOn)))}, not {train_on!r}")


class ChatTemplate:
    """A tokenizer's chat template with what it is rendered with."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template: set tokenizer.chat_template, or use prompts and completions"
            )
        if not tokenizer.is_fast:
            raise UserError(f"{type(tokenizer).__name__} does not say which text a token stands for; use a fast one")
        self.tokenizer = tokenizer
        self.arguments = {**(template_kwargs or {}), "tools": list(tools) if tools else None}
        self.source: str = tokenizer.get_chat_template(tools=self.arguments["tools"])
        self.marks_generation = GENERATION_BLOCK.search(self.source) is not None

    def check(self, messages: Messages) -> None:
        """Refuse what is no conversation, and what the template would leave out without a word."""
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise UserError("'messages' must be a list of at least one message, each with a role and its content")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError(f"message {index} must be an object with a 'role'")
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise UserError(f"message {index}: 'content' must be text, not {type(content).__name__}")
            if message.get("weight") is not None:
                raise UserError(
                    f"message {index} has a 'weight', which is not supported; see train_on, or leave it out"
                )
            for key in MEANT_TO_BE_READ:
                if message.get(key) and key not in self.source:
                    raise UserError(f"message {index}: the chat template has no place for '{key}' and would drop it")
        if self.arguments["tools"] and "tools" not in self.source:
            raise UserError("the chat template has no place for 'tools' and would drop them")

    def render(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        return self._apply(messages, add_generation_prompt=generation_prompt, tokenize=False)  # type: ignore[no-any-return]

    def encode(self, messages: Messages, *, assistant_mask: bool = False) -> Any:
        return self._apply(messages, return_dict=True, return_assistant_tokens_mask=assistant_mask)

    def _apply(self, messages: Messages, **how: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(list(messages), **self.arguments, **how)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(f"the chat template cannot render the conversation: {error}") from error


def _assistant_turns(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _refuse_lost_text(messages: Messages, text: str, trained: Sequence[int]) -> None:
    """Raise if the template has left out text of the user, the system, or a message whose index is in `trained`.

    Blanks do not count: templates trim. Assistant turns that are only context may lose their thinking.
    """
    rendered = _without_blanks(text)
    for index, message in enumerate(messages):
        if message["role"] in ("user", "system") or index in trained:
            for key in ("content", "reasoning_content", "thinking"):
                if isinstance(message.get(key), str) and _without_blanks(message[key]) not in rendered:
                    raise UserError(f"the chat template leaves out the '{key}' of message {index}, or changes it")


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _weighted(template: ChatTemplate, messages: Messages, text: str, train_on: TrainOn) -> Encoded:
    if train_on == "all":
        tokens = template.encode(messages)["input_ids"]
        return Encoded(tokens, [1.0] * len(tokens))
    if not _assistant_turns(messages):
        raise UserError("no message is from the assistant, so there is nothing to train on")
    if template.marks_generation:
        return _as_marked(template, messages, last_only=train_on == "last")
    spans = _assistant_spans(template, messages, text, last_only=train_on == "last")
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # A token that begins before a span joins the generation prompt with the answer. The model never has to say it.
    weights = [
        1.0 if any(first <= start < last and first < end for first, last in spans) else 0.0
        for start, end in encoding["offset_mapping"]
    ]
    return Encoded(encoding["input_ids"], weights)


def _as_marked(template: ChatTemplate, messages: Messages, *, last_only: bool) -> Encoded:
    """Weights as the template's own `generation` blocks say."""
    encoding = template.encode(messages, assistant_mask=True)
    weights = [float(marked) for marked in encoding["assistant_masks"]]
    if not any(weights):
        raise UserError("the chat template marks nothing of the conversation as the assistant's")
    if last_only:
        end = len(weights) - weights[::-1].index(1.0)
        start = end
        while start > 0 and weights[start - 1] == 1.0:
            start -= 1
        weights = [0.0] * start + weights[start:]
    return Encoded(encoding["input_ids"], weights)


def _assistant_spans(
    template: ChatTemplate, messages: Messages, text: str, *, last_only: bool
) -> list[tuple[int, int]]:
    """Where in `text`, the whole conversation, the assistant's turns are, as (first, last + 1) character.

    A turn begins where the generation prompt behind what came before ends, and it ends where the conversation up to
    it does. Both must be true beginnings of `text`: only then is what is trained what the model has to say.
    """
    special_tokens = tuple(str(token) for token in template.tokenizer.added_tokens_decoder.values() if token.special)
    indices = _assistant_turns(messages)
    spans = []
    for index in indices[-1:] if last_only else indices:
        if index == 0:
            raise UserError("the conversation begins with the assistant: there is no prompt that it could answer")
        prompt = template.render(messages[:index], generation_prompt=True)
        through = template.render(messages[: index + 1])
        if not text.startswith(through):
            raise UserError(
                f"the chat template renders message {index} otherwise when more messages follow (some drop the "
                f"thinking of earlier turns), so the model would learn what it never has to say. {SPLIT_TURNS}"
            )
        if not through.startswith(prompt):
            at = next((i for i, (a, b) in enumerate(zip(prompt, through, strict=False)) if a != b), len(through))
            raise UserError(
                f"the generation prompt before message {index} ends with {prompt[max(0, at - 20) :]!r}, but with the "
                f"message the chat template writes {through[max(0, at - 20) : len(prompt)]!r} there. If that is about "
                "thinking, give the message its 'reasoning_content', or the template other template_kwargs; or set "
                "tokenizer.chat_template to one that marks the assistant's part with {% generation %}"
            )
        # Behind the end-of-turn token the model says nothing more: the line break there is the template's.
        turn = through[len(prompt) :]
        if turn.rstrip().endswith(special_tokens):
            turn = turn.rstrip()
        spans.append((len(prompt), len(prompt) + len(turn)))
    return spans
