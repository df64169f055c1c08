"""Chat templates that mark their control tokens, so that the text of a message cannot become a control token.

A tokenizer cannot distinguish `<|im_end|>` in a message from `<|im_end|>` in the template. Therefore the template
writes a mark in place of each control token. Only marks become control tokens, and everything between them is encoded
as text. Marks contain a secret random number, so the template cannot produce one from the texts of messages and
options, whatever it does to them.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import MARKER_PATTERN, reasoning_tokens
from skyrl_train.data.token_arrays import Tokens
from skyrl_train.errors import DataError

log = logging.getLogger(__name__)

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors that a template or `apply_chat_template` raises for messages or options that it does not support."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
"""Roles from which a template may build control tokens, as in `'<|' + message['role'] + '|>'`."""
ANSWER_TAG_PATTERN = re.compile(MARKER_PATTERN.pattern + r"|</?(?:answer|tool\w*|function\w*|parameter\w*)>")
"""Pattern of tags that answers contain and histories repeat. They are control tokens only if the tokenizer defines them
as special tokens."""
BRACKETED_PATTERN = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""Pattern of tokens that can be markers. Other added tokens are words or white space."""
_NONCE = f"{secrets.randbelow(10**20):020}"
ASSISTANT_PLACEHOLDER = f"{secrets.randbelow(10**20):020}"
"""Placeholder of an assistant turn. No message contains it. It consists of digits, which templates do not change."""
_MARKS, _MARK = re.compile(rf"<\|{_NONCE}:([0-9]+)\|>"), f"<|{_NONCE}:%d|>"
_ROLES, _ROLE = re.compile(rf"<\|{_NONCE}@([a-z]+)\|>"), f"<|{_NONCE}@%s|>"
_BREAK = f"<|{_NONCE}|>"
_MAX_TEMPLATES = 16


class MarkingMode(StrEnum):
    """Way in which a template marks control tokens."""

    LITERALS = "literals"
    """Control tokens in the template's source are marked."""
    ROLES = "roles"
    """Roles are marked, too, for templates that build control tokens from roles."""
    MESSAGES = "messages"
    """Control tokens in messages and options are broken up, and all control tokens in the rendered text count. This is
    for templates that build control tokens in other ways. A token that the template joins from several texts is not
    detected."""


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer under one chat template."""

    names: Mapping[int, str]
    """Id -> text of the token, longest first."""
    ids: frozenset[int]
    """Ids that the text of a message must not encode to."""
    pattern: re.Pattern[str]
    """Pattern that matches the text of any control token."""
    lstrip_ids: frozenset[int]
    """Ids of tokens that remove white space before them (`AddedToken.lstrip`)."""
    rstrip_ids: frozenset[int]
    """Ids of tokens that remove white space after them (`AddedToken.rstrip`)."""
    space_guards: tuple[str, str]
    """Texts that are encoded before another text so that the tokenizer adds no space to it: (for a text after a control
    token, for a part within a text)."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, template_ids: Iterable[int]) -> ControlTokens:
        """Return the tokens that the tokenizer defines as special, and added tokens that mark turns in the template.

        Args:
            tokenizer: A Hugging Face tokenizer.
            template_ids: Token ids of conversations that the template rendered from harmless messages.
        """
        added = tokenizer.added_tokens_decoder
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {id: token.content for id, token in added.items() if token.special}
        markers = {id: added[id].content for id in template_ids if id in added and id not in special}
        special |= {
            id: name
            for id, name in markers.items()
            if BRACKETED_PATTERN.fullmatch(name) and not ANSWER_TAG_PATTERN.fullmatch(name)
        }
        names = dict(sorted(special.items(), key=lambda item: len(item[1]), reverse=True))
        ids = set(names)
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id}
        if tokenizer.unk_token_id not in ends:  # ordinary text can encode to it
            ids.discard(tokenizer.unk_token_id)
        return cls(
            names,
            frozenset(ids),
            re.compile("|".join(map(re.escape, names.values())) or r"(?!)"),
            frozenset(id for id in names if id in added and added[id].lstrip),
            frozenset(id for id in names if id in added and added[id].rstrip),
            _find_space_guards(tokenizer, names),
        )

    def mark(self, text: str) -> str:
        """Return a text with a mark in place of each control token."""
        numbers = {name: id for id, name in self.names.items()}
        return self.pattern.sub(lambda match: _MARK % numbers[match[0]], text)

    def unmark(self, text: str, kept: Collection[str] | None = None) -> str:
        """Return a text with the text of the control token in place of each mark.

        Args:
            text: Text with marks.
            kept: Texts of the control tokens to keep. The others are left out. None keeps all.
        """

        def name_of(match: re.Match[str]) -> str:
            name = self.names[int(match[1])]
            return name if kept is None or name in kept else ""

        return _MARKS.sub(name_of, text)

    @staticmethod
    def find_marks(text: str) -> list[tuple[int, int]]:
        """Return (index of its first character, id of its control token) of each mark in a text."""
        return [(match.start(), int(match[1])) for match in _MARKS.finditer(text)]

    def find_control_tokens(self, tokens: Tokens) -> NDArray[np.bool_]:
        """Return a mask [L] of the control tokens among token ids [L]."""
        return self._is_control.take(tokens, mode="clip")

    @cached_property
    def reasoning(self) -> dict[int, str]:
        """Id -> text of the tokens that separate a model's reasoning from its answer."""
        markers = reasoning_tokens(self.names.values())
        return {id: name for id, name in self.names.items() if name in markers}

    @cached_property
    def _is_control(self) -> NDArray[np.bool_]:
        """True for the ids of control tokens. The last entry stands for all larger ids."""
        table = np.zeros(max(self.ids, default=0) + 2, bool)
        table[list(self.ids)] = True
        return table

    @cached_property
    def role_token_marks(self) -> dict[str, str]:
        """Text of a control token with a marked role in it -> mark of the token."""
        pairs = ((id, name, role) for id, name in self.names.items() for role in ROLES if role in name)
        return {name.replace(role, _ROLE % role): _MARK % id for id, name, role in pairs}

    def encode(self, tokenizer: Any, marked: str) -> list[int]:
        """Encode rendered text, in which marks become control tokens and everything else becomes text.

        Args:
            tokenizer: The tokenizer of these control tokens.
            marked: Text with marks.

        Returns:
            Token ids [L].

        Raises:
            DataError: The text contains half a surrogate pair, or the tokenizer can only encode a part of it as control
                tokens.
        """
        try:
            marked.encode()  # tokenizers raise TypeError
        except UnicodeEncodeError as error:
            raise DataError(
                f"half a surrogate pair at character {error.start} of the messages is not valid text; remove it."
            ) from error
        texts, control_ids = _split_marks(marked)
        ids = self._encode_joined(tokenizer, texts, control_ids)
        return self._encode_separately(tokenizer, texts, control_ids) if ids is None else ids

    def matches(self, tokenizer: Any, marked: str, text: str) -> bool:
        """True if marked text stands for `text`, and its marks are the control tokens that the tokenizer finds in it.

        Args:
            tokenizer: The tokenizer of these control tokens.
            marked: Text with marks.
            text: Text without marks.
        """
        return self.unmark(marked) == text and self._encode_joined(tokenizer, *_split_marks(marked)) is not None

    def _encode_joined(self, tokenizer: Any, texts: list[str], control_ids: list[int]) -> list[int] | None:
        """Return the ids of the complete text, or None if the tokenizer finds other control tokens than `control_ids`.

        Texts of tokens are compared, because ids do not show where they come from. Ids are compared, too, because the
        tokenizer's normalization can turn other texts into control tokens.
        """
        pieces, starts, position = [texts[0]], [], len(texts[0])
        for id, text in zip(control_ids, texts[1:], strict=True):
            name = self.names[id]
            pieces += [name, text]
            starts.append(position)
            position += len(name) + len(text)
        rendered = "".join(pieces)
        matches = (match.start() for match in self.pattern.finditer(rendered))
        if any(next(matches, None) != start for start in [*starts, None]):
            return None
        ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids if [id for id in ids if id in self.ids] == [id for id in control_ids if id in self.ids] else None

    def _encode_separately(self, tokenizer: Any, texts: list[str], control_ids: list[int]) -> list[int]:
        """Return the ids of control tokens and of the texts around them, each of which is encoded alone."""
        for index, id in enumerate(control_ids):
            if id in self.lstrip_ids:
                texts[index] = texts[index].rstrip()
            if id in self.rstrip_ids:
                texts[index + 1] = texts[index + 1].lstrip()
        keys = [("", texts[0]), *((self.space_guards[0], text) for text in texts[1:])]
        ids_by_key = self._encode_plain(tokenizer, list(dict.fromkeys(keys)))
        ids = list(ids_by_key[keys[0]])
        for id, key in zip(control_ids, keys[1:], strict=True):
            ids += [id, *ids_by_key[key]]
        return ids

    def _encode_plain(self, tokenizer: Any, remaining: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
        """Encode texts without control tokens, in pieces that are as long as possible.

        Args:
            remaining: (space guard, text) of each text.

        Returns:
            (space guard, text) -> ids.
        """
        encoded: dict[tuple[str, str], list[int]] = {}
        inner_guard = self.space_guards[1]
        for split in (self._split_at_controls, self._split_controls, list):
            pieces_by_key = {(guard, text): split(text) or [""] for guard, text in remaining}
            heads = [(guard, pieces[0]) for (guard, _), pieces in pieces_by_key.items()]
            tails = {(inner_guard, piece) for pieces in pieces_by_key.values() for piece in pieces[1:]}
            ids_by_piece = _encode_after_guards(tokenizer, [*heads, *tails])
            for (guard, text), pieces in pieces_by_key.items():
                rest = [id for piece in pieces[1:] for id in ids_by_piece[inner_guard, piece]]
                encoded[guard, text] = ids_by_piece[guard, pieces[0]] + rest
            remaining = [key for key in remaining if not self.ids.isdisjoint(encoded[key])]
            if not remaining:
                return encoded
        text = remaining[0][1][:100]
        raise DataError(f"the tokenizer cannot encode {text!r} as plain text; remove it from the messages.")

    def _split_at_controls(self, text: str) -> list[str]:
        """Split a text before and after control tokens, so that a repeated one is encoded once."""
        return [piece for piece in re.split(f"({self.pattern.pattern})", text) if piece]

    def _split_controls(self, text: str) -> list[str]:
        """Split control tokens into characters, for vocabularies that also contain their texts as words."""
        pieces = self._split_at_controls(text)
        return [part for piece in pieces for part in (piece if self.pattern.fullmatch(piece) else [piece])]


def _split_marks(marked: str) -> tuple[list[str], list[int]]:
    """Return the texts around marks, and the ids of the marks. There is one text more than marks."""
    parts = _MARKS.split(marked)
    return parts[::2], [int(id) for id in parts[1::2]]


def _encode_after_guards(tokenizer: Any, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """Return (space guard, text) -> ids of the text after the guard, with special tokens encoded as text.

    All texts are encoded in one call, since a call costs as much as encoding a hundred characters.
    """
    keys = list(dict.fromkeys(keys))
    guards = list(dict.fromkeys(guard for guard, _ in keys if guard))
    texts = [*guards, *(guard + text for guard, text in keys)]
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    guard_ids = {"": [], **dict(zip(guards, encoded, strict=False))}
    result = {}
    for (guard, text), ids in zip(keys, encoded[len(guards) :], strict=True):
        size = len(guard_ids[guard])
        if ids[:size] == guard_ids[guard]:
            result[guard, text] = ids[size:]
        else:  # a token spans the guard and the text
            result[guard, text] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return result


def _find_space_guards(tokenizer: Any, names: Mapping[int, str]) -> tuple[str, str]:
    """Return the texts that keep a tokenizer from adding a space, see `ControlTokens.space_guards`.

    Sentencepiece tokenizers add a space to the beginning of every encoded text, or only to the beginning of the
    complete text.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    line, alone, joined = ids("\n"), ids("x"), ids("\nx")
    if joined == line + alone or joined[: len(line)] != line:
        return "", ""
    after = next((ids(name + "x")[1:] for id, name in names.items() if ids(name + "x")[:1] == [id]), alone)
    return "\n" if after == joined[len(line) :] else "", "\n"


class _Role(str):
    """A role that compares like its text and is rendered with a mark."""

    def __str__(self) -> str:
        return _ROLE % str.__str__(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


@dataclass(frozen=True)
class MarkingTemplate:
    """A chat template of a tokenizer that renders marks in place of its control tokens."""

    controls: ControlTokens
    source: str | None
    """The template's source with marks; None if the tokenizer has no template."""
    variables: Mapping[str, str]
    """Variables such as bos_token and eos_token, with marks."""
    mode: MarkingMode = MarkingMode.LITERALS
    cache: dict[str, Any] = field(default_factory=dict, compare=False)
    """Cached results of the modules that examine this template."""

    def render(
        self, tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        """Render messages as text with marks.

        Args:
            tokenizer: The tokenizer of the template.
            messages: Messages in the format that the template expects.
            add_generation_prompt: End with the header of an assistant turn.
            options: Variables of the template.

        Raises:
            DataError: The template rejects the messages.
        """
        try:
            return self._render_marked(tokenizer, messages, add_generation_prompt, options)
        except TEMPLATE_ERRORS as error:
            reason = _ROLES.sub(r"\1", self.controls.unmark(str(error))).replace(_NONCE, "")
            raise DataError(f"the chat template rejects these messages: {reason}") from error

    def _render_marked(
        self, tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        if self.mode is MarkingMode.ROLES:
            messages = [
                {**message, "role": _Role(message["role"])} if message.get("role") in ROLES else message
                for message in messages
            ]
        if self.mode is MarkingMode.MESSAGES:
            messages, options = self._break_tokens(list(messages)), self._break_tokens(dict(options))
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{**self.variables, **options, "chat_template": self.source},
        )
        if self.mode is MarkingMode.ROLES:
            for name, mark in self.controls.role_token_marks.items():
                text = text.replace(name, mark)
            text = _ROLES.sub(r"\1", text)
        return self.controls.mark(text).replace(_BREAK, "") if self.mode is MarkingMode.MESSAGES else text

    def _break_tokens(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.controls.pattern.sub(lambda match: match[0][:1] + _BREAK + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._break_tokens(key): self._break_tokens(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._break_tokens(item) for item in value]
        return value


_TEMPLATES: WeakKeyDictionary[Any, dict[Any, MarkingTemplate]] = WeakKeyDictionary()


def get_marking_template(tokenizer: Any, options: Mapping[str, Any] | None = None) -> MarkingTemplate:
    """Return the marking template of a tokenizer. It is cached for each state of the tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        options: Variables of the template. `chat_template` is the source or the name of another template, and `tools`
            can select one of several templates of the tokenizer. None: no variables.
    """
    options = options or {}
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError:
        source = None
    special_tokens = tokenizer.special_tokens_map
    key = source, len(tokenizer), len(tokenizer.extra_special_tokens), *special_tokens.items()
    cached = _TEMPLATES.setdefault(tokenizer, {})
    template = cached.get(key)
    if template is None:
        if len(cached) >= _MAX_TEMPLATES:
            cached.clear()
        template = cached[key] = _make_template(tokenizer, source, special_tokens)
    return template


def _make_template(tokenizer: Any, source: str | None, special_tokens: Mapping[str, str]) -> MarkingTemplate:
    """Return the template in the first marking mode in which harmless conversations render as without marks."""
    if source is None:
        return MarkingTemplate(ControlTokens.from_tokenizer(tokenizer, ()), None, {})
    rendered = list(_render_harmless(tokenizer, source))
    texts = [text for _, add_generation_prompt, text in rendered if not add_generation_prompt]
    encoded = tokenizer(texts or [source], add_special_tokens=False)["input_ids"]
    controls = ControlTokens.from_tokenizer(tokenizer, set().union(*encoded))
    marked = controls.mark(source), {name: controls.mark(token) for name, token in special_tokens.items()}
    for mode in (MarkingMode.LITERALS, MarkingMode.ROLES):
        template = MarkingTemplate(controls, *marked, mode)
        try:
            if all(
                controls.matches(tokenizer, template.render(tokenizer, messages, add_generation_prompt, {}), text)
                for messages, add_generation_prompt, text in rendered
            ):
                return template
        except DataError:
            continue
    log.warning(
        "The chat template builds control tokens in an unknown way. A control token that it joins from several texts "
        "of messages is not detected."
    )
    return MarkingTemplate(controls, source, {}, MarkingMode.MESSAGES)


def _render_harmless(tokenizer: Any, source: str) -> Iterator[tuple[list[Message], bool, str]]:
    """Yield (messages, add_generation_prompt, text) of conversations of all roles that the template supports."""
    chat = [("user", "x"), ("assistant", "y"), ("user", "z")]
    tool_use = [*chat[:2], ("tool", "w"), ("assistant", "y")]
    for turns in (chat[:1], chat, [("system", "v"), *chat], tool_use):
        for as_parts in (False, True):
            messages: list[Message] = [
                {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
                for role, text in turns
            ]
            for add_generation_prompt in (False, True):
                try:
                    text = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=add_generation_prompt, chat_template=source
                    )
                except TEMPLATE_ERRORS:
                    continue
                yield messages, add_generation_prompt, text


# -- The end-of-turn token ---------------------------------------------------------------------------------------------


def find_end_of_turn_token(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> int | None:
    """Return the id of the control token that ends an assistant turn.

    The token must follow the text of the answer directly or after white space. If several tokens follow, those that the
    template writes after the last answer as well as after an earlier one end the turn, and the last of them is
    returned. If the two positions have no token in common, the last token after the last answer is returned: gpt-oss
    ends an answer with `<|return|>`, which it rewrites to `<|end|>` in the history, where `<|end|>` also ends the
    analysis before an answer. If the template writes nothing after the last answer, the first token of the next message
    is returned (`<|user|>` in GLM).

    Args:
        tokenizer: A Hugging Face tokenizer, or None.
        chat_template_kwargs: Variables of the template; see `get_marking_template`. None: no variables.

    Returns:
        The id, or None if there is no tokenizer or template, if the template rejects a conversation of user and
        assistant, or if answers do not end with a control token.
    """
    options = dict(chat_template_kwargs or {})
    if tokenizer is None or not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        return None
    template = get_marking_template(tokenizer, options)
    last = _closing_tokens(tokenizer, template, options, followed=False)
    earlier = _closing_tokens(tokenizer, template, options, followed=True)
    shared = [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
    closing = shared or last or earlier[:1]
    return closing[-1] if closing else None


def find_end_of_turn_name(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the text of the end-of-turn token, or else of the end-of-sequence token; "" if there is neither.

    Args:
        tokenizer: A Hugging Face tokenizer, or None.
        chat_template_kwargs: Variables of the template; see `get_marking_template`. None: no variables.
    """
    end = find_end_of_turn_token(tokenizer, chat_template_kwargs)
    end = getattr(tokenizer, "eos_token_id", None) if end is None else end
    return "" if end is None else str(tokenizer.convert_ids_to_tokens(end))


def _closing_tokens(
    tokenizer: Any, template: MarkingTemplate, options: Mapping[str, Any], *, followed: bool
) -> list[int]:
    """Return the ids of the control tokens directly after an answer, which another message follows or not."""
    turns = [("user", "?"), ("assistant", ASSISTANT_PLACEHOLDER), ("user", "?")][: 3 if followed else 2]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = template.render(tokenizer, messages, False, options)
        ids = template.controls.encode(tokenizer, text.partition(ASSISTANT_PLACEHOLDER)[2].lstrip())
    except DataError:
        return []
    return list(takewhile(template.controls.ids.__contains__, ids))
