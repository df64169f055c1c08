"""Conversations -> token ids, such that no message can inject control tokens.

A chat template marks turns with control tokens (`<|im_start|>`, `<|eot_id|>`, ...). A tokenizer finds these anywhere in
a rendered string, so a prompt that spells one could end its own turn or speak as the system. Here control tokens come
only from the template; if a message spells one, it is encoded as plain characters.
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
    """Ids of `messages` and the answer's header, as by `apply_chat_template(messages, add_generation_prompt=True)`.

    The ids differ from it only if a message spells a control token. Raises DataError if the template rejects them.
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
    """Ids between the last answer and the next one: the end of its turn, the messages after it, the next header.

    `answers` are the indices in `messages` of the model's own answers. Their tokens are kept elsewhere, so a
    placeholder is rendered for each; `verbatim` renders their texts, for templates that handle some text (reasoning)
    specially.

    Returns None if the template now renders the messages before the last answer, or the answer itself, differently.
    Raises DataError if it rejects the messages.
    """
    if not verbatim:
        used = set().union(*_strings(messages))
        placeholder = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
        if placeholder is None:
            raise DataError("the messages of a conversation must leave two private-use characters unused.")
        messages = [
            {**message, "content": placeholder} if place in answers else message
            for place, message in enumerate(messages)
        ]
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    between = chat.after_answer(answers[-1])
    return None if between is None else chat.encode(between)


def rewrites_history(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template renders earlier turns differently once a conversation continues; some drop old reasoning.

    Raises DataError if it rejects a conversation of user and assistant.
    """
    for answer in ("sure", "<think>\nwell\n</think>\n\nsure"):
        turns = ("user", "one"), ("assistant", answer), ("user", "two"), ("assistant", answer), ("user", "three")
        messages = [{"role": role, "content": content} for role, content in turns]
        chats = [_Chat.of(tokenizer, messages[:count], chat_template_kwargs) for count in (3, 5)]
        if any(chat.after_answer(len(chat.messages) - 2) is None for chat in chats):
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text without any template; control tokens spelt in it are encoded as plain characters."""
    chat = _Chat.of(tokenizer, [{"role": "user", "content": text}], None)
    return chat.encode(chat.messages[0]["content"])


def plain_text(message: Message) -> str:
    """The text of a message, without its other content."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def is_control(tokenizer: Any, token: int) -> bool:
    """Whether a token is a control token, which no text encodes to."""
    return token in _controls(tokenizer).ids


def render_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of `messages` without an answer's header, for a model that reads but does not answer.

    Raises DataError if the template rejects them.
    """
    chat = _Chat.of(tokenizer, messages, None)
    return chat.encode(chat.text(len(messages)))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a finished conversation, and a mask of those that the assistant must produce: (ids [L], mask [L]).

    The mask covers the text between an answer's header and the end of its turn, including the token that ends the turn
    (a model that never learns it never stops), but nothing after that token, such as ChatML's line break. Headers and
    answers are encoded separately, as in a rollout.

    Raises DataError if the template rewrites earlier turns when later ones follow (some drop old reasoning): split such
    a conversation into one row per answer.
    """
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    whole = chat.text(len(messages))
    ids: list[int] = []
    mask: list[bool] = []
    done = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = chat.before_answer(index), chat.text(index + 1)
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
    ids, mask = ids + rest, mask + [False] * len(rest)
    return ids, [False, *mask[1:]] if mask else mask  # nothing precedes the first token


def render_header(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of the answer's header after a conversation. Raises DataError if the template changes earlier messages."""
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
    pattern: re.Pattern[str]
    """Matches any of them, the longest first."""
    begun: Mapping[str, frozenset[str]]
    """Beginning of one -> what is missing to it."""


_CONTROLS: WeakKeyDictionary[Any, _Controls] = WeakKeyDictionary()


def _controls(tokenizer: Any) -> _Controls:
    if tokenizer not in _CONTROLS:
        named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        named |= {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        strings = tuple(sorted(named, key=len, reverse=True))
        pattern = "|".join(map(re.escape, strings)) or r"(?!)"
        ids = frozenset(named.values()) - {tokenizer.unk_token_id}  # ordinary text can encode to it
        begun: dict[str, set[str]] = {}
        for string in strings:
            for size in range(1, len(string)):
                begun.setdefault(string[:size], set()).add(string[size:])
        missing = {start: frozenset(rests) for start, rests in begun.items()}
        _CONTROLS[tokenizer] = _Controls(strings, ids, re.compile(pattern), missing)
    return _CONTROLS[tokenizer]


@dataclass(frozen=True)
class _Chat:
    """Messages ready to render: each control token spelt in them is replaced by its number between two private-use
    characters, which templates pass through like any other text. So is the beginning of one at the end of a text, if
    another text could complete it where the template joins them."""

    tokenizer: Any
    messages: list[Any]
    options: dict[str, Any]
    controls: _Controls
    mark: str | None
    """The private-use character, or None if no message spells a control token."""
    pieces: tuple[str, ...] = ()
    """What numbers between two marks stand for."""

    @classmethod
    def of(cls, tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any] | None) -> _Chat:
        controls = _controls(tokenizer)
        mark, pieces = None, (*controls.strings, *_split_controls(messages, controls))
        if len(pieces) > len(controls.strings) or any(controls.pattern.search(text) for text in _strings(messages)):
            used = set().union(*_strings(messages))
            mark = next((chr(code) for code in PRIVATE_USE if chr(code) not in used), None)
            if mark is None:
                raise DataError("messages that spell a control token must leave one private-use character unused.")
            whole = "|".join(map(re.escape, controls.strings))
            begun = "|".join(rf"{re.escape(piece)}(?=\s*\Z)" for piece in pieces[len(controls.strings) :])
            pattern = re.compile("|".join(filter(None, (whole, begun))))
            marked = {piece: f"{mark}{number}{mark}" for number, piece in enumerate(pieces)}
            messages = _replaced(messages, pattern, marked)
        return cls(tokenizer, list(messages), dict(options or {}), controls, mark, pieces)

    def text(self, count: int, open_answer: bool = False) -> str:
        """The first `count` messages as the template renders them, with their replacements."""
        return self._rendered(self.messages[:count], open_answer)

    def _rendered(self, messages: list[Any], open_answer: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=open_answer, **self.options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template does not take these messages: {error}") from error

    def before_answer(self, place: int) -> str:
        """The rendered text before the answer at `place`, which ends with its header.

        Templates cannot open an answer to nothing: the header of a first message is that of an answer to a question
        or, where the template writes another or none, what precedes the answer's text.
        """
        if place:
            return self.text(place, open_answer=True)
        question = [{"role": "user", "content": "?"}]
        closed, opened, whole = self._rendered(question, False), self._rendered(question, True), self.text(1)
        header, said = opened[len(closed) :], plain_text(self.messages[0]).strip()
        if opened.startswith(closed) and header and header in whole:
            return whole.partition(header)[0] + header
        if not said or said not in whole:
            raise DataError("the chat template does not render the answer with which the conversation begins.")
        return whole.partition(said)[0]

    def after_answer(self, place: int) -> str | None:
        """The rendered text after the answer at `place`, with a header for the next; None if the rest has changed.

        White space around an answer is ignored: templates may insert or strip it.
        """
        answer = self.messages[place]["content"]
        before, after = self.before_answer(place), self.text(len(self.messages), open_answer=True)
        if not after.startswith(before):
            return None
        rest = after[len(before) :]
        if rest.startswith(answer):
            return rest[len(answer) :]
        rest, answer = rest.lstrip(), answer.strip()
        return rest[len(answer) :] if rest.startswith(answer) else None

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()  # tokenizers raise TypeError
        except UnicodeEncodeError as error:
            raise DataError(f"half a surrogate pair at character {error.start} of the messages is no text.") from error
        if self.mark is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        split = re.split(f"{self.mark}([0-9]+){self.mark}", text)
        texts = list(dict.fromkeys(filter(None, split[::2])))
        # Each piece once, and all texts in one call: a call costs as much as encoding a hundred characters.
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        ids_of = {"": [], **dict(zip(texts, encoded, strict=True))}
        plain = {number: self._plain(self.pieces[int(number)]) for number in set(split[1::2])}
        return [id for at, piece in enumerate(split) for id in (plain if at % 2 else ids_of)[piece]]

    def _plain(self, control: str) -> list[int]:
        """The ids of a control token's characters; encoded one by one if the vocabulary also has it as a word."""
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
    """Every string in messages: roles, contents, tool calls with the names of their arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _split_controls(messages: Sequence[Message], controls: _Controls) -> list[str]:
    """Beginnings of control tokens at which a text of the messages ends and that others could complete; longest first.

    White space between is ignored: templates strip it.
    """
    texts = [stripped for text in _strings(messages) if (stripped := text.strip())]
    longest = max(map(len, controls.strings), default=0)
    sizes = range(1, longest)
    ends = {text[-size:] for text in texts for size in sizes if size <= len(text)} & controls.begun.keys()
    if not ends:
        return []
    whole = {text for text in texts if len(text) < longest}
    starts = {text[:size] for text in texts for size in sizes}
    found = [
        end
        for end in ends
        if any(rest in starts or any(rest[:size] in whole for size in sizes) for rest in controls.begun[end])
    ]
    return sorted(found, key=len, reverse=True)


def _replaced(value: Any, pattern: re.Pattern[str], marked: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: marked[found[0]], value)
    if isinstance(value, Mapping):
        return {_replaced(key, pattern, marked): _replaced(item, pattern, marked) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, pattern, marked) for item in value]
    return value
