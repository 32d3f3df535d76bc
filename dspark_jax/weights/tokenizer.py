"""Text to token ids and back, with the model's own chat template and a mask of what the model itself would emit."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from dspark_jax.config import ConfigError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class ChatTokenizer:
    """A fast tokenizer of transformers behind the few calls this project needs.

    `add_bos` says that a rendered conversation must open with the bos token even where the template leaves it out
    (the GGUF key tokenizer.ggml.add_bos_token).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, add_bos: bool = False) -> None:
        if add_bos and tokenizer.bos_token is None:
            raise ConfigError("tokenizer: add_bos is set, but there is no bos token")
        self.tokenizer = tokenizer
        self.add_bos = add_bos
        self.special_ids = tuple(sorted(set(tokenizer.all_special_ids) | _special_added(tokenizer)))

    @property
    def template_hash(self) -> str:
        """First 16 hexadecimal characters of the template's sha256: drafters are tied to one template."""
        return hashlib.sha256(str(self.tokenizer.chat_template or "").encode()).hexdigest()[:16]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`, nothing added. Special tokens spelt out in it are plain text unless `allow_special`."""
        encoding = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not allow_special)
        return list(encoding["input_ids"])

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """Text of `ids`; special tokens are left out unless `keep_special`."""
        text = self.tokenizer.decode(
            [int(token) for token in ids],
            skip_special_tokens=not keep_special,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        thinking: bool | None = None,
        tools: Tools = None,
    ) -> str:
        """The conversation as text, by the chat template. `thinking` is the template's own `enable_thinking`, for those
        that have it; None: its default. `tools` are JSON schemas of what the model may call. Raises ConfigError where
        the template cannot."""
        if not self.tokenizer.chat_template:
            raise ConfigError("tokenizer: the model has no chat template, so it cannot render conversations")
        switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **switch,
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._template}: cannot render the conversation: {error}") from error
        bos = self.tokenizer.bos_token
        return f"{bos}{text}" if self.add_bos and not str(text).startswith(str(bos)) else str(text)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        thinking: bool | None = None,
        tools: Tools = None,
    ) -> list[int]:
        """Ids of the rendered conversation, open for an answer when `add_generation_prompt`."""
        return self.encode(self.render(messages, add_generation_prompt, thinking, tools), allow_special=True)

    def chat_with_mask(
        self, messages: Sequence[Message], thinking: bool | None = None, tools: Tools = None
    ) -> tuple[list[int], list[bool]]:
        """Ids of a conversation, and for each whether the model emits it: an answer's content and end-of-turn token.

        Each answer is tokenised apart from the prompt before it, as in generation, where no token can join the two. An
        answer that the template renders otherwise once it is history, as templates do that drop its thoughts, is
        context and not masked in: the model never emitted that text. Raises ConfigError for a conversation that begins
        with an answer, and where the template leaves no answer as it was or closes none with a special token.
        """
        if messages and messages[0].get("role") == "assistant":
            raise ConfigError("conversation: begins with an assistant turn, expected a system or user turn")
        full = self.render(messages, False, thinking, tools)
        ids: list[int] = []
        mask: list[bool] = []
        done, answers = 0, [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
        for turn in answers:
            before = self.render(messages[:turn], True, thinking, tools)
            after = self.render(messages[: turn + 1], False, thinking, tools)
            if not (after.startswith(before) and full.startswith(after) and len(before) >= done):
                continue
            end = len(before) + self._end_of_turn(after[len(before) :])
            for text, emitted in ((full[done : len(before)], False), (full[len(before) : end], True)):
                piece = self.encode(text, allow_special=True)
                ids += piece
                mask += [emitted] * len(piece)
            done = end
        if answers and not done:
            raise ConfigError(f"{self._template}: rewrites the turns before or after every answer, so no mask is exact")
        rest = self.encode(full[done:], allow_special=True)
        return ids + rest, mask + [False] * len(rest)

    def shows_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Whether the template tells the model of its tools: many know none and leave them out without a word."""
        return self.render(messages, False, None, tools) != self.render(messages, False)

    @property
    def _template(self) -> str:
        return f"chat template {self.template_hash}"

    def _end_of_turn(self, answer: str) -> int:
        """Characters of a rendered answer up to and including the special token that closes it."""
        encoding = self.tokenizer(answer, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        ends = [stop for token, (_, stop) in pairs if token in self.special_ids]
        if not ends or answer[ends[-1] :].strip():
            raise ConfigError(f"{self._template}: does not close the assistant's turn with a special token")
        return ends[-1]


def _special_added(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
