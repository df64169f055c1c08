"""The texts of a conversation that a rendered prompt must hold, and the shape that is left without them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.control_tokens import ANSWER_TAG
from skyrl_train.data.trajectory import Message

TOOLS = -1
"""Index of leaves that belong to tools instead of a message."""
TEXT, THOUGHT, REASONING, DEFINITION = "text", "thought", "reasoning", "definition"
"""Kinds of leaves: a needed text, reasoning inside a content, reasoning in a field of its own, and other strings, which
templates need not write (ids, names of messages)."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FIELDS = ("content", *REASONING_FIELDS, "tool_calls")
_IDS = ("id", "tool_call_id")
END_OF_THOUGHT = re.compile(r"</(?:think|thinking|reasoning)>")
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
class Leaf:
    """A text of a conversation, without white space around it."""

    index: int
    """Index of its message, or TOOLS."""
    field: str
    text: str
    kind: str = TEXT
    number: bool = False
    """True for a number, which `text` spells."""
    size: int | None = None
    """Length that a replacement must have; None for any."""


class Walk:
    """Reads a conversation into leaves and a key of its shape, and copies it with other texts in place of leaves.

    Attributes:
        leaves: The leaves, in order.
        key: Hashable items that describe everything except leaves.
        message_keys: The part of `key` of each message.
    """

    def __init__(self, source: str, put: Callable[[Leaf], str] | None = None):
        """`source`: The template's source. `put` returns the text to put in a leaf's place; None keeps texts."""
        self.leaves: list[Leaf] = []
        self.key: list[Any] = []
        self.message_keys: list[tuple[Any, ...]] = []
        self._source = source
        self._put = put
        self._index = TOOLS
        self._ids: dict[str, str] = {}

    def conversation(
        self, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
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
            leaf = Leaf(self._index, field, text, number=True)
            self.leaves.append(leaf)
            put = text if self._put is None else self._put(leaf)
            return value if put == text else int(put)
        self.key.append(repr(value))
        return value

    def _text(self, value: str, field: str, kind: str, thinks: bool = False) -> str:
        """Read a text, tag by tag: templates decide by tags what to do with it.

        In what the assistant says, everything before the end of a thought belongs to it.
        """
        if "<" not in value or not (tags := list(ANSWER_TAG.finditer(value))):
            return self._piece(value, field, kind)
        thought = max((tag.end() for tag in tags if thinks and END_OF_THOUGHT.fullmatch(tag[0])), default=0)
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
        if self._put is None or put == text:
            return piece
        start = len(piece) - len(piece.lstrip())
        return piece[:start] + put + piece[start + len(text) :]

    def _leaf(self, text: str, field: str, kind: str = TEXT, *, size: int | None = None) -> str:
        leaf = Leaf(self._index, field, text.strip(), kind, size=size)
        self.leaves.append(leaf)
        return text if self._put is None else self._put(leaf)
