"""A check that rendered text holds everything that a conversation says: texts, reasoning, tool calls and tools.

Chat templates drop what they do not know without an error. The check renders a conversation once more with a marker in
place of each text. The markers must appear, those of a message after those of the message before it, and the text
between them must be that of the real conversation. This is done once for every shape of conversation (its roles and
fields). The rest of the conversations of that shape are compared with the result, which needs no rendering.

Where a template treats some texts specially, this comparison fails. Then the conversation's own texts are marked and
rendered. White space is ignored throughout, since templates trim and indent.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import escape

from skyrl_train.data.control_tokens import ANSWER_TAG_PATTERN, MarkingTemplate
from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import CLOSE_MARKER_PATTERN, REASONING_FORMATS
from skyrl_train.errors import DataError

Render = Callable[[str, Sequence[Message], Mapping[str, Any]], str]
"""Renders messages in a way (see `chat.render_text`) with the template's variables."""
MAX_SHAPES = 4096
"""Shapes and roles that are kept for one template."""
_NONCE = secrets.randbelow(9 * 10**17) + 10**17


@dataclass(slots=True)
class ContentCheck:
    """The check of conversations that are rendered in one way with one template."""

    template: MarkingTemplate
    mode: str
    """Name of the way, which distinguishes shapes."""
    render: Render

    def find_missing_text(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        text: str,
        reasoning_indices: Collection[int] = (),
    ) -> str | None:
        """Describe the first thing that `text` lacks; None if it is complete.

        Args:
            messages: Messages in normal form.
            text: What `render` makes of them.
            spoken: Indices of messages whose reasoning is needed. Templates may drop that of other messages, as they do
                when a model is used.
        """
        walk = ConversationWalker(self.template.source or "")
        walk.walk(messages, options)
        reasoning_indices = frozenset(reasoning_indices)
        shapes: dict[Any, _RenderedShape | None] = self._get_cache("shapes")
        key = (self.mode, reasoning_indices, *walk.key)
        if key in shapes:
            shape = shapes[key]
        else:
            shape = shapes[key] = self._shape(messages, options, reasoning_indices)
        if shape is not None and shape.matches(text, walk.leaves):
            return None
        return self._find_missing_own_text(messages, options, remove_whitespace(text), reasoning_indices)

    def _get_cache(self, name: str) -> dict[Any, Any]:
        kept: dict[Any, Any] = self.template.cache.setdefault(name, {})
        if len(kept) >= MAX_SHAPES:
            kept.clear()
        return kept

    def _shape(
        self, messages: Sequence[Message], options: Mapping[str, Any], reasoning_indices: Collection[int]
    ) -> _RenderedShape | None:
        """Render markers; None if some are missing, out of order, or under no role of their own."""
        markers: list[str] = []

        def mark(leaf: TextLeaf) -> str:
            markers.append(_marker(len(markers), leaf.replacement_length))
            return markers[-1]

        walk = ConversationWalker(self.template.source or "", mark)
        marked, marked_options = walk.walk(messages, options)
        try:
            raw = self.render(self.mode, marked, marked_options)
            text = remove_whitespace(raw)
            complete = (
                self._find_missing_leaf(text, markers, walk.leaves, marked, marked_options, reasoning_indices) is None
            )
            if not complete or self._find_confused_role(walk, marked, marked_options, text) is not None:
                return None
        except DataError:
            return None  # this template does not take markers
        places = {marker: place for place, marker in enumerate(markers)}
        pieces = re.split(f"({'|'.join(markers)})", raw) if markers else [raw]
        return _RenderedShape(pieces[::2], [places[marker] for marker in pieces[1::2]])

    def _find_missing_own_text(
        self, messages: Sequence[Message], options: Mapping[str, Any], real: str, reasoning_indices: Collection[int]
    ) -> str | None:
        """Render the conversation's own texts behind markers. `real` is its text without white space."""
        markers: list[str] = []

        def mark(leaf: TextLeaf) -> str:
            if leaf.kind == DEFINITION:
                markers.append("")
                return leaf.text
            markers.append(_marker(len(markers), leaf.replacement_length))
            return markers[-1] + ("" if leaf.is_number else leaf.text)

        walk = ConversationWalker(self.template.source or "", mark)
        marked, marked_options = walk.walk(messages, options)
        try:
            text = remove_whitespace(self.render(self.mode, marked, marked_options))
        except DataError:  # this template does not take markers
            return self._find_missing_by_comparison(messages, options, real, walk.leaves, reasoning_indices)
        place = self._find_missing_leaf(text, markers, walk.leaves, marked, marked_options, reasoning_indices, own=True)
        if place is not None:
            return _describe(walk.leaves[place], messages)
        index = self._find_confused_role(walk, marked, marked_options, text)
        if index is not None:
            return (
                f"messages[{index}].role: the chat template writes a message of role {messages[index]['role']!r} like "
                "one of another role, so that the model cannot tell them apart. Use a template that knows the role "
                "(generator.chat_template), or another role."
            )
        for leaf, marker in zip(walk.leaves, markers, strict=True):
            text = text.replace(marker, leaf.text if leaf.is_number else "") if marker else text
        return (
            None
            if text == real
            else self._find_missing_by_comparison(messages, options, real, walk.leaves, reasoning_indices)
        )

    def _find_missing_by_comparison(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        real: str,
        leaves: Sequence[TextLeaf],
        reasoning_indices: Collection[int],
    ) -> str | None:
        """Replace one leaf after another by a text of the same length, whose rendering must hold the leaf less often.

        This is for templates that decide by the length or the beginning of a text, which markers change.
        """
        other = next(char for char in map(chr, range(0x4E00, 0xD800)) if char not in real)
        for place, leaf in enumerate(leaves):
            needed = leaf.kind == TEXT or (leaf.index in reasoning_indices and leaf.kind != DEFINITION)
            if leaf.is_number or not needed:
                continue
            walk = ConversationWalker(self.template.source or "", _replace_leaf(place, other))
            try:
                text = remove_whitespace(self.render(self.mode, *walk.walk(messages, options)))
            except DataError:
                text = ""  # this template does not take other texts
            if not any(real.count(one) > text.count(one) for one in escaped_forms(leaf.text)):
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
        own: bool = False,
    ) -> int | None:
        """Return the index of the first leaf that is needed and whose marker is missing or in another's place.

        Args:
            own: The leaf's own text must follow its marker.
        """
        index, start, end = TOOLS_INDEX, 0, 0
        for place, (leaf, marker) in enumerate(zip(leaves, markers, strict=True)):
            if leaf.kind == DEFINITION:
                continue
            if leaf.index != index:
                index, start = leaf.index, end
            anywhere = index == TOOLS_INDEX or role_group(messages[index]["role"]) == "system"  # some write it last
            begin = 0 if anywhere else start
            followed_by = escaped_forms(leaf.text) if own and not leaf.is_number else ("",)
            at = next((at for one in followed_by if (at := text.find(marker + one, begin)) >= 0), -1)
            if at >= 0:
                end = end if anywhere else max(end, at + len(marker))
            elif not self._may_be_dropped(leaf, marker, messages, options, reasoning_indices):
                return place
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
        if leaf.index in reasoning_indices or leaf.kind not in (THOUGHT, REASONING):
            return False
        if leaf.kind == THOUGHT:
            return True
        try:
            return marker in remove_whitespace(self.render("closed", messages[: leaf.index + 1], options))
        except DataError:  # the template does not take a conversation that ends with this turn
            return True

    def _find_confused_role(
        self, walk: ConversationWalker, messages: Sequence[Message], options: Mapping[str, Any], text: str
    ) -> int | None:
        """Return the index of a message that is rendered no differently as the user's, or under a more common role of
        the conversation.

        A template that knows only the common roles writes the others like one of them.
        """
        ranks = {"user": 0} | {message["role"]: _rank(message["role"]) for message in messages}
        with_text = {leaf.index for leaf in walk.leaves if leaf.kind != DEFINITION}
        calls = {index for index, message in enumerate(messages) if message.get("tool_calls")}  # only an assistant's
        kept = self._get_cache("roles")
        for index in sorted(with_text - {TOOLS_INDEX} - calls):
            message = messages[index]
            for role, rank in ranks.items():
                key = self.mode, walk.message_keys[index], index == 0, role
                if rank >= ranks[message["role"]] or key in kept:
                    continue
                changed = [*messages[:index], {**message, "role": role}, *messages[index + 1 :]]
                try:
                    if remove_whitespace(self.render(self.mode, changed, options)) == text:
                        return index
                except DataError:
                    pass  # the template tells the roles apart
                kept[key] = True
        return None


def _rank(role: str) -> int:
    """Return how uncommon a role is. Templates rightly write some roles alike, such as system and developer."""
    common = ("user", "assistant", "system")
    group = role_group(role)
    return common.index(group) if group in common else len(common)


@dataclass(frozen=True, slots=True)
class _RenderedShape:
    """Rendered text of a shape: literals, and between them the leaves in this order."""

    literals: list[str]
    order: list[int]

    def matches(self, text: str, leaves: Sequence[TextLeaf]) -> bool:
        """True if `text` consists of the literals and the texts of these leaves, perhaps escaped."""
        written = [self.literals[0]]
        for place, literal in zip(self.order, self.literals[1:], strict=True):
            written += leaves[place].text, literal
        if "".join(written) == text:
            return True
        text, literals = remove_whitespace(text), [remove_whitespace(literal) for literal in self.literals]
        if not text.startswith(literals[0]):
            return False
        at = len(literals[0])
        for place, literal in zip(self.order, literals[1:], strict=True):
            for spelling in escaped_forms(leaves[place].text):
                end = at + len(spelling)
                if text.startswith(spelling, at) and text.startswith(literal, end):
                    at = end + len(literal)
                    break
            else:
                return False
        return at == len(text)


def remove_whitespace(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())


def escaped_forms(text: str) -> Iterator[str]:
    """Yield the forms in which templates write a text: as it is, and escaped for JSON, HTML and Python."""
    yield remove_whitespace(text)
    as_json = json.dumps(text, ensure_ascii=False)[1:-1]
    yield remove_whitespace(as_json)
    yield remove_whitespace(json.dumps(text)[1:-1])
    yield remove_whitespace(str(escape(text)))
    yield remove_whitespace(html.escape(text))
    yield remove_whitespace(str(htmlsafe_json_dumps(text))[1:-1])
    yield remove_whitespace(repr(text)[1:-1])
    yield remove_whitespace(json.dumps(as_json, ensure_ascii=False)[1:-1])


def _marker(place: int, size: int | None) -> str:
    """Return a number that no text contains; of `size` digits, where a template may count them."""
    return str(_NONCE + place) if size is None else f"{(_NONCE + place) % 10**size:0{size}}"


def _replace_leaf(place: int, char: str) -> Callable[[TextLeaf], str]:
    """Return a `put` of `Walk` that replaces all characters of the leaf at `place`."""
    places = itertools.count()
    return lambda leaf: char * len(leaf.text) if next(places) == place else leaf.text


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


# -- reading a conversation into its texts -----------------------------------------------------------------------------


TOOLS_INDEX = -1
"""Index of leaves that belong to tools instead of a message."""
TEXT, THOUGHT, REASONING, DEFINITION = "text", "thought", "reasoning", "definition"
"""Kinds of leaves: a needed text, reasoning inside a content, reasoning in a field of its own, and other strings, which
templates need not write (ids, names of messages)."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FIELDS = ("content", *REASONING_FIELDS, "tool_calls")
_IDS = ("id", "tool_call_id")
_TAGS_BEGIN = {"<", *(marker[0] for entry in REASONING_FORMATS for marker in (entry.open_marker, entry.close_marker))}
"""Characters with which tags begin; texts without any are not searched."""
_GROUPS = {
    "developer": "system",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
}
"""Roles that templates rightly write alike."""


def role_group(role: str) -> str:
    """Return the role that stands for all which templates may write like `role`."""
    return _GROUPS.get(role, role)


@dataclass(frozen=True, slots=True)
class TextLeaf:
    """A text of a conversation, without white space around it."""

    index: int
    """Index of its message, or TOOLS."""
    field: str
    text: str
    kind: str = TEXT
    is_number: bool = False
    """True for a number, which `text` spells."""
    replacement_length: int | None = None
    """Length that a replacement must have; None for any."""


class ConversationWalker:
    """Reads a conversation into leaves and a key of its shape, and copies it with other texts in place of leaves.

    Attributes:
        leaves: The leaves, in order.
        key: Hashable items that describe everything except leaves.
        message_keys: The part of `key` of each message.
    """

    def __init__(self, source: str, replace_text: Callable[[TextLeaf], str] | None = None):
        """`source`: The template's source. `put` returns the text to put in a leaf's place; None keeps texts."""
        self.leaves: list[TextLeaf] = []
        self.key: list[Any] = []
        self.message_keys: list[tuple[Any, ...]] = []
        self._source = source
        self._replace_text = replace_text
        self._index = TOOLS_INDEX
        self._ids: dict[str, str] = {}

    def walk(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[list[Message], dict[str, Any]]:
        """Read messages and the tools among the template's variables; return copies."""
        options = dict(options)
        tools = options.pop("tools", None)
        self.key.append(repr(sorted(options.items())) if options else "")
        if tools:
            self.key.append(json.dumps(tools, default=str))
            options["tools"] = [self._tool(tool, place) for place, tool in enumerate(tools)]
        copies = []
        for index, message in enumerate(messages):
            self._index = index
            begin = len(self.key)
            copies.append(self._message(message))
            self.message_keys.append(tuple(self.key[begin:]))
        return copies, options

    def _tool(self, tool: Any, place: int) -> Any:
        field = f"tools[{place}]"
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
                copy[field] = [self._call(call, f"tool_calls[{place}]") for place, call in enumerate(value)]
            elif isinstance(value, str):
                self.key.append(field)
                kind = TEXT if field == "content" else REASONING
                copy[field] = self._text(value, field, kind, thinks=role == "assistant")
        if len(message) > 2:
            for field in sorted(message.keys() - {"role", *_FIELDS}):
                copy[field] = self._other(message[field], field)
        return copy

    def _other(self, value: Any, field: str) -> Any:
        """Read a field that a template need not write."""
        if field not in self._source:
            return value
        self.key.append(field)
        if field in _IDS and isinstance(value, str) and len(value) >= 9:
            if value not in self._ids:
                self._ids[value] = self._leaf(value, field, DEFINITION, size=min(len(value), 18))
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
        """Read a value of JSON."""
        if isinstance(value, str):
            return self._text(value, field, TEXT)
        if isinstance(value, Mapping):
            self.key.append(len(value))
            return {self._leaf(key, field): self._value(item, f"{field}[{key!r}]") for key, item in value.items()}
        if isinstance(value, list | tuple):
            self.key.append((len(value),))
            return [self._value(item, f"{field}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.key.append("number")
            text = json.dumps(value)
            leaf = TextLeaf(self._index, field, text, is_number=True)
            self.leaves.append(leaf)
            put = text if self._replace_text is None else self._replace_text(leaf)
            return value if put == text else int(put)
        self.key.append(repr(value))
        return value

    def _text(self, value: str, field: str, kind: str, thinks: bool = False) -> str:
        """Read a text, tag by tag: templates decide by tags what to do with it.

        In what the assistant says, everything before the end of a thought belongs to it.
        """
        if not any(char in value for char in _TAGS_BEGIN) or not (tags := list(ANSWER_TAG_PATTERN.finditer(value))):
            return self._piece(value, field, kind)
        thought = max((tag.end() for tag in tags if thinks and CLOSE_MARKER_PATTERN.fullmatch(tag[0])), default=0)
        pieces, at = [], 0
        for tag in tags:
            inside = THOUGHT if kind == TEXT and tag.end() <= thought else kind
            pieces += [self._piece(value[at : tag.start()], field, inside), tag[0]]
            self.key.append(tag[0])
            at = tag.end()
        return "".join([*pieces, self._piece(value[at:], field, kind)])

    def _piece(self, piece: str, field: str, kind: str) -> str:
        text = piece.strip()
        self.key.append(bool(text))
        if not text:
            return piece
        put = self._leaf(text, field, kind)
        if self._replace_text is None or put == text:
            return piece
        start = len(piece) - len(piece.lstrip())
        return piece[:start] + put + piece[start + len(text) :]

    def _leaf(self, text: str, field: str, kind: str = TEXT, *, size: int | None = None) -> str:
        leaf = TextLeaf(self._index, field, text.strip(), kind, replacement_length=size)
        self.leaves.append(leaf)
        return text if self._replace_text is None else self._replace_text(leaf)
