"""Conversations -> token ids, where whoever wrote a message can only ever write text.

A chat template marks turns with control tokens (`<|im_start|>`, `<|eot_id|>`, ...). A tokenizer finds those in a
rendered string wherever they stand, so a prompt that spells one could end its own turn or speak as the system. Here
control tokens come from the template alone; spelt in a message they are encoded as the characters they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from skyrl_train.data.trajectory import Message
from skyrl_train.errors import DataError

PRIVATE_USE = range(0xE000, 0xF8FF)


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of `messages` and the header of the answer: `apply_chat_template(messages, add_generation_prompt=True)`.

    The ids are the same unless a message spells a control token. Raises DataError when the template refuses them.
    """
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    return chat.encode(chat.text(len(messages), open_answer=True))


def render_continuation(
    tokenizer: Any,
    messages: Sequence[Message],
    answers: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    verbatim: bool = False,
) -> list[int] | None:
    """Ids between the last answer and the next: the end of its turn, what was said to it, the next one's header.

    `answers` are the places in `messages` of what the model wrote. It is kept as tokens elsewhere, so a stand-in is
    rendered for it; `verbatim` renders the texts themselves, for templates that treat some (reasoning) apart.

    None where the template no longer writes what it wrote before the last answer, or the answer itself, as it did.
    Raises DataError when it refuses the messages.
    """
    if not verbatim:
        used = set().union(*_strings(messages))
        stand_in = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if stand_in is None:
            raise DataError("the messages of a conversation must leave two private-use characters unused.")
        messages = [
            {**message, "content": stand_in} if place in answers else message for place, message in enumerate(messages)
        ]
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    between = chat.after_answer(answers[-1])
    return None if between is None else chat.encode(between)


def rewrites_history(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template writes earlier turns differently once a conversation goes on, as some drop old reasoning.

    Raises DataError when it does not take a conversation of user and assistant.
    """
    for answer in ("sure", "<think>\nwell\n</think>\n\nsure"):
        turns = ("user", "one"), ("assistant", answer), ("user", "two"), ("assistant", answer), ("user", "three")
        messages = [{"role": role, "content": content} for role, content in turns]
        chats = [_Chat.of(tokenizer, messages[:count], chat_template_kwargs) for count in (3, 5)]
        if any(chat.after_answer(len(chat.messages) - 2) is None for chat in chats):
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text that nothing is put around; control tokens spelt in it are the characters they are."""
    chat = _Chat.of(tokenizer, [{"role": "user", "content": text}], None)
    return chat.encode(chat.messages[0]["content"])


def plain_text(message: Message) -> str:
    """A message's words, without whatever else it may hold."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def is_control(tokenizer: Any, token: int) -> bool:
    """Whether it is a token that no text can be."""
    return token in _controls(tokenizer).ids


def render_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of `messages` as they are, for a model that reads and does not answer.

    Raises DataError when the template refuses them.
    """
    chat = _Chat.of(tokenizer, messages, None)
    return chat.encode(chat.text(len(messages)))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a finished conversation, and which of them the assistant has to produce: (ids [L], mask [L]).

    The mask covers what stands between an answer's header and the end of its turn, the token that ends the turn
    included (a model that never learns it never stops), and nothing after that token, such as ChatML's line break.
    Headers and answers are encoded apart, as they are in a rollout.

    Raises DataError when the template rewrites earlier turns once later ones follow (some drop old reasoning): split
    such a conversation into one row per answer.
    """
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    whole = chat.text(len(messages))
    ids: list[int] = []
    mask: list[bool] = []
    done = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = chat.text(index, open_answer=True), chat.text(index + 1)
        if not (whole.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template renders message {index} differently once other messages follow it; "
                "split the conversation into one row per assistant message."
            )
        header, answer = chat.encode(whole[done : len(before)]), chat.encode(after[len(before) :])
        ends = [place for place, token in enumerate(answer) if token in chat.controls.ids]
        learnt = ends[-1] + 1 if ends else len(answer)
        ids += header + answer
        mask += [False] * len(header) + [True] * learnt + [False] * (len(answer) - learnt)
        done = len(after)
    rest = chat.encode(whole[done:])
    return ids + rest, mask + [False] * len(rest)


def render_header(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of the answer's header after a conversation. Raises DataError where the template changes what came before."""
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    before, after = chat.text(len(messages)), chat.text(len(messages), open_answer=True)
    if not after.startswith(before):
        raise DataError("the chat template renders a conversation differently once an answer is to follow it.")
    return chat.encode(after[len(before) :])


@dataclass(frozen=True)
class _Controls:
    """A tokenizer's control tokens."""

    strings: tuple[str, ...]
    ids: frozenset[int]
    spelt: re.Pattern[str]
    """Finds any of them, the longest first."""


_CONTROLS: WeakKeyDictionary[Any, _Controls] = WeakKeyDictionary()


def _controls(tokenizer: Any) -> _Controls:
    if tokenizer not in _CONTROLS:
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        named |= {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        strings = tuple(sorted(named, key=len, reverse=True))
        pattern = "|".join(map(re.escape, strings)) or r"(?!)"
        ids = frozenset(named.values()) - {tokenizer.unk_token_id}  # any text can be unknown
        _CONTROLS[tokenizer] = _Controls(strings, ids, re.compile(pattern))
    return _CONTROLS[tokenizer]


@dataclass(frozen=True)
class _Chat:
    """Messages ready to render: control tokens spelt in them are replaced by a stand-in, a private-use character round
    the token's number, which templates pass through like any other text."""

    tokenizer: Any
    messages: list[Any]
    options: dict[str, Any]
    controls: _Controls
    mark: str | None
    """The private-use character, or None when no message spells a control token."""

    @classmethod
    def of(cls, tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any] | None) -> _Chat:
        controls = _controls(tokenizer)
        mark = None
        if any(controls.spelt.search(text) for text in _strings(messages)):
            used = set().union(*_strings(messages))
            mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
            if mark is None:
                raise DataError("messages that spell a control token must leave one private-use character unused.")
            messages = _replaced(messages, controls, mark)
        return cls(tokenizer, list(messages), dict(options or {}), controls, mark)

    def text(self, count: int, open_answer: bool = False) -> str:
        """The first `count` messages as the template writes them, stand-ins included."""
        try:
            return self.tokenizer.apply_chat_template(
                self.messages[:count], tokenize=False, add_generation_prompt=open_answer, **self.options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template does not take these messages: {error}") from error

    def after_answer(self, place: int) -> str | None:
        """What is rendered after the answer at `place`, with a header for the next; None where the rest was changed.

        Templates may put blanks before an answer and take those round it away: these are not looked at.
        """
        answer = self.messages[place]["content"]
        before, after = self.text(place, open_answer=True), self.text(len(self.messages), open_answer=True)
        if not after.startswith(before):
            return None
        rest = after[len(before) :]
        if rest.startswith(answer):
            return rest[len(answer) :]
        rest, answer = rest.lstrip(), answer.strip()
        return rest[len(answer) :] if rest.startswith(answer) else None

    def encode(self, text: str) -> list[int]:
        if self.mark is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"{self.mark}([0-9]+){self.mark}", text)):
            if index % 2:
                ids += self._plain(self.controls.strings[int(piece)])
            elif piece:
                ids += self.tokenizer(piece, add_special_tokens=False)["input_ids"]
        return ids

    def _plain(self, control: str) -> list[int]:
        """A control token's characters. Where the vocabulary has it as an ordinary word too, one by one."""
        for pieces in ([control], list(control)):
            ids = [
                id
                for piece in pieces
                for id in self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            ]
            if not self.controls.ids.intersection(ids):
                return ids
        raise DataError(f"the tokenizer cannot encode {control!r} as text; remove it from the messages.")


def _strings(value: Any) -> Iterator[str]:
    """Every string in messages: roles, contents, tool calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, controls: _Controls, mark: str) -> Any:
    if isinstance(value, str):
        return controls.spelt.sub(lambda found: f"{mark}{controls.strings.index(found[0])}{mark}", value)
    if isinstance(value, Mapping):
        return {key: _replaced(item, controls, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, controls, mark) for item in value]
    return value
