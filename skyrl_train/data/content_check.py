"""A check that rendered text contains all content of a conversation: texts, reasoning, tool calls and tools.

Chat templates drop unknown content without an error. The check renders a conversation once more with a marker in place
of each text (leaf). The markers must appear, those of a message after those of the message before it, and the text
between them must be that of the real conversation. This is done once for each shape of conversation (its roles and
fields). Further conversations of that shape are compared with the result, which needs no rendering.

If a template treats some texts specially, this comparison fails. Then the conversation's own texts are rendered with
markers before them. White space is ignored throughout, because templates trim and indent.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import escape

from skyrl_train.data.control_tokens import ANSWER_TAG_PATTERN, MarkingTemplate
from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import CLOSE_MARKER_PATTERN, REASONING_FORMATS
from skyrl_train.errors import DataError

Render = Callable[[str, Sequence[Message], Mapping[str, Any]], str]
"""Function that renders messages, given a `chat.RenderMode`, the messages and the template's variables."""
MAX_SHAPES = 4096
"""Maximum number of shapes, and of compared roles, that are cached for one template."""
_NONCE = secrets.randbelow(9 * 10**17) + 10**17


@dataclass(slots=True)
class ContentCheck:
    """A check of conversations that are rendered in one mode with one template."""

    template: MarkingTemplate
    mode: str
    """The `chat.RenderMode`."""
    render: Render

    def find_missing_text(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        text: str,
        reasoning_indices: Collection[int] = (),
    ) -> str | None:
        """Return a message about the first content that rendered text lacks, or None if it is complete.

        Args:
            messages: Messages in normal form.
            options: Variables of the template.
            text: The text that `render` returns for the messages.
            reasoning_indices: Indices of messages whose reasoning must be in the text. Templates may drop the reasoning
                of other messages.
        """
        walker = ConversationWalker(self.template.source or "")
        walker.walk(messages, options)
        reasoning_indices = frozenset(reasoning_indices)
        shapes: dict[Any, _RenderedShape | None] = self._get_cache("shapes")
        key = (self.mode, reasoning_indices, *walker.key)
        if key in shapes:
            shape = shapes[key]
        else:
            shape = shapes[key] = self._render_shape(messages, options, reasoning_indices)
        if shape is not None and shape.matches(text, walker.leaves):
            return None
        return self._find_missing_own_text(messages, options, remove_whitespace(text), reasoning_indices)

    def _get_cache(self, name: str) -> dict[Any, Any]:
        cache: dict[Any, Any] = self.template.cache.setdefault(name, {})
        if len(cache) >= MAX_SHAPES:
            cache.clear()
        return cache

    def _render_shape(
        self, messages: Sequence[Message], options: Mapping[str, Any], reasoning_indices: Collection[int]
    ) -> _RenderedShape | None:
        """Render markers. Return None if some are missing or out of order, or if a role is rendered like another."""
        markers: list[str] = []

        def mark(leaf: TextLeaf) -> str:
            markers.append(_marker(len(markers), leaf.replacement_length))
            return markers[-1]

        walker = ConversationWalker(self.template.source or "", mark)
        marked, marked_options = walker.walk(messages, options)
        try:
            raw = self.render(self.mode, marked, marked_options)
            text = remove_whitespace(raw)
            missing = self._find_missing_leaf(text, markers, walker.leaves, marked, marked_options, reasoning_indices)
            if missing is not None or self._find_confused_role(walker, marked, marked_options, text) is not None:
                return None
        except DataError:
            return None  # the template rejects markers
        indices = {marker: index for index, marker in enumerate(markers)}
        pieces = re.split(f"({'|'.join(markers)})", raw) if markers else [raw]
        return _RenderedShape(pieces[::2], [indices[marker] for marker in pieces[1::2]])

    def _find_missing_own_text(
        self, messages: Sequence[Message], options: Mapping[str, Any], real: str, reasoning_indices: Collection[int]
    ) -> str | None:
        """Render the conversation's own texts with markers before them, and find what is missing.

        Args:
            messages: Messages in normal form.
            options: Variables of the template.
            real: Rendered text of the conversation without white space.
            reasoning_indices: See `find_missing_text`.
        """
        markers: list[str] = []

        def mark(leaf: TextLeaf) -> str:
            if leaf.kind is TextKind.DEFINITION:
                markers.append("")
                return leaf.text
            markers.append(_marker(len(markers), leaf.replacement_length))
            return markers[-1] + ("" if leaf.is_number else leaf.text)

        walker = ConversationWalker(self.template.source or "", mark)
        marked, marked_options = walker.walk(messages, options)
        try:
            text = remove_whitespace(self.render(self.mode, marked, marked_options))
        except DataError:  # the template rejects markers
            return self._find_missing_by_comparison(messages, options, real, walker.leaves, reasoning_indices)
        missing = self._find_missing_leaf(
            text, markers, walker.leaves, marked, marked_options, reasoning_indices, own_text_follows=True
        )
        if missing is not None:
            return _describe(walker.leaves[missing], messages)
        index = self._find_confused_role(walker, marked, marked_options, text)
        if index is not None:
            return (
                f"messages[{index}].role: the chat template writes a message of role {messages[index]['role']!r} like "
                "a message of another role, so the model cannot distinguish them. Use a template that supports the "
                "role (generator.chat_template), or another role."
            )
        for leaf, marker in zip(walker.leaves, markers, strict=True):
            text = text.replace(marker, leaf.text if leaf.is_number else "") if marker else text
        if text == real:
            return None
        return self._find_missing_by_comparison(messages, options, real, walker.leaves, reasoning_indices)

    def _find_missing_by_comparison(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        real: str,
        leaves: Sequence[TextLeaf],
        reasoning_indices: Collection[int],
    ) -> str | None:
        """Find missing leaves by replacing each with another text of the same length.

        The rendered text must then contain the leaf less often. This is for templates that depend on the length or the
        beginning of a text, which markers change.
        """
        other = next(char for char in map(chr, range(0x4E00, 0xD800)) if char not in real)
        for index, leaf in enumerate(leaves):
            is_needed = leaf.kind is TextKind.TEXT or (
                leaf.index in reasoning_indices and leaf.kind is not TextKind.DEFINITION
            )
            if leaf.is_number or not is_needed:
                continue
            walker = ConversationWalker(self.template.source or "", _replace_leaf(index, other))
            try:
                text = remove_whitespace(self.render(self.mode, *walker.walk(messages, options)))
            except DataError:
                text = ""  # the template rejects other texts
            if not any(real.count(form) > text.count(form) for form in escaped_forms(leaf.text)):
                return _describe(leaf, messages)
        return None

    def _find_missing_leaf(
        self,
        text: str,
        markers: Sequence[str],
        leaves: Sequence[TextLeaf],
        messages: Sequence[Message],
        options: Mapping[str, Any],
        reasoning_indices: Collection[int],
        own_text_follows: bool = False,
    ) -> int | None:
        """Return the index of the first needed leaf whose marker is missing or before an earlier message's.

        Args:
            text: Rendered text with markers, without white space.
            markers: Marker of each leaf.
            leaves: The leaves.
            messages: Messages with markers.
            options: Variables of the template with markers.
            reasoning_indices: See `find_missing_text`.
            own_text_follows: The leaf's own text must follow its marker.
        """
        message_index, start, end = TOOLS_INDEX, 0, 0
        for leaf_index, (leaf, marker) in enumerate(zip(leaves, markers, strict=True)):
            if leaf.kind is TextKind.DEFINITION:
                continue
            if leaf.index != message_index:
                message_index, start = leaf.index, end
            # Templates may write tools and system messages anywhere, for example at the end.
            is_anywhere = message_index == TOOLS_INDEX or role_group(messages[message_index]["role"]) == "system"
            begin = 0 if is_anywhere else start
            suffixes = escaped_forms(leaf.text) if own_text_follows and not leaf.is_number else ("",)
            found = next((at for suffix in suffixes if (at := text.find(marker + suffix, begin)) >= 0), -1)
            if found >= 0:
                end = end if is_anywhere else max(end, found + len(marker))
            elif not self._may_be_dropped(leaf, marker, messages, options, reasoning_indices):
                return leaf_index
        return None

    def _may_be_dropped(
        self,
        leaf: TextLeaf,
        marker: str,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        reasoning_indices: Collection[int],
    ) -> bool:
        """True for reasoning of an earlier turn, provided that the template writes it while the turn is the last."""
        if leaf.index in reasoning_indices or leaf.kind not in (TextKind.THOUGHT, TextKind.REASONING):
            return False
        if leaf.kind is TextKind.THOUGHT:
            return True
        try:
            return marker in remove_whitespace(self.render("closed", messages[: leaf.index + 1], options))
        except DataError:  # the template rejects a conversation that ends with this turn
            return True

    def _find_confused_role(
        self, walker: ConversationWalker, messages: Sequence[Message], options: Mapping[str, Any], text: str
    ) -> int | None:
        """Return the index of a message whose rendering does not change if it has a more common role, or None.

        The more common roles are "user" and those of the conversation. A template that supports only common roles
        writes other roles like one of them.
        """
        ranks = {"user": 0} | {message["role"]: _rank(message["role"]) for message in messages}
        with_text = {leaf.index for leaf in walker.leaves if leaf.kind is not TextKind.DEFINITION}
        calls = {index for index, message in enumerate(messages) if message.get("tool_calls")}  # always an assistant's
        checked = self._get_cache("roles")
        for index in sorted(with_text - {TOOLS_INDEX} - calls):
            message = messages[index]
            for role, rank in ranks.items():
                key = self.mode, walker.message_keys[index], index == 0, role
                if rank >= ranks[message["role"]] or key in checked:
                    continue
                changed = [*messages[:index], {**message, "role": role}, *messages[index + 1 :]]
                try:
                    if remove_whitespace(self.render(self.mode, changed, options)) == text:
                        return index
                except DataError:
                    pass  # the template distinguishes the roles
                checked[key] = True
        return None


def _rank(role: str) -> int:
    """Return a number that is larger for less common roles and equal for roles of one `role_group`."""
    common = ("user", "assistant", "system")
    group = role_group(role)
    return common.index(group) if group in common else len(common)


@dataclass(frozen=True, slots=True)
class _RenderedShape:
    """Rendered text of a shape: literals, and the leaves between them."""

    literals: list[str]
    """Texts around the leaves; one more than leaves."""
    order: list[int]
    """Indices of the leaves, in the order of the rendered text."""

    def matches(self, text: str, leaves: Sequence[TextLeaf]) -> bool:
        """True if a text consists of the literals and the texts of the leaves, which may be escaped."""
        expected = [self.literals[0]]
        for index, literal in zip(self.order, self.literals[1:], strict=True):
            expected += leaves[index].text, literal
        if "".join(expected) == text:
            return True
        text, literals = remove_whitespace(text), [remove_whitespace(literal) for literal in self.literals]
        if not text.startswith(literals[0]):
            return False
        position = len(literals[0])
        for index, literal in zip(self.order, literals[1:], strict=True):
            for form in escaped_forms(leaves[index].text):
                end = position + len(form)
                if text.startswith(form, position) and text.startswith(literal, end):
                    position = end + len(literal)
                    break
            else:
                return False
        return position == len(text)


def remove_whitespace(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def escaped_forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text, without white space: plain, or escaped as JSON, HTML, Python."""
    yield remove_whitespace(text)
    as_json = json.dumps(text, ensure_ascii=False)[1:-1]
    yield remove_whitespace(as_json)
    yield remove_whitespace(json.dumps(text)[1:-1])
    yield remove_whitespace(str(escape(text)))
    yield remove_whitespace(html.escape(text))
    yield remove_whitespace(str(htmlsafe_json_dumps(text))[1:-1])
    yield remove_whitespace(repr(text)[1:-1])
    yield remove_whitespace(json.dumps(as_json, ensure_ascii=False)[1:-1])


def _marker(index: int, length: int | None) -> str:
    """Return a number that no text contains, with `length` digits if templates may require a length."""
    return str(_NONCE + index) if length is None else f"{(_NONCE + index) % 10**length:0{length}}"


def _replace_leaf(index: int, char: str) -> Callable[[TextLeaf], str]:
    """Return a `replace_text` of ConversationWalker that replaces all characters of the leaf at an index."""
    indices = itertools.count()
    return lambda leaf: char * len(leaf.text) if next(indices) == index else leaf.text


def _describe(leaf: TextLeaf, messages: Sequence[Message]) -> str:
    if leaf.index == TOOLS_INDEX:
        return (
            f"{leaf.field}: the chat template does not write the tool {leaf.text!r:.80}. Use a template that writes "
            "tools (generator.chat_template), or remove the column."
        )
    role = messages[leaf.index]["role"]
    return (
        f"messages[{leaf.index}].{leaf.field}: the chat template does not write {leaf.text!r:.80} of this {role} "
        "message in its place. Use a template that does (generator.chat_template), or put the text into content."
    )


# -- Splitting a conversation into its texts ---------------------------------------------------------------------------


TOOLS_INDEX = -1
"""Message index of leaves that belong to tools."""


class TextKind(StrEnum):
    """Kind of a leaf."""

    TEXT = "text"
    """A text that the template must write."""
    THOUGHT = "thought"
    """Reasoning inside a content."""
    REASONING = "reasoning"
    """Reasoning in a separate field of the message."""
    DEFINITION = "definition"
    """Another string, which the template need not write, such as an id."""


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FIELDS = ("content", *REASONING_FIELDS, "tool_calls")
_IDS = ("id", "tool_call_id")
_TAGS_BEGIN = {"<", *(marker[0] for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker))}
"""First characters of tags. Texts without any of them are not searched."""
_GROUPS = {
    "developer": "system",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
}
"""Role -> the role that templates may write in the same way."""


def role_group(role: str) -> str:
    """Return the role that represents the group of roles that templates may write like `role`."""
    return _GROUPS.get(role, role)


@dataclass(frozen=True, slots=True)
class TextLeaf:
    """A text of a conversation, without white space around it."""

    index: int
    """Index of its message, or TOOLS_INDEX."""
    field: str
    """Path of the field in the message, for error messages."""
    text: str
    kind: TextKind = TextKind.TEXT
    is_number: bool = False
    """True for a number, whose JSON is `text`."""
    replacement_length: int | None = None
    """Length that a replacement must have; None allows any length."""


class ConversationWalker:
    """A reader that splits a conversation into leaves and its shape, and copies it with replaced leaves.

    Args:
        source: Source of the template.
        replace_text: Function that returns the text to put in place of a leaf. None keeps all texts.

    Attributes:
        leaves: The leaves, in order.
        key: Hashable items that describe everything except the texts of leaves.
        message_keys: The part of `key` of each message.
    """

    def __init__(self, source: str, replace_text: Callable[[TextLeaf], str] | None = None):
        self.leaves: list[TextLeaf] = []
        self.key: list[Any] = []
        self.message_keys: list[tuple[Any, ...]] = []
        self._source = source
        self._replace_text = replace_text
        self._index = TOOLS_INDEX
        self._ids: dict[str, str] = {}

    def walk(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """Read a conversation. It sets the attributes; call it once.

        Args:
            messages: Messages in normal form.
            options: Variables of the template. `tools` among them is read, too.

        Returns:
            Copies of the messages and the variables, with replaced leaves.
        """
        options = dict(options)
        tools = options.pop("tools", None)
        self.key.append(repr(sorted(options.items())) if options else "")
        if tools:
            self.key.append(json.dumps(tools, default=str))
            options["tools"] = [self._tool(tool, index) for index, tool in enumerate(tools)]
        copies = []
        for index, message in enumerate(messages):
            self._index = index
            begin = len(self.key)
            copies.append(self._message(message))
            self.message_keys.append(tuple(self.key[begin:]))
        return copies, options

    def _tool(self, tool: Any, index: int) -> Any:
        field = f"tools[{index}]"
        if isinstance(function := tool.get("function"), Mapping):
            return {**tool, "function": {**function, "name": self._leaf(function["name"], f"{field}.function.name")}}
        return {**tool, "name": self._leaf(tool["name"], f"{field}.name")} if "name" in tool else tool

    def _message(self, message: Message) -> Message:
        role, copy = message["role"], dict(message)
        self.key.append(role)
        for field in _FIELDS if len(message) > 2 else ("content",):
            value = message.get(field)
            if not value:
                continue
            if field == "tool_calls":
                copy[field] = [self._call(call, f"tool_calls[{index}]") for index, call in enumerate(value)]
            elif isinstance(value, str):
                self.key.append(field)
                kind = TextKind.TEXT if field == "content" else TextKind.REASONING
                copy[field] = self._text(value, field, kind, has_thoughts=role == "assistant")
        if len(message) > 2:
            for field in sorted(message.keys() - {"role", *_FIELDS}):
                copy[field] = self._other(message[field], field)
        return copy

    def _other(self, value: Any, field: str) -> Any:
        """Read a field that the template need not write."""
        if field not in self._source:
            return value
        self.key.append(field)
        if field in _IDS and isinstance(value, str) and len(value) >= 9:
            if value not in self._ids:
                self._ids[value] = self._leaf(value, field, TextKind.DEFINITION, length=min(len(value), 18))
            self.key.append(list(self._ids).index(value))
            return self._ids[value]
        self.key.append(json.dumps(value, default=str))
        return value

    def _call(self, call: Mapping[str, Any], field: str) -> dict[str, Any]:
        self.key.append("call")
        function = call.get("function", call)
        copy = {**function, "name": self._leaf(function["name"], f"{field}.function.name")}
        copy["arguments"] = self._value(function.get("arguments"), f"{field}.function.arguments")
        if function is call:
            return copy
        others = {key: self._other(call[key], key) for key in sorted(call.keys() - {"function"})}
        return {**others, "function": copy}

    def _value(self, value: Any, field: str) -> Any:
        """Read a JSON value."""
        if isinstance(value, str):
            return self._text(value, field, TextKind.TEXT)
        if isinstance(value, Mapping):
            self.key.append(len(value))
            return {self._leaf(key, field): self._value(item, f"{field}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            self.key.append((len(value),))
            return [self._value(item, f"{field}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.key.append("number")
            text = json.dumps(value)
            leaf = TextLeaf(self._index, field, text, is_number=True)
            self.leaves.append(leaf)
            replacement = text if self._replace_text is None else self._replace_text(leaf)
            return value if replacement == text else int(replacement)
        self.key.append(repr(value))
        return value

    def _text(self, value: str, field: str, kind: TextKind, has_thoughts: bool = False) -> str:
        """Read a text piece by piece between tags, since templates treat a text depending on its tags.

        With `has_thoughts`, everything before the last closing marker of reasoning is a thought.
        """
        if not any(char in value for char in _TAGS_BEGIN) or not (tags := list(ANSWER_TAG_PATTERN.finditer(value))):
            return self._piece(value, field, kind)
        closing_tags = (tag for tag in tags if has_thoughts and CLOSE_MARKER_PATTERN.fullmatch(tag[0]))
        thought_end = max((tag.end() for tag in closing_tags), default=0)
        pieces, position = [], 0
        for tag in tags:
            is_thought = kind is TextKind.TEXT and tag.end() <= thought_end
            piece_kind = TextKind.THOUGHT if is_thought else kind
            pieces += [self._piece(value[position : tag.start()], field, piece_kind), tag[0]]
            self.key.append(tag[0])
            position = tag.end()
        return "".join([*pieces, self._piece(value[position:], field, kind)])

    def _piece(self, piece: str, field: str, kind: TextKind) -> str:
        text = piece.strip()
        self.key.append(bool(text))
        if not text:
            return piece
        replacement = self._leaf(text, field, kind)
        if self._replace_text is None or replacement == text:
            return piece
        start = len(piece) - len(piece.lstrip())
        return piece[:start] + replacement + piece[start + len(text) :]

    def _leaf(self, text: str, field: str, kind: TextKind = TextKind.TEXT, *, length: int | None = None) -> str:
        leaf = TextLeaf(self._index, field, text.strip(), kind, replacement_length=length)
        self.leaves.append(leaf)
        return text if self._replace_text is None else self._replace_text(leaf)
