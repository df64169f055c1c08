"""The tree of the calls of a session, and the matching of what a client sends with what was sampled before.

A client repeats the conversation in every call. Messages of the assistant are compared by their tool calls (names,
parsed arguments and ids), because clients write JSON anew, and otherwise by their text. A client may drop the reasoning
of an answer, but a changed one makes it another message.
"""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from skyrl_train.data.chat import RenderedPrefix
from skyrl_train.data.json_values import json_default
from skyrl_train.data.messages import Message, join_text_parts
from skyrl_train.data.sampled_history import SampledAnswer
from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.engines.base import Completion

Order = tuple[int, bytes, int, int]
"""(number of answers that the session had when the call arrived, hash of its tokens and options, number of earlier
calls with this hash, index of the answer). It orders calls by time, except calls that a client makes concurrently."""


@dataclass(eq=False, kw_only=True, slots=True)
class Call:
    """One answer of the model, with what the model read before it."""

    order: Order
    parent: Call | None
    """The call whose tokens are the beginning of this call's tokens."""
    previous: Call | None
    """The call whose messages and answer are the beginning of this call's messages. It is the parent, unless the chat
    template renders its messages differently by now."""
    messages: list[Message]
    """The messages after those and the answer of `previous`."""
    answer_index: int
    """Index of the answer in the conversation."""
    prompt_ids: Tokens
    """Tokens that the model read after those of the parent."""
    completion: Completion
    answer: ModelAnswer
    message: Message
    """The answer as the client received it."""
    sampled: SampledAnswer
    """The tokens of the answer's turn, including its beginning if that is part of the prompt."""
    prefix: RenderedPrefix
    """Record of the rendered messages."""
    num_retokenized: int = 0
    tokens: Tokens | None = None
    """Cached tokens up to the end of the answer."""

    def path(self) -> list[Call]:
        """Return the calls whose tokens this call continues, and the call itself."""
        calls = [self]
        while (call := calls[-1].parent) is not None:
            calls.append(call)
        return calls[::-1]

    def conversation(self) -> list[Message]:
        """Return all messages of the call, including the answer."""
        return [message for call in self.history() for message in (*call.messages, call.message)]

    def history(self) -> list[Call]:
        """Return the calls whose answers are part of the call's conversation, and the call itself."""
        calls = [self]
        while (call := calls[-1].previous) is not None:
            calls.append(call)
        return calls[::-1]

    def read_tokens(self) -> Tokens:
        """Return all tokens up to the end of the answer."""
        if self.tokens is None:
            parts = [part for call in self.path() for part in (call.prompt_ids, call.completion.token_ids)]
            self.tokens = to_token_array(np.concatenate(parts))
        return self.tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The calls whose answers are part of a request."""

    previous: Call | None
    """The latest call whose messages and answer are the beginning of the request."""
    num_messages: int
    """Number of messages of `previous`, including its answer."""
    answers: dict[int, Call]
    """The calls that sampled messages of the request, by the index of the message."""


class CallTree:
    """All calls of a session."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """Calls in the order in which they were answered."""
        self._calls_by_conversation: defaultdict[bytes, list[Call]] = defaultdict(list)
        self._calls_by_message: defaultdict[bytes, list[Call]] = defaultdict(list)
        self._last: tuple[list[Message], list[bytes], list[bytes]] = ([], [], [])
        """Messages of the last request, their keys, and the digests of its conversations."""

    def match(self, scope: bytes, messages: Sequence[Message]) -> Match:
        """Find the sampled messages of a request.

        Args:
            scope: Digest of what else the request's rendering depends on; see `digest`.
            messages: The messages.
        """
        keys, digests = self._digests(scope, messages)
        previous, num_messages = None, 0
        for count in range(len(messages), 0, -1):
            calls = self._calls_by_conversation.get(digests[count], ())
            previous = next((call for call in reversed(calls) if _is_history(call, messages)), None)
            if previous is not None:
                num_messages = count
                break
        answers = {call.answer_index: call for call in previous.history()} if previous is not None else {}
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index not in answers:
                calls = self._calls_by_message.get(keys[index], ())
                call = next((call for call in reversed(calls) if _is_same_answer(call.message, message)), None)
                if call is not None:
                    answers[index] = call
        return Match(previous, num_messages, answers)

    def add(self, call: Call, scope: bytes, messages: Sequence[Message]) -> None:
        """Add an answered call.

        Args:
            call: The call.
            scope: The scope of its request.
            messages: All messages of the conversation before the answer.
        """
        digest = self._digests(scope, messages)[1][-1]
        key = _message_key(call.message)
        for calls in (self._calls_by_conversation[_combine(digest, key)], self._calls_by_message[key]):
            insort(calls, call, key=lambda other: other.order)  # so that matches do not depend on who answers first
        self.calls.append(call)
        if call.parent is not None:
            call.parent.tokens = None  # saves memory; most calls are continued once

    def sequences(self) -> Iterator[list[Call]]:
        """Yield the calls of each leaf that no earlier sequence has. Leaves are ordered, so the last call is last."""
        parents = {id(call.parent) for call in self.calls}
        leaves = [call for call in self.calls if id(call) not in parents]
        seen: set[int] = set()
        for leaf in sorted(leaves, key=lambda call: call.order):
            calls = [call for call in leaf.path() if id(call) not in seen]
            seen |= {id(call) for call in calls}
            yield calls

    def _digests(self, scope: bytes, messages: Sequence[Message]) -> tuple[list[bytes], list[bytes]]:
        """Return the key of each message, and the digest of the conversation before each message and after the last.

        Clients repeat most messages of the request before, so their keys are reused.
        """
        old_messages, old_keys, old_digests = self._last
        keys: list[bytes] = []
        digests = [scope]
        is_same = old_digests[:1] == [scope]
        for index, message in enumerate(messages):
            is_same = is_same and index < len(old_messages) and old_messages[index] == message
            keys.append(old_keys[index] if is_same else _message_key(message))
            digests.append(old_digests[index + 1] if is_same else _combine(digests[-1], keys[-1]))
        self._last = (list(messages), keys, digests)
        return keys, digests


def digest(*values: Any) -> bytes:
    """Return a digest of JSON-like values, which does not depend on the order of members or the form of numbers."""
    return hashlib.blake2b(_to_json(values).encode(errors="surrogatepass"), digest_size=16).digest()


def answer_to_message(answer: ModelAnswer) -> Message:
    """Return an answer as a message of the assistant."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def _combine(conversation: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(conversation + key, digest_size=16).digest()


def _message_key(message: Message) -> bytes:
    """Return a digest of what must be equal in two messages; the rest is compared by `_is_same_answer`."""
    if message["role"] != "assistant":
        return digest({name: value for name, value in message.items() if value is not None})
    calls = message.get("tool_calls")
    return digest("assistant", [_call_key(call) for call in calls] if calls else _text(message))


def _call_key(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments or {}


def _text(message: Message) -> str:
    content = join_text_parts(message.get("content"))
    return content.strip() if isinstance(content, str) else _to_json(content)


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "").strip()


def _is_same_answer(sampled: Message, returned: Message) -> bool:
    """True if a returned message with the same key is the sampled one.

    The client may drop the reasoning, the ids of calls, and the text beside calls, but may not change them.
    """
    reasoning = _reasoning(returned)
    if reasoning and reasoning != _reasoning(sampled):
        return False
    calls = returned.get("tool_calls")
    if not calls:
        return True
    ids = [(call.get("id"), known.get("id")) for call, known in zip(calls, sampled["tool_calls"], strict=True)]
    text = _text(returned)
    return all(not id or id == known for id, known in ids) and (not text or text == _text(sampled))


def _is_same_message(old: Message, new: Message) -> bool:
    """True if two messages with the same key, which the session did not sample, have the same text and reasoning."""
    return old["role"] != "assistant" or (_reasoning(old), _text(old)) == (_reasoning(new), _text(new))


def _is_history(call: Call, messages: Sequence[Message]) -> bool:
    """True if a request begins with the conversation of a call, given that the keys of its messages are equal."""
    start = 0
    for each in call.history():
        returned = messages[start : start + len(each.messages)]
        start = each.answer_index + 1
        if any(not _is_same_message(old, new) for old, new in zip(each.messages, returned, strict=False)):
            return False
        if not _is_same_answer(each.message, messages[each.answer_index]):
            return False
    return True


def _to_json(value: Any) -> str:
    return json.dumps(_normalize(value), sort_keys=True, separators=(",", ":"), default=json_default)


def _normalize(value: Any) -> Any:
    """Replace whole floats by integers, as JavaScript does, and mappings by dicts with names as keys."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _normalize(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize(item) for item in value]
    return value
