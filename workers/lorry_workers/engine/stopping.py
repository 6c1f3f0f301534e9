"""When a sampled sequence ends, and the text it stands for."""

from __future__ import annotations

from typing import Any

from lorry_jobs.errors import UserError
from lorry_jobs.types import SamplingParams


class StopRule:
    """Ends a sequence at a stop token, or at a stop string wherever its characters lie among the tokens."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], tokenizer: Any) -> None:
        self.token_ids = frozenset(params.all_stop_token_ids)
        if not params.ignore_eos:
            self.token_ids |= frozenset(eos_token_ids)
        self.strings = params.stop_strings
        self.tokenizer = tokenizer
        if self.strings and tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none")
        # A string of n characters has at most 4n bytes, and a token has at least one of them. The rest of the
        # window keeps a match away from its start, where decoding may cut a character or drop a space.
        self.window = 4 * max((len(string) for string in self.strings), default=0) + 8

    def ends(self, tokens: list[int]) -> bool:
        """Whether the last of `tokens` ends the sequence. Asked after every token."""
        if tokens[-1] in self.token_ids:
            return True
        if not self.strings:
            return False
        tail = self._decode(tokens[-self.window :], keep_special=True)
        return any(string in tail for string in self.strings)

    def text(self, tokens: list[int], *, stopped: bool) -> str | None:
        """What `tokens` say, up to whatever stopped them."""
        if self.tokenizer is None:
            return None
        if stopped and tokens[-1] in self.token_ids:
            return self._decode(tokens[:-1])
        if stopped:
            text = self._decode(tokens, keep_special=True)
            found = [text.find(string) for string in self.strings if string in text]
            if found:
                return text[: min(found)]
        return self._decode(tokens)

    def _decode(self, tokens: list[int], *, keep_special: bool = False) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False)
