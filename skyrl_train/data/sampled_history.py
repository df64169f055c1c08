"""Rendering of conversations whose sampled answers are known as token ids.

A placeholder is rendered in place of each sampled answer, and the answer's ids take its place, so no answer is ever
tokenized again. The placeholder of an answer with tool calls is an argument of its calls, because many templates render
a tool's result only after a message with calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from skyrl_train.data.chat import Chat, RenderedPrefix, RenderMode
from skyrl_train.data.control_tokens import ASSISTANT_PLACEHOLDER, find_end_of_turn_token
from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import MARKER_PATTERN
from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.errors import DataError


@dataclass(slots=True)
class SampledAnswer:
    """An answer whose tokens are known."""

    ids: Tokens
    """The tokens of the turn after its header, including an end-of-turn token if it was sampled."""
    omits_calls: bool = False
    """True if the template does not accept or does not write the calls of the answer. It is then rendered as text."""
    header_end: str = ""
    """End of the rendered text that the model read before the answer, see `RenderedHistory`; "" if it is unknown."""


@dataclass(frozen=True, slots=True)
class RenderedHistory:
    """A rendered conversation, with the header of a new answer."""

    ids: list[int]
    """Token ids of the conversation, without those of the earlier call that it continues."""
    continues: bool
    """True if the ids follow the tokens of the earlier call."""
    prefix: RenderedPrefix
    """Record of this rendering, for conversations that continue it."""
    reused: frozenset[int] = field(default_factory=frozenset)
    """Indices of the messages whose sampled ids are part of the conversation."""
    header_end: str = ""
    """End of the rendered text, from its last control token on. It ends the header of the new answer."""


def render_sampled_history(
    tokenizer: Any,
    messages: Sequence[Message],
    answers: Mapping[int, SampledAnswer],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    continued: tuple[int, RenderedPrefix] | None = None,
) -> RenderedHistory:
    """Render a conversation in which the ids of sampled answers are reused.

    Args:
        tokenizer: A Hugging Face tokenizer.
        messages: The conversation.
        answers: The sampled answers by the index of their message. A message is rendered from its text instead if the
            template does not write it.
        chat_template_kwargs: Variables of the template, such as `tools`; None to set none.
        continued: Index of the last answer of an earlier call that the conversation begins with, and the record of the
            rendering that preceded that answer. None renders the complete conversation.

    Raises:
        DataError: The template rejects the messages, or does not write all of their content.
    """
    unwritten: set[int] = set()
    while True:
        used = {index: answer for index, answer in sorted(answers.items()) if index not in unwritten}
        history = _History.render(tokenizer, messages, used, chat_template_kwargs)
        missing = [index for index in used if _placeholder(index) not in history.text]
        if not missing:
            rendered = history.encode_after(*continued) if continued and continued[0] in used else None
            if rendered is None:
                rendered = history.encode_all()
            if isinstance(rendered, RenderedHistory):
                return rendered
            assert rendered is not None
            missing = [rendered.index]
        for index in missing:
            if messages[index].get("tool_calls") and not answers[index].omits_calls:
                answers[index].omits_calls = True
            else:
                unwritten.add(index)


def _placeholder(index: int) -> str:
    return f"{ASSISTANT_PLACEHOLDER}{index:06}"


def _with_placeholder(message: Message, index: int, answer: SampledAnswer) -> Message:
    """Return a message that contains a placeholder and nothing else that was sampled, except names and ids of calls."""
    placeholder, calls = _placeholder(index), message.get("tool_calls")
    if not calls or answer.omits_calls:
        return {"role": "assistant", "content": placeholder}
    marked = []
    for call in calls:  # all of them, because some templates write only the first one
        function = call.get("function", call)
        arguments = function.get("arguments")
        arguments = {**(arguments if isinstance(arguments, Mapping) else {}), placeholder: placeholder}
        function = {**function, "arguments": arguments}
        marked.append({**call, "function": function} if "function" in call else function)
    return {"role": "assistant", "content": "", "tool_calls": marked}


@dataclass(frozen=True, slots=True)
class _Turn:
    """The part of a rendered text that the ids of a sampled answer replace: from the end of its header to its end."""

    index: int
    start: int
    stop: int
    follows_header: bool
    """True if the part begins where the model began to sample."""
    omitted_header: str = ""
    """Text between the header and the answer that the model read, and that the template leaves out of earlier turns:
    an opening of reasoning."""


@dataclass(frozen=True, slots=True)
class _UnwrittenAnswer:
    """An answer that the template does not write, or not in the order of the messages."""

    index: int


@dataclass(frozen=True, slots=True)
class _History:
    """A conversation with placeholders, and its rendered text with marks in place of control tokens."""

    chat: Chat
    answers: Mapping[int, SampledAnswer]
    """The answers that have placeholders, by the index of their message, in order."""
    text: str

    @classmethod
    def render(
        cls,
        tokenizer: Any,
        messages: Sequence[Message],
        answers: Mapping[int, SampledAnswer],
        options: Mapping[str, Any] | None,
    ) -> _History:
        """Render the conversation. If the template rejects calls of sampled answers, they are rendered as text."""
        marked = [
            _with_placeholder(message, index, answers[index]) if index in answers else message
            for index, message in enumerate(messages)
        ]
        chat = Chat.from_messages(tokenizer, marked, options)
        try:
            return cls(chat, answers, chat.text(len(marked), add_generation_prompt=True))
        except DataError:
            with_calls = [
                answer
                for index, answer in answers.items()
                if messages[index].get("tool_calls") and not answer.omits_calls
            ]
            if not with_calls:
                raise
            for answer in with_calls:
                answer.omits_calls = True
            return cls.render(tokenizer, messages, answers, options)

    def encode_after(self, index: int, prefix: RenderedPrefix) -> RenderedHistory | _UnwrittenAnswer | None:
        """Return the ids after a sampled answer, or None if they cannot follow its ids.

        Args:
            index: Index of the answer's message.
            prefix: Record of the rendering that preceded the answer.
        """
        if prefix.is_prefix_of(index, self.text):
            start, omitted = prefix.length, ""
        else:
            header = self._find_header(index)
            if header is None:
                return None
            start, omitted = header
        turn = self._find_turn(index, start, omitted)
        if isinstance(turn, _Turn) and not turn.follows_header:
            return None
        return self._encode([turn, *self._later_turns(index)], continues=True)

    def encode_all(self) -> RenderedHistory | _UnwrittenAnswer | None:
        """Return the ids of the complete conversation."""
        return self._encode(self._later_turns(-1), continues=False)

    def _later_turns(self, after: int) -> Iterator[_Turn | _UnwrittenAnswer]:
        """Yield the turns of the sampled answers after a message."""
        for index in self.answers:
            if index > after:
                start, omitted = self._find_header(index) or (None, "")
                yield self._find_turn(index, start, omitted)

    def _find_header(self, index: int) -> tuple[int, str] | None:
        """Find the header of a sampled answer.

        Many templates open reasoning in the header of a new answer, and write that of an earlier one without reasoning.

        Returns:
            Length of the text up to the end of the header, and the end of the header that the text lacks. None if the
            text differs before the header, or if the answer was sampled after another header.
        """
        before = self.chat.before_answer(index)
        if self.text.startswith(before):
            return len(before), ""
        history = self.chat.text(index) if index else before
        if not (before.startswith(history) and self.text.startswith(history)):
            return None
        if not before.endswith(self.answers[index].header_end):
            return None
        first, size = len(history), len(before)
        pairs = zip(before[first:], self.text[first:size], strict=False)
        end = first + len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        marker = before.rfind("<", first, end)
        if marker > before.rfind(">", first, end):  # it begins like another one
            end = marker
        return end, before[end:]

    def _find_turn(self, index: int, start: int | None, omitted_header: str = "") -> _Turn | _UnwrittenAnswer:
        """Find the turn of a sampled answer.

        Args:
            index: Index of the answer's message.
            start: Length of the text before the turn, including its header; None if the text does not begin with that.
            omitted_header: End of the header that the text lacks.
        """
        placeholder, answer = _placeholder(index), self.answers[index]
        first, last = self.text.find(placeholder), self.text.rfind(placeholder)
        header = None if start is None or first < start else self.text[start:first]
        if self.chat.messages[index].get("tool_calls"):
            stop = self._find_end_of_calls(index, last + len(placeholder))
            if stop is None or start is None or header is None:
                return _UnwrittenAnswer(index)
            return _Turn(index, start, stop, follows_header=True, omitted_header=omitted_header)
        if start is not None and header is not None and self._is_part(header, answer.ids):
            return _Turn(index, start, last + len(placeholder), follows_header=True, omitted_header=omitted_header)
        return _Turn(index, first, last + len(placeholder), follows_header=False)

    def _is_part(self, header: str, ids: Tokens) -> bool:
        """True if the text between an answer's header and its content is empty, or if the answer contains it.

        White space is empty, and so is a block of reasoning without text, which templates write in place of reasoning.
        gpt-oss samples `<|channel|>final<|message|>` before the content, after its reasoning.
        """
        if not MARKER_PATTERN.sub("", self.chat.template.controls.unmark(header)).strip():
            return True
        part = to_token_array(self.chat.encode(header))
        starts = np.flatnonzero(ids[: len(ids) - len(part) + 1] == part[0]) if len(part) <= len(ids) else ()
        return any(np.array_equal(ids[start : start + len(part)], part) for start in starts)

    def _find_end_of_calls(self, index: int, position: int) -> int | None:
        """Return where the end-of-turn token of an answer with calls begins, after the last placeholder in its calls.

        The model has sampled everything before it, such as the end of the call. If it has sampled the end-of-turn
        token, too, the caller drops it from the text.
        """
        answer, find_marks = self.answers[index].ids, self.chat.template.controls.find_marks
        alone = replace(self.chat, messages=[{"role": "user", "content": "x"}, self.chat.messages[index]])
        try:
            closed = alone.text(2)
        except DataError:
            closed = self.chat.text(index + 1)
        placeholder = _placeholder(index)
        closing = [id for _, id in find_marks(closed[closed.rfind(placeholder) + len(placeholder) :])]
        marks = find_marks(self.text[position:])
        if [id for _, id in marks[: len(closing)]] != closing or not marks:
            return None
        number = max(0, len(closing) - 1)  # without closing tokens, the header of the next message ends the turn
        if len(answer) and int(answer[-1]) in closing:
            number = len(closing) - 1 - closing[::-1].index(int(answer[-1]))
        return position + marks[number][0]

    def _encode(
        self, turns: Iterable[_Turn | _UnwrittenAnswer], *, continues: bool
    ) -> RenderedHistory | _UnwrittenAnswer | None:
        """Encode the text around turns, with the ids of their answers in place of the turns.

        Args:
            turns: The turns in order.
            continues: True to leave out the first turn and everything before it.

        Returns:
            None if `continues` and the text cannot follow the ids of the first turn.
        """
        ids: list[int] = []
        reused: set[int] = set()
        position, answer = 0, None
        for turn in turns:
            if isinstance(turn, _UnwrittenAnswer):
                return turn
            if turn.start < position:
                return _UnwrittenAnswer(turn.index)
            if reused or not continues:
                if not self._append_text(ids, answer, self.text[position : turn.start] + turn.omitted_header):
                    return None
                ids += self.answers[turn.index].ids.tolist()
            answer, position = self.answers[turn.index].ids, turn.stop
            reused.add(turn.index)
        if not self._append_text(ids, answer, self.text[position:]):
            return None
        self.chat.check(RenderMode.OPEN, self.text)
        prefix = RenderedPrefix()
        prefix.record(len(self.chat.messages), self.text)
        marks = self.chat.template.controls.find_marks(self.text)
        header_end = self.text[marks[-1][0] :] if marks else ""
        return RenderedHistory(ids, continues, prefix, frozenset(reused), header_end)

    def _append_text(self, ids: list[int], answer: Tokens | None, text: str) -> bool:
        """Append the ids of a text after a sampled answer. Return False if the answer's last token contradicts it.

        An end-of-turn token that the model has sampled is not repeated. If the template ends an earlier turn with
        another token than the last one, as gpt-oss's template does, that one replaces the sampled token. This is not
        possible if `ids` are to follow the answer and do not contain it.
        """
        following = self.chat.encode(text) if text else []
        controls = self.chat.template.controls.ids
        if answer is not None and len(answer) and following and following[0] in controls:
            sampled = int(answer[-1])
            if following[0] == sampled:
                del following[0]
            elif sampled == find_end_of_turn_token(self.chat.tokenizer, self.chat.options):
                if not ids:
                    return False
                ids.pop()
        ids += following
        return True
