"""Conversations -> token ids, such that no message can inject control tokens.

A chat template marks turns with control tokens (`<|im_start|>`, `<|eot_id|>`, ...). A tokenizer finds these anywhere in
a rendered string, so a prompt that spells one could end its own turn or speak as the system. Here control tokens come
only from the template; if a message spells one, it is encoded as plain characters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.data.content_check import REASONING_FIELDS, ContentCheck, remove_whitespace
from skyrl_train.data.control_tokens import ASSISTANT_PLACEHOLDER, MarkingTemplate, get_marking_template
from skyrl_train.data.messages import Message, continues_last_message, normalize_message
from skyrl_train.data.reasoning import CLOSE_MARKER_PATTERN, CLOSE_MARKERS, final_answer, find_trailing_opening
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.token_texts import decode_continuation
from skyrl_train.errors import DataError

_OPENING_TOKENS = 64
"""Tokens at the end of a prompt that are searched for the opening of a block of reasoning; more than it ever has."""


@dataclass(slots=True)
class RenderedPrefix:
    """How a conversation was rendered last, up to the header of an answer: the next time its text begins so, unless the
    template writes it anew. That is all there is to know of the text, which may be long, of thousands of conversations.
    """

    num_messages: int | None = None
    length: int = 0
    text_hash: int = 0

    def record(self, num_messages: int, text: str) -> None:
        self.num_messages, self.length, self.text_hash = num_messages, len(text), hash(text)

    def is_prefix_of(self, num_messages: int, text: str) -> bool:
        """Whether so many messages were rendered, to what `text` begins with."""
        return self.num_messages == num_messages and hash(text[: self.length]) == self.text_hash


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    prefix: RenderedPrefix | None = None,
    continue_final_message: bool | None = None,
) -> list[int]:
    """Return the ids that the model's answer to `messages` follows.

    They are those of `apply_chat_template(messages, add_generation_prompt=True)`, except where a message spells a
    control token. After a last message of the assistant they are those of `continue_final_message=True`: the model goes
    on with that message.

    Args:
        chat_template_kwargs: Variables of the template; `tools` are definitions of tools.
        last: See `render_continuation`.
        continue_final_message: False begins a new answer after a last message of the assistant. None continues it.

    Raises:
        DataError: The template rejects the messages, or does not write all that they say.
    """
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    if continue_final_message is None:
        continue_final_message = continues_last_message(messages)
    text = chat.render_checked("continue" if continue_final_message else "open")
    if prefix is not None and not continue_final_message:
        prefix.record(len(messages), text)
    return chat.encode(text)


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "open",
) -> str:
    """Return `messages` as text: "open" for an answer, "continue" to go on with the last message, or "closed".

    Raises DataError if the template rejects the messages, or does not write all that they say.
    """
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    return chat.template.controls.unmark(chat.render_checked(mode))


def render_continuation(
    tokenizer: Any,
    messages: Sequence[Message],
    assistant_indices: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    verbatim: bool = False,
    prefix: RenderedPrefix | None = None,
) -> list[int] | None:
    """Ids between the last answer and the next one: the end of its turn, the messages after it, the next header.

    `answers` are the indices in `messages` of the model's own answers. Their tokens are kept elsewhere, so a
    placeholder is rendered for each; `verbatim` renders their texts, for templates that handle some text (reasoning)
    specially. `last`: of this conversation under the same options, whose earlier messages are not rendered again then.

    Returns None if the template now renders the messages before the last answer, or the answer itself, differently.
    Raises DataError if it rejects the messages.
    """
    if not verbatim:
        own = set(assistant_indices)
        messages = [
            {**message, "content": ASSISTANT_PLACEHOLDER} if place in own else message
            for place, message in enumerate(messages)
        ]
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    between = chat.after_answer(assistant_indices[-1], prefix)
    return None if between is None else chat.encode(between)


def template_rewrites_history(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template renders earlier turns differently once a conversation continues; some drop old reasoning.

    Raises DataError if it rejects a conversation of user and assistant.
    """
    for answer in ("sure", "<think>\nwell\n</think>\n\nsure"):
        turns = ("user", "one"), ("assistant", answer), ("user", "two"), ("assistant", answer), ("user", "three")
        messages = [{"role": role, "content": content} for role, content in turns]
        chats = [_Chat.from_messages(tokenizer, messages[:count], chat_template_kwargs) for count in (3, 5)]
        if any(chat.after_answer(len(chat.messages) - 2) is None for chat in chats):
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text without any template; control tokens spelt in it are encoded as plain characters."""
    return get_marking_template(tokenizer).controls.encode(tokenizer, text)


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a prompt of plain text, in which control tokens may be spelt.

    Args:
        add_special_tokens: Puts before it what the tokenizer puts before texts, such as BOS, unless it begins so. What
            the tokenizer puts after texts, such as EOS, is never added, as a completion continues the prompt.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not add_special_tokens:
        return ids
    plain, full = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    prefix: list[int] = full[: next(starts, 0)]
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def decode_response(tokenizer: Any, ids: ArrayLike) -> str:
    """Return the text of a model's turn without control tokens; `skip_special_tokens` alone keeps some role markers.

    Markers of reasoning stay, also those that are control tokens: `reasoning.final_answer` finds the answer by them.
    """
    tokens, skip_special_tokens = _read_tokens(tokenizer, ids)
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def _read_tokens(tokenizer: Any, ids: ArrayLike) -> tuple[list[int], bool]:
    """Return the tokens that are a turn's text, and whether special ones among them are to be skipped."""
    tokens, controls = to_token_array(ids), get_marking_template(tokenizer).controls
    dropped = controls.find_control_tokens(tokens)
    markers = np.isin(tokens, list(controls.reasoning)) if controls.reasoning else np.zeros(len(tokens), bool)
    if not markers.any():
        return tokens[~dropped].tolist(), True
    if tokenizer.unk_token_id is not None:  # special, but no control token
        dropped = dropped | (tokens == tokenizer.unk_token_id)
    return tokens[markers | ~dropped].tolist(), False


def get_reasoning_opening(tokenizer: Any, prompt: Sequence[int]) -> str:
    """Return the end of a prompt's text if it opens reasoning for the model, white space included; else ""."""
    return find_trailing_opening(str(tokenizer.decode(prompt[-_OPENING_TOKENS:], skip_special_tokens=False)))


def message_content(tokenizer: Any, text: str, reasoning_opening: str = "") -> str:
    """Return the text of a model's turn as the content of a message, for chat templates and clients.

    Reasoning stays in it, unless its markers are control tokens, which no message can contain: then the content is the
    final answer alone.

    Args:
        opened: What `opened_reasoning` returned for the answer's prompt.
    """
    markers = get_marking_template(tokenizer).controls.reasoning.values()
    return (
        final_answer(reasoning_opening + text)
        if any(marker in reasoning_opening + text for marker in markers)
        else text
    )


def get_message_text(message: Message) -> str:
    """The text of a message, without its other content."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def decode_completion(tokenizer: Any, ids: ArrayLike, prompt: ArrayLike) -> str:
    """Return the text, as `decode_response` reads it, that continues a prompt of plain text.

    It may begin with a space, which `decode_response` drops with tokenizers that write spaces before words. After a
    control token a new text begins.
    """
    last = to_token_array(prompt)[-1:].tolist()
    if not last or last[0] in get_marking_template(tokenizer).controls.names:
        return decode_response(tokenizer, ids)
    tokens, skip_special_tokens = _read_tokens(tokenizer, ids)
    return decode_continuation(tokenizer, tokens, skip_special_tokens=skip_special_tokens)


def get_undecoded_tokens(tokenizer: Any) -> Collection[int]:
    """Return the ids of tokens that `decode_response` leaves out of a text."""
    controls = get_marking_template(tokenizer).controls
    return controls.names.keys() - controls.reasoning.keys()


def is_control_token(tokenizer: Any, token: int) -> bool:
    """Whether a token is a control token, which no text encodes to."""
    return token in get_marking_template(tokenizer).controls.ids


def render_messages(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the ids of `messages` without an answer's header, for a model that reads but does not answer.

    Raises DataError if the template rejects the messages, or does not write all that they say.
    """
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    return chat.encode(chat.render_checked("closed"))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Return the ids of a finished conversation, and a mask of those that the assistant must produce.

    The mask covers the text between an answer's header and the end of its turn, including the token that ends the turn
    (a model that never learns it never stops), but nothing after that token, such as ChatML's line break. Headers and
    answers are encoded separately, as in a rollout.

    Where the template rewrites earlier turns when later ones follow, this is the sequence of the last answer alone; see
    `render_demonstrations`.

    Returns:
        (ids [L], mask [L])

    Raises:
        DataError: The template rejects the messages, does not write all that they say, or rewrites earlier turns of a
            conversation that does not end with an answer.
    """
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    parts = chat.append_only()
    if parts is None and messages[-1]["role"] != "assistant":
        chat.render_checked("closed")
        raise DataError(
            "the chat template renders earlier messages differently once others follow; end the conversation with the "
            "answer to train on."
        )
    return _encode_masked(chat, parts if parts is not None else _last_answer(chat))


def render_sft_sequences(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[tuple[list[int], list[bool]]]:
    """Return sequences that train on every answer of a conversation, each as (ids [L], mask [L]).

    This is one sequence, that of `render_conversation`, unless the template rewrites earlier turns: some drop their
    reasoning. Then every answer is a sequence of its own, in the context that the model has when it gives the answer.
    Raises DataError as `render_conversation`.
    """
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    parts = chat.append_only()
    if parts is not None:
        return [_encode_masked(chat, parts)]
    ends = [place + 1 for place, message in enumerate(chat.messages) if message["role"] == "assistant"]
    chats = [replace(chat, messages=chat.messages[:end]) for end in ends]
    return [_encode_masked(one, _last_answer(one)) for one in chats]


def _last_answer(chat: _Chat) -> list[tuple[str, str]]:
    """Return [(context, answer)] of the last message. Raises DataError if they lack something."""
    context, answer = chat.context_and_answer()
    chat.check("answer", context + answer, [len(chat.messages) - 1])
    return [(context, answer)]


def _encode_masked(chat: _Chat, parts: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Return the ids of contexts and answers, and the mask of the answers up to the ends of their turns."""
    ids: list[int] = []
    mask: list[bool] = []
    for context, text in parts:
        header, answer = chat.encode(context), chat.encode(text) if text else []
        ends = [place for place, token in enumerate(answer) if token in chat.template.controls.ids]
        trained = ends[-1] + 1 if ends else len(answer)
        ids += header + answer
        mask += [False] * len(header) + [True] * trained + [False] * (len(answer) - trained)
    return ids, [False, *mask[1:]] if mask else mask  # nothing precedes the first token


def render_generation_prompt(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of the answer's header after a conversation. Raises DataError if the template changes earlier messages."""
    chat = _Chat.from_messages(tokenizer, messages, chat_template_kwargs)
    before, after = chat.text(len(messages)), chat.text(len(messages), add_generation_prompt=True)
    if not after.startswith(before):
        raise DataError("the chat template renders a conversation differently once an answer is to follow it.")
    return chat.encode(after[len(before) :])


@dataclass(frozen=True)
class _Chat:
    """Messages and the template that renders them, as text in which its control tokens are marked."""

    tokenizer: Any
    messages: list[Message]
    options: dict[str, Any]
    template: MarkingTemplate
    form: MessageFormat

    @classmethod
    def from_messages(cls, tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any] | None) -> _Chat:
        template = get_marking_template(tokenizer, options)
        normal = [normalize_message(message, index) for index, message in enumerate(messages)]
        return cls(tokenizer, normal, dict(options or {}), template, detect_message_format(tokenizer, template, normal))

    def text(self, count: int, add_generation_prompt: bool = False) -> str:
        """The first `count` messages as the template renders them, with marks."""
        return self._render(self.messages[:count], add_generation_prompt)

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self.template.render(self.tokenizer, self.form.apply(messages), add_generation_prompt, self.options)

    def render_checked(self, mode: str) -> str:
        """Return `rendered(way)`. Raises DataError unless it holds all that the messages say."""
        text = self.render(mode)
        self.check(mode, text, [len(self.messages) - 1] if mode == "continue" else ())
        return text

    def check(self, mode: str, text: str, reasoning_indices: Collection[int] = ()) -> None:
        """Raise DataError unless `text`, the messages rendered in a way of `rendered`, holds all that they say.

        Args:
            spoken: See `ContentCheck.lost`.
        """
        if lost := self.find_missing_text(mode, text, reasoning_indices):
            raise DataError(lost)

    def find_missing_text(self, mode: str, text: str, reasoning_indices: Collection[int] = ()) -> str | None:
        """Describe what `text` lacks; None if it is complete."""
        return ContentCheck(self.template, mode, self._render_messages).find_missing_text(
            self.messages, self.options, text, reasoning_indices
        )

    def _render_messages(self, mode: str, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        return replace(self, messages=list(messages), options=dict(options)).render(mode)

    def render(self, mode: str) -> str:
        """Return all messages as text: "closed", "open" for an answer, "continue" to go on with the last message, or
        "answer": with the last message in the place of the answer that the model gives."""
        if mode == "continue":
            return self.text_to_continue()
        if mode == "answer":
            return "".join(self.context_and_answer())
        return self.text(len(self.messages), add_generation_prompt=mode == "open")

    def text_to_continue(self) -> str:
        """Return the text up to the end of the last message's content.

        White space at its end is kept unless the template trims contents, as by Transformers.
        """
        last = len(self.messages) - 1
        if self.messages[last].get("tool_calls"):
            raise DataError(f"messages[{last}] calls tools, and so is complete; only text can be continued.")
        content = self.messages[last]["content"] + ASSISTANT_PLACEHOLDER + " "
        text = self._render([*self.messages[:last], {**self.messages[last], "content": content}], False)
        before, found, after = text.rpartition(ASSISTANT_PLACEHOLDER)
        if not found:
            raise DataError(f"messages[{last}].content: the chat template does not write it, so nothing can follow it.")
        return before if after.startswith(" ") else before.rstrip()

    def before_answer(self, place: int) -> str:
        """The rendered text before the answer at `place`, which ends with its header.

        Templates cannot open an answer to nothing: the header of a first message is that of an answer to a question
        or, where the template writes another or none, what precedes the answer's text.
        """
        if place:
            return self.text(place, add_generation_prompt=True)
        question = [{"role": "user", "content": "?"}]
        closed, opened = self._render(question, False), self._render(question, True)
        before, found, _ = self._render([{**self.messages[0], "content": ASSISTANT_PLACEHOLDER}], False).partition(
            ASSISTANT_PLACEHOLDER
        )
        if not found:
            raise DataError("the chat template does not render the answer with which the conversation begins.")
        header = opened[len(closed) :]
        if opened.startswith(closed) and header and header in before:
            return before[: before.rindex(header) + len(header)]
        return before

    def after_answer(self, place: int, prefix: RenderedPrefix | None = None) -> str | None:
        """The rendered text after the answer at `place`, with a header for the next; None if the rest has changed.

        White space around an answer is ignored: templates may insert or strip it.
        """
        answer, prefix = self.messages[place]["content"], prefix or RenderedPrefix()
        after = self.text(len(self.messages), add_generation_prompt=True)
        if prefix.is_prefix_of(place, after):
            length: int | None = prefix.length
        else:
            before = self.before_answer(place)
            length = len(before) if after.startswith(before) else None
        prefix.record(len(self.messages), after)
        if length is None:
            return None
        rest = after[length:]
        if not rest.startswith(answer):
            rest, answer = rest.lstrip(), answer.strip()
        if not rest.startswith(answer):
            return None
        self.check("open", after)
        return rest[len(answer) :]

    def encode(self, text: str) -> list[int]:
        return self.template.controls.encode(self.tokenizer, text)

    # -- answers to train on -----------------------------------------------------------------------------------------

    def append_only(self) -> list[tuple[str, str]] | None:
        """Return [(context, answer)] whose concatenation begins the conversation; None if turns are rewritten."""
        whole, parts, done = self.text(len(self.messages)), list[tuple[str, str]](), 0
        answers = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        for place in answers:
            before, after = self.before_answer(place), self.text(place + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                return None
            parts.append((whole[done : len(before)], after[len(before) :]))
            done = len(after)
        if self.find_missing_text("closed", whole, answers):
            return None
        return [*parts, (whole[done:], "")]

    def context_and_answer(self) -> tuple[str, str]:
        """Return the text that the model reads before the last message, and the text of that message.

        Raises DataError if the template writes its reasoning in a way that does not follow what the model reads.
        """
        place, message = len(self.messages) - 1, self.messages[-1]
        if message["role"] != "assistant":
            raise DataError(f"messages[{place}] is a message of role {message['role']!r}, not an answer.")
        before, after = self.before_answer(place), self.text(place + 1)
        thought = CLOSE_MARKER_PATTERN.search(message["content"])
        if after.startswith(before) and (
            not thought or remove_whitespace(message["content"]) in remove_whitespace(after[len(before) :])
        ):
            return before, after[len(before) :]
        if field := next((name for name in REASONING_FIELDS if message.get(name)), None):
            raise DataError(
                f"messages[{place}].{field}: the chat template writes this reasoning differently from what the model "
                "reads before its answer. Put it into content, as <think>...</think> before the answer."
            )
        calls_only = not message["content"].strip()  # which some templates write only beside null content
        marked = {key: value for key, value in message.items() if key != "tool_calls" or not calls_only}
        marked["content"] = ASSISTANT_PLACEHOLDER
        header, found, end = self._render([*self.messages[:place], marked], False).rpartition(ASSISTANT_PLACEHOLDER)
        if calls_only:
            found, end = found if after.startswith(header) else "", after[len(header) :]
        if not found:
            raise DataError(f"messages[{place}].content: the chat template does not write this answer.")
        return before, self._after_header(before, message["content"]) + end

    def _after_header(self, header: str, content: str) -> str:
        """Return the part of an answer that follows a header: some headers open the reasoning, as `<think>`.

        An answer without reasoning closes it at once: a model that does not learn this would answer inside its
        reasoning.
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


# -- the form in which a template expects messages ---------------------------------------------------------------------


@dataclass(frozen=True)
class MessageFormat:
    """How a chat template expects content and tool calls.

    Messages have one form everywhere else (`data.messages`). Few templates take another: some multimodal ones write
    only content that is a list of parts; DeepSeek's write tool calls only beside null content, and join arguments as
    text.
    """

    content_as_parts: bool = False
    """True if content is a list of parts instead of text."""
    null_content: bool = False
    """True if the content of a message that consists of tool calls is null instead of the empty text."""
    arguments_as_text: bool = False
    """True if arguments of tool calls are JSON text instead of mappings."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this form."""
        return [self._message(normalize_message(message, index)) for index, message in enumerate(messages)]

    def _message(self, message: Message) -> Message:
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
    """Return the form that the template writes completely, as far as these messages need one.

    The usual form is returned for a template that writes none.
    """
    key = "calls" if any(message.get("tool_calls") for message in messages) else "text"
    form = template.cache.get(key)
    if form is None:
        form = template.cache[key] = (
            _detect_call_format(tokenizer, template) if key == "calls" else _detect_text_format(tokenizer, template)
        )
    return form  # type: ignore[no-any-return]


def _detect_text_format(tokenizer: Any, template: MarkingTemplate) -> MessageFormat:
    messages: list[Message] = [{"role": "user", "content": ASSISTANT_PLACEHOLDER}]
    forms = [MessageFormat(content_as_parts=as_parts) for as_parts in (False, True)]
    return next(
        (form for form in forms if ASSISTANT_PLACEHOLDER in _try_render(tokenizer, template, form, messages, {})),
        forms[0],
    )


def _detect_call_format(tokenizer: Any, template: MarkingTemplate) -> MessageFormat:
    as_parts = detect_message_format(tokenizer, template, ()).content_as_parts
    function = {"name": _NAME, "arguments": {"x": _ARGUMENT}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "x", "parameters": {"type": "object"}}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x" * 9, "type": "function", "function": function}]},
    ]
    forms = [MessageFormat(as_parts, null, as_text) for as_text in (False, True) for null in (False, True)]
    for form in forms:
        text = _try_render(tokenizer, template, form, messages, {"tools": [tool]})
        if _NAME in text and _ARGUMENT in text and "None" not in text:
            return form
    return forms[0]


def _try_render(
    tokenizer: Any, template: MarkingTemplate, form: MessageFormat, messages: list[Message], options: dict[str, Any]
) -> str:
    """Return the rendered text; nothing if the template rejects the form."""
    try:
        return template.render(tokenizer, form.apply(messages), False, options)
    except DataError:
        return ""
