"""Rendering and encoding of conversations such that no message can inject control tokens.

A chat template marks turns with control tokens (`<|im_start|>`, `<|eot_id|>`, ...). A tokenizer finds these anywhere in
a rendered string, so a prompt that contains the text of one could end its own turn or speak as the system. Here control
tokens come only from the template. The text of a control token in a message is encoded as plain characters.

In this module an answer is an assistant turn, and its header (the generation prompt) is the text that the template
writes before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.data.content_check import REASONING_FIELDS, ContentCheck, remove_whitespace
from skyrl_train.data.control_tokens import ASSISTANT_PLACEHOLDER, MarkingTemplate, get_marking_template
from skyrl_train.data.messages import Message, continues_last_message, normalize_message
from skyrl_train.data.reasoning import CLOSE_MARKER_PATTERN, CLOSE_MARKERS, final_answer, find_trailing_opening
from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.data.token_texts import decode_continuation
from skyrl_train.data.tool_formats import TOOL_FORMATS, ToolFormat, forced_call_prefix, parse_answer
from skyrl_train.errors import DataError

_OPENING_TOKENS = 64
"""Number of tokens at the end of a prompt that are searched for the opening of a block of reasoning. It is more than
any opening has."""


class RenderMode(StrEnum):
    """End of a rendered conversation."""

    OPEN = "open"
    """The header of a new answer follows the messages."""
    CONTINUE = "continue"
    """The text ends with the content of the last message, which the model continues."""
    CLOSED = "closed"
    """The text ends with the last message."""
    ANSWER = "answer"
    """The last message is rendered as the answer that the model writes after the open conversation before it."""


@dataclass(slots=True)
class RenderedPrefix:
    """Hash of a conversation's last rendered text, including the header of an answer.

    It shows whether a longer rendering of the same conversation begins with that text, without keeping the texts of
    thousands of conversations.
    """

    num_messages: int | None = None
    """Number of rendered messages; None before the first rendering."""
    length: int = 0
    """Length of the text (characters)."""
    text_hash: int = 0

    def record(self, num_messages: int, text: str) -> None:
        """Replace the recorded rendering.

        Args:
            num_messages: Number of rendered messages.
            text: The rendered text.
        """
        self.num_messages, self.length, self.text_hash = num_messages, len(text), hash(text)

    def is_prefix_of(self, num_messages: int, text: str) -> bool:
        """True if the recorded rendering has `num_messages` messages and `text` begins with its text."""
        return self.num_messages == num_messages and hash(text[: self.length]) == self.text_hash


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    prefix: RenderedPrefix | None = None,
    continue_final_message: bool | None = None,
) -> list[int]:
    """Return the token ids of a prompt: the conversation and the header of the model's answer.

    These are the ids of `apply_chat_template(messages, add_generation_prompt=True)`, except where a message contains
    the text of a control token. If the assistant wrote the last message, they are those of
    `continue_final_message=True`, and the model continues that message.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.
        prefix: Record of the rendering, which is updated for a later `render_continuation`; None keeps no record.
        continue_final_message: True continues the last message, False begins a new answer. None continues a last
            message of the assistant without tool calls.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    if continue_final_message is None:
        continue_final_message = continues_last_message(messages)
    text = chat.render_checked(RenderMode.CONTINUE if continue_final_message else RenderMode.OPEN)
    if prefix is not None and not continue_final_message:
        prefix.record(len(messages), text)
    return chat.encode(text)


def adapt_reasoning(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[Message]:
    """Return messages whose reasoning is in the field that the template reads. It is dropped if there is none.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation, with reasoning in the field `reasoning_content`.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.
    """
    source = get_marking_template(tokenizer, chat_template_kwargs).source or ""
    field = next((name for name in REASONING_FIELDS if re.search(rf"""[.'"]{name}\b""", source)), None)
    adapted = []
    for message in messages:
        reasoning = message.get("reasoning_content")
        if reasoning and field != "reasoning_content":
            message = {name: value for name, value in message.items() if name != "reasoning_content"}
            if field is not None:
                message[field] = reasoning
        adapted.append(message)
    return adapted


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = RenderMode.OPEN,
) -> str:
    """Return the rendered text of a conversation.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.
        mode: A RenderMode or its value.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
        ValueError: The mode is unknown.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    return chat.template.controls.unmark(chat.render_checked(RenderMode(mode)))


def render_continuation(
    tokenizer: Any,
    messages: Sequence[Message],
    assistant_indices: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    verbatim: bool = False,
    prefix: RenderedPrefix | None = None,
) -> list[int] | None:
    """Return the token ids between the model's last answer and its next one.

    These are the end of the last answer's turn, the messages after it, and the header of the next answer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        assistant_indices: Indices of the messages that the model sampled, in order. Their tokens are known, so a
            placeholder is rendered in place of each.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.
        verbatim: Render the texts of the sampled messages instead of placeholders, for templates that treat some texts
            (reasoning) specially.
        prefix: Record of the last rendering of this conversation under the same options, which is updated. The messages
            before the last answer are not rendered again if the new text begins with it. None renders the complete
            conversation.

    Returns:
        The ids, or None if the template renders the messages before the last answer, or that answer, differently than
        before.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
    """
    if not verbatim:
        sampled = set(assistant_indices)
        messages = [
            {**message, "content": ASSISTANT_PLACEHOLDER} if index in sampled else message
            for index, message in enumerate(messages)
        ]
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    between = chat.after_answer(assistant_indices[-1], prefix)
    return None if between is None else chat.encode(between)


def template_rewrites_history(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """True if the template renders earlier turns differently once others follow, for example without reasoning.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template_kwargs: Variables of the template; None to set none.

    Raises:
        DataError: The template rejects a conversation of user and assistant.
    """
    for answer in ("sure", "<think>\nwell\n</think>\n\nsure"):
        turns = ("user", "one"), ("assistant", answer), ("user", "two"), ("assistant", answer), ("user", "three")
        messages = [{"role": role, "content": content} for role, content in turns]
        chats = [Chat.from_messages(tokenizer, messages[:count], chat_template_kwargs) for count in (3, 5)]
        if any(chat.after_answer(len(chat.messages) - 2) is None for chat in chats):
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without a template. Texts of control tokens are encoded as plain characters.

    Raises:
        DataError: The text contains half a surrogate pair, or cannot be encoded without control tokens.
    """
    return get_marking_template(tokenizer).controls.encode(tokenizer, text)


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a prompt of plain text. Texts of control tokens in it become control tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: The prompt.
        add_special_tokens: Add the tokens that the tokenizer writes before a text, such as BOS, unless the prompt
            begins with them. Tokens after a text, such as EOS, are never added, because a completion continues it.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not add_special_tokens:
        return ids
    plain, full = (tokenizer("a", add_special_tokens=is_added)["input_ids"] for is_added in (False, True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    prefix: list[int] = full[: next(starts, 0)]
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def decode_response(tokenizer: Any, ids: ArrayLike) -> str:
    """Return the text of a model's turn without control tokens. `skip_special_tokens` alone would keep some markers.

    Markers of reasoning are kept even if they are control tokens, because `reasoning.final_answer` needs them.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Token ids [L] of the turn.
    """
    tokens, skip_special_tokens = _read_tokens(tokenizer, ids)
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def decode_answer(tokenizer: Any, ids: ArrayLike, tool_format: ToolFormat | None) -> str:
    """Return the text of a model's turn for `tool_formats.parse_answer`.

    It is the text of `decode_response`, with the markers of tool calls even if they are control tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Token ids [L] of the turn.
        tool_format: Format of the tool calls, or None.
    """
    tokens, skip_special_tokens = _read_tokens(tokenizer, ids, tool_format.markers if tool_format else ())
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def decode_with_calls(tokenizer: Any, ids: ArrayLike, tool_format: ToolFormat | None) -> tuple[str, str]:
    """Return the texts of `decode_response` and of `decode_answer`, without decoding twice if they are equal.

    See `decode_answer` for the arguments.
    """
    plain = _read_tokens(tokenizer, ids)
    with_markers = _read_tokens(tokenizer, ids, tool_format.markers) if tool_format else plain
    response = str(tokenizer.decode(plain[0], skip_special_tokens=plain[1]))
    if with_markers == plain:
        return response, response
    return response, str(tokenizer.decode(with_markers[0], skip_special_tokens=with_markers[1]))


def _read_tokens(tokenizer: Any, ids: ArrayLike, kept_markers: Collection[str] = ()) -> tuple[list[int], bool]:
    """Return the tokens of a turn's text, and the argument `skip_special_tokens` to decode them with."""
    tokens, controls = to_token_array(ids), get_marking_template(tokenizer).controls
    dropped = controls.find_control_tokens(tokens)
    kept = [*controls.reasoning, *(id for id, name in controls.names.items() if name in kept_markers)]
    markers = np.isin(tokens, kept) if kept else np.zeros(len(tokens), bool)
    if not markers.any():
        return tokens[~dropped].tolist(), True
    if tokenizer.unk_token_id is not None:  # it is a special token, but not a control token
        dropped = dropped | (tokens == tokenizer.unk_token_id)
    return tokens[markers | ~dropped].tolist(), False


def get_reasoning_opening(tokenizer: Any, prompt: Sequence[int] | Tokens) -> str:
    """Return the end of a prompt's text that opens reasoning for the model, including white space; "" if it opens none.

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompt: Token ids of the prompt.
    """
    return find_trailing_opening(
        str(tokenizer.decode(to_token_array(prompt[-_OPENING_TOKENS:]), skip_special_tokens=False))
    )


def message_content(tokenizer: Any, text: str, reasoning_opening: str = "") -> str:
    """Return the text of a model's turn as the content of a message, for chat templates and clients.

    Reasoning remains in the content, unless its markers are control tokens. A message cannot contain these, so the
    content is then the final answer alone.

    Args:
        tokenizer: A Hugging Face tokenizer.
        text: Text of the turn, as `decode_response` returns it.
        reasoning_opening: Result of `get_reasoning_opening` for the prompt of the turn.
    """
    markers = get_marking_template(tokenizer).controls.reasoning.values()
    return (
        final_answer(reasoning_opening + text)
        if any(marker in reasoning_opening + text for marker in markers)
        else text
    )


def get_message_text(message: Message) -> str:
    """Return the text of a message: its content, or the joined texts of its parts without images and the like."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def decode_completion(tokenizer: Any, ids: ArrayLike, prompt: ArrayLike) -> str:
    """Decode a completion as the continuation of a prompt of plain text.

    Unlike in the result of `decode_response`, a space at the beginning is kept, unless the prompt ends with a control
    token.

    Args:
        tokenizer: A Hugging Face tokenizer.
        ids: Token ids [L] of the completion.
        prompt: Token ids of the prompt.
    """
    last = to_token_array(prompt)[-1:].tolist()
    if not last or last[0] in get_marking_template(tokenizer).controls.names:
        return decode_response(tokenizer, ids)
    tokens, skip_special_tokens = _read_tokens(tokenizer, ids)
    return decode_continuation(tokenizer, tokens, skip_special_tokens=skip_special_tokens)


def get_undecoded_tokens(tokenizer: Any, tool_format: ToolFormat | None = None) -> Collection[int]:
    """Return the ids that `decode_answer` removes from a text: control tokens, except markers of reasoning and calls.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tool_format: Format of the tool calls; with None these are the ids that `decode_response` removes.
    """
    controls = get_marking_template(tokenizer).controls
    removed = controls.names.keys() - controls.reasoning.keys()
    if tool_format is None:
        return removed
    return {id for id in removed if controls.names[id] not in tool_format.markers}


def is_control_token(tokenizer: Any, token: int) -> bool:
    """True if a token id is a control token, which the text of a message never encodes to."""
    return token in get_marking_template(tokenizer).controls.ids


def render_messages(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a conversation without the header of a further answer, for example for a reward model.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    return chat.encode(chat.render_checked(RenderMode.CLOSED))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a complete conversation, and a mask of the tokens that the assistant must generate.

    The mask covers each answer from the end of its header to the end of its turn. It includes the end-of-turn token, so
    that the model is trained to stop, and nothing after it, such as ChatML's line break. Headers and answers are
    encoded separately, as in a rollout.

    If the template rewrites earlier turns when later ones follow, the mask covers the last answer alone; see
    `render_sft_sequences`.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.

    Returns:
        Token ids [L] and mask [L].

    Raises:
        DataError: The template rejects the messages, does not write all of their content, or rewrites earlier turns of
            a conversation that does not end with an answer.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    parts = chat.append_only()
    if parts is None and messages[-1]["role"] != "assistant":
        chat.render_checked(RenderMode.CLOSED)
        raise DataError(
            "the chat template renders earlier messages differently once others follow; end the conversation with the "
            "answer to train on."
        )
    return _encode_masked(chat, parts if parts is not None else _last_answer(chat))


def render_sft_sequences(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[tuple[list[int], list[bool]]]:
    """Return sequences that train on every answer of a conversation.

    Usually this is one sequence, as in `render_conversation`. If the template rewrites earlier turns, for example
    without their reasoning, every answer is a separate sequence in the context that the model has when it answers.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.

    Returns:
        Token ids [L] and mask [L] of each sequence.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    parts = chat.append_only()
    if parts is not None:
        return [_encode_masked(chat, parts)]
    ends = [index + 1 for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
    chats = [replace(chat, messages=chat.messages[:end]) for end in ends]
    return [_encode_masked(prefix, _last_answer(prefix)) for prefix in chats]


def _last_answer(chat: Chat) -> list[tuple[str, str]]:
    """Return [(context, answer)] of the last message. Raises DataError if a part of their content is missing."""
    context, answer = chat.context_and_answer()
    chat.check(RenderMode.ANSWER, context + answer, [len(chat.messages) - 1])
    return [(context, answer)]


def _encode_masked(chat: Chat, parts: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the ids of contexts and answers, and the mask of the answers up to the ends of their turns."""
    ids: list[int] = []
    mask: list[bool] = []
    for context, text in parts:
        context_ids, answer_ids = chat.encode(context), chat.encode(text) if text else []
        ends = [index for index, token in enumerate(answer_ids) if token in chat.template.controls.ids]
        num_trained = ends[-1] + 1 if ends else len(answer_ids)
        ids += context_ids + answer_ids
        mask += [False] * len(context_ids) + [True] * num_trained + [False] * (len(answer_ids) - num_trained)
    return ids, [False, *mask[1:]] if mask else mask  # nothing precedes the first token


def render_generation_prompt(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of the header of an answer after a conversation.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.

    Raises:
        DataError: The template rejects the messages, or renders them differently before an answer.
    """
    chat = Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    before, after = chat.text(len(messages)), chat.text(len(messages), add_generation_prompt=True)
    if not after.startswith(before):
        raise DataError(
            "the chat template renders a conversation differently when an answer follows it. Use a template whose "
            "rendering of a message does not depend on later ones."
        )
    return chat.encode(after[len(before) :])


@dataclass(frozen=True)
class Chat:
    """Messages, and the template that renders them as text with marks in place of control tokens."""

    tokenizer: Any
    messages: list[Message]
    options: dict[str, Any]
    template: MarkingTemplate
    form: MessageFormat

    @classmethod
    def from_messages(cls, tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any] | None) -> Chat:
        """Return the conversation in normal form, with its template. Raises DataError for messages that are invalid."""
        template = get_marking_template(tokenizer, options)
        normal = [normalize_message(message, index) for index, message in enumerate(messages)]
        return cls(tokenizer, normal, dict(options or {}), template, detect_message_format(tokenizer, template, normal))

    def text(self, count: int, add_generation_prompt: bool = False) -> str:
        """Return the rendered text of the first `count` messages, with marks."""
        return self._render(self.messages[:count], add_generation_prompt)

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self.template.render(self.tokenizer, self.form.apply(messages), add_generation_prompt, self.options)

    def render_checked(self, mode: RenderMode) -> str:
        """Render all messages. Raises DataError if the text does not contain all of their content."""
        text = self.render(mode)
        self.check(mode, text, [len(self.messages) - 1] if mode is RenderMode.CONTINUE else ())
        return text

    def check(self, mode: RenderMode, text: str, reasoning_indices: Collection[int] = ()) -> None:
        """Raise DataError unless `text`, rendered in a mode, contains all content of the messages.

        See `ContentCheck.find_missing_text` for `reasoning_indices`.
        """
        if description := self.find_missing_text(mode, text, reasoning_indices):
            raise DataError(description)

    def find_missing_text(self, mode: RenderMode, text: str, reasoning_indices: Collection[int] = ()) -> str | None:
        """Return a description of the content that `text` lacks, or None if it is complete."""
        return ContentCheck(self.template, mode, self._render_messages).find_missing_text(
            self.messages, self.options, text, reasoning_indices
        )

    def _render_messages(self, mode: str, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return replace(self, messages=list(messages), options=dict(options)).render(RenderMode(mode))

    def render(self, mode: RenderMode) -> str:
        """Return the rendered text of all messages, with marks."""
        if mode is RenderMode.CONTINUE:
            return self.text_to_continue()
        if mode is RenderMode.ANSWER:
            return "".join(self.context_and_answer())
        return self.text(len(self.messages), add_generation_prompt=mode is RenderMode.OPEN)

    def text_to_continue(self) -> str:
        """Return the rendered text up to the end of the last message's content.

        White space at the end of the content is kept unless the template trims contents, as in Transformers.
        """
        last = len(self.messages) - 1
        if self.messages[last].get("tool_calls"):
            raise DataError(f"messages[{last}] calls tools, so it is complete; only text can be continued.")
        content = self.messages[last]["content"] + ASSISTANT_PLACEHOLDER + " "
        text = self._render([*self.messages[:last], {**self.messages[last], "content": content}], False)
        before, placeholder, after = text.rpartition(ASSISTANT_PLACEHOLDER)
        if not placeholder:
            raise DataError(f"messages[{last}].content: the chat template does not write it, so nothing can follow it.")
        return before if after.startswith(" ") else before.rstrip()

    def before_answer(self, index: int) -> str:
        """Return the rendered text before the answer at an index, including its header.

        A template cannot render a header without messages. The header of a first message is therefore the header of an
        answer to a question or, if the template writes a different one or none there, the text before the answer.
        """
        if index:
            return self.text(index, add_generation_prompt=True)
        question = [{"role": "user", "content": "?"}]
        closed, opened = self._render(question, False), self._render(question, True)
        marked = self._render([{**self.messages[0], "content": ASSISTANT_PLACEHOLDER}], False)
        before, placeholder, _ = marked.partition(ASSISTANT_PLACEHOLDER)
        if not placeholder:
            raise DataError(
                "the chat template does not render the answer with which the conversation begins. Begin the "
                "conversation with a message of the user, or use another template."
            )
        header = opened[len(closed) :]
        if opened.startswith(closed) and header and header in before:
            return before[: before.rindex(header) + len(header)]
        return before

    def after_answer(self, index: int, prefix: RenderedPrefix | None = None) -> str | None:
        """Return the rendered text after the answer at an index, including the header of the next answer.

        Returns None if the template renders the text up to the end of the answer differently than before. White space
        around an answer is ignored, because templates may insert or remove it.
        """
        answer, prefix = self.messages[index]["content"], prefix or RenderedPrefix()
        after = self.text(len(self.messages), add_generation_prompt=True)
        if prefix.is_prefix_of(index, after):
            length: int | None = prefix.length
        else:
            before = self.before_answer(index)
            length = len(before) if after.startswith(before) else None
        prefix.record(len(self.messages), after)
        if length is None:
            return None
        rest = after[length:]
        if not rest.startswith(answer):
            rest, answer = rest.lstrip(), answer.strip()
        if not rest.startswith(answer):
            return None
        self.check(RenderMode.OPEN, after)
        return rest[len(answer) :]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of rendered text with marks."""
        return self.template.controls.encode(self.tokenizer, text)

    # -- Answers to train on -----------------------------------------------------------------------------------------

    def append_only(self) -> list[tuple[str, str]] | None:
        """Return (context, answer) of each answer and (rest, ""), whose concatenation is the rendered conversation.

        Returns None if the template rewrites earlier turns, or does not write all content.
        """
        full, parts, position = self.text(len(self.messages)), list[tuple[str, str]](), 0
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        for index in answers:
            before, after = self.before_answer(index), self.text(index + 1)
            if not (full.startswith(after) and after.startswith(before)):
                return None
            parts.append((full[position : len(before)], after[len(before) :]))
            position = len(after)
        if self.find_missing_text(RenderMode.CLOSED, full, answers):
            return None
        return [*parts, (full[position:], "")]

    def context_and_answer(self) -> tuple[str, str]:
        """Return the text that the model reads before the last message, and the text of that message.

        Raises DataError if the last message is not an answer, or if the template does not write it, or writes its
        reasoning in a way that does not follow the text that the model reads.
        """
        index, message = len(self.messages) - 1, self.messages[-1]
        if message["role"] != "assistant":
            raise DataError(
                f"messages[{index}] is a message of role {message['role']!r}, not an answer. Only answers of the "
                "assistant can be trained on."
            )
        before, after = self.before_answer(index), self.text(index + 1)
        has_reasoning = CLOSE_MARKER_PATTERN.search(message["content"])
        if after.startswith(before) and (
            not has_reasoning or remove_whitespace(message["content"]) in remove_whitespace(after[len(before) :])
        ):
            return before, after[len(before) :]
        if field := next((name for name in REASONING_FIELDS if message.get(name)), None):
            raise DataError(
                f"messages[{index}].{field}: the chat template writes this reasoning differently from what the model "
                "reads before its answer. Put it into content, as <think>...</think> before the answer."
            )
        has_calls_only = not message["content"].strip()  # some templates write calls only if the content is null
        marked = {key: value for key, value in message.items() if key != "tool_calls" or not has_calls_only}
        marked["content"] = ASSISTANT_PLACEHOLDER
        text = self._render([*self.messages[:index], marked], False)
        header, placeholder, end = text.rpartition(ASSISTANT_PLACEHOLDER)
        if has_calls_only:
            placeholder, end = placeholder if after.startswith(header) else "", after[len(header) :]
        if not placeholder:
            raise DataError(
                f"messages[{index}].content: the chat template does not write this answer. Put its text into content, "
                "or use another template."
            )
        return before, self._after_header(before, message["content"]) + end

    def _after_header(self, header: str, content: str) -> str:
        """Return the part of an answer after its header, which may open reasoning, for example with `<think>`.

        The closing marker is added before an answer without reasoning. Otherwise the model would be trained to answer
        inside its reasoning.
        """
        controls = self.template.controls
        opening = find_trailing_opening(controls.unmark(header))
        marker = opening.rstrip()
        if marker not in CLOSE_MARKERS:
            return content
        if content.lstrip().startswith(marker):
            return content.lstrip()[len(marker) :].removeprefix(opening[len(marker) :])
        return (
            content
            if CLOSE_MARKER_PATTERN.search(content)
            else f"\n{controls.mark(CLOSE_MARKERS[marker])}\n\n{content}"
        )


_NAME, _ARGUMENT = "call" + ASSISTANT_PLACEHOLDER, "argument" + ASSISTANT_PLACEHOLDER
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}
_PROBE_MESSAGES: list[Message] = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "x" * 9, "type": "function", "function": {"name": _NAME, "arguments": {"x": _ARGUMENT}}}],
    },
]


# -- The format in which a template expects messages -------------------------------------------------------------------


@dataclass(frozen=True)
class MessageFormat:
    """Format in which a chat template expects content and tool calls.

    Messages have a normal form everywhere else (`data.messages`). Few templates need another format: some multimodal
    templates write content only if it is a list of parts, and DeepSeek's templates write tool calls only if the content
    is null and join arguments as text.
    """

    content_as_parts: bool = False
    """True if content is a list of parts instead of text."""
    null_content: bool = False
    """True if the content of a message that consists of tool calls is null instead of the empty text."""
    arguments_as_text: bool = False
    """True if the arguments of tool calls are JSON text instead of mappings."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in this format. Raises DataError if a message cannot be normalized."""
        return [self._convert(normalize_message(message, index)) for index, message in enumerate(messages)]

    def _convert(self, message: Message) -> Message:
        content, calls = message["content"], message.get("tool_calls")
        changed: dict[str, Any] = {}
        if self.content_as_parts:
            changed["content"] = [{"type": "text", "text": content}]
        if calls and self.null_content and not content:
            changed["content"] = None
        if calls and self.arguments_as_text:
            changed["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return {**message, **changed} if changed else message


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function["arguments"], str):
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else dict(function)


def detect_message_format(tokenizer: Any, template: MarkingTemplate, messages: Sequence[Message]) -> MessageFormat:
    """Return the format of messages in which a template leaves no part out. The result is cached in the template.

    Args:
        tokenizer: The tokenizer of the template.
        template: The template.
        messages: The messages. If none has tool calls, only the format of content is detected.

    Returns:
        The format, or the default format if the template leaves parts out in every format.
    """
    key = "calls" if any(message.get("tool_calls") for message in messages) else "text"
    message_format: MessageFormat | None = template.cache.get(key)
    if message_format is None:
        detect = _detect_call_format if key == "calls" else _detect_text_format
        message_format = template.cache[key] = detect(tokenizer, template)
    return message_format


def detect_tool_format(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> ToolFormat | None:
    """Return the format in which a tokenizer's chat template writes tool calls.

    It is the format whose parser returns the call that the template writes. The result is cached for each template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat_template_kwargs: Variables of the template; None to set none.

    Returns:
        The format, or None if the template writes no tool calls, or writes them in an unknown format.
    """
    options = {**(chat_template_kwargs or {}), "tools": [_PROBE_TOOL]}
    template = get_marking_template(tokenizer, options)
    if "tool format" not in template.cache:
        template.cache["tool format"] = _detect_tool_format(tokenizer, template, options)
    found: ToolFormat | None = template.cache["tool format"]
    return found


def _detect_tool_format(tokenizer: Any, template: MarkingTemplate, options: dict[str, Any]) -> ToolFormat | None:
    if template.source is None:
        return None
    message_format = detect_message_format(tokenizer, template, _PROBE_MESSAGES)
    text, prompt, history = (
        _try_render(tokenizer, template, message_format, messages, options, is_open)
        for messages, is_open in ((_PROBE_MESSAGES, False), (_PROBE_MESSAGES[:1], True), (_PROBE_MESSAGES[:1], False))
    )
    answer = text.removeprefix(next((start for start in (prompt, history) if text.startswith(start)), ""))
    controls = template.controls
    found = []
    for tool_format in TOOL_FORMATS.values():
        decoded = controls.unmark(answer, {*controls.reasoning.values(), *tool_format.markers})
        calls = parse_answer(decoded, tool_format, tools=[_PROBE_TOOL]).tool_calls
        if [(call.name, call.arguments) for call in calls] == [(_NAME, {"x": _ARGUMENT})]:
            found.append(tool_format)
    exact = [entry for entry in found if forced_call_prefix(entry, _NAME) in controls.unmark(answer)]
    return next(iter([*exact, *found]), None)


def encode_forced_call(
    tokenizer: Any, tool_format: ToolFormat, name: str | None = None, reasoning_opening: str = ""
) -> list[int]:
    """Return the token ids with which an answer must begin so that it calls a tool.

    Append them to the prompt. Decode them together with the sampled tokens (`decode_answer`) to parse the answer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tool_format: Format of the tool calls.
        name: Name of the tool; None for any tool. Texts of control tokens in it are encoded as plain characters.
        reasoning_opening: Result of `get_reasoning_opening` for the prompt, whose reasoning is closed.

    Raises:
        DataError: The tokenizer can only encode the name as control tokens.
    """
    controls = get_marking_template(tokenizer).controls
    prefix = forced_call_prefix(tool_format, None if name is None else ASSISTANT_PLACEHOLDER, reasoning_opening)
    return controls.encode(tokenizer, controls.mark(prefix).replace(ASSISTANT_PLACEHOLDER, name or ""))


def _detect_text_format(tokenizer: Any, template: MarkingTemplate) -> MessageFormat:
    messages: list[Message] = [{"role": "user", "content": ASSISTANT_PLACEHOLDER}]
    candidates = [MessageFormat(content_as_parts=as_parts) for as_parts in (False, True)]
    for candidate in candidates:
        if ASSISTANT_PLACEHOLDER in _try_render(tokenizer, template, candidate, messages, {}):
            return candidate
    return candidates[0]


def _detect_call_format(tokenizer: Any, template: MarkingTemplate) -> MessageFormat:
    as_parts = detect_message_format(tokenizer, template, ()).content_as_parts
    candidates = [MessageFormat(as_parts, null, as_text) for as_text in (False, True) for null in (False, True)]
    for candidate in candidates:
        text = _try_render(tokenizer, template, candidate, _PROBE_MESSAGES, {"tools": [_PROBE_TOOL]})
        if _NAME in text and _ARGUMENT in text and "None" not in text:
            return candidate
    return candidates[0]


def _try_render(
    tokenizer: Any,
    template: MarkingTemplate,
    message_format: MessageFormat,
    messages: list[Message],
    options: dict[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    """Return the rendered text, or "" if the template rejects the format."""
    try:
        return template.render(tokenizer, message_format.apply(messages), add_generation_prompt, options)
    except DataError:
        return ""
