"""Formats in which families of models write tool calls, and the parser of a model's answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from skyrl_train.data.reasoning import (
    ANSWER_WRAPPERS,
    CLOSE_MARKERS,
    ENDS_MESSAGE,
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_FINAL_CHANNEL,
    HARMONY_MESSAGE,
    HARMONY_PATTERN,
    HARMONY_START,
    QUOTES,
    is_quoted,
)
from skyrl_train.data.tool_call_syntax import (
    DEEPSEEK_MARKERS,
    BodyReader,
    Item,
    ParseError as ParseError,
    Reader,
    Source,
    ToolCall as ToolCall,
    block_reader,
    gemma_body_reader,
    json_answer_reader,
    make_call,
    read_deepseek_calls,
    read_glm_call,
    read_json_body,
    read_mistral_calls,
    read_python_calls,
    read_tagged_function,
    reject_unwritable,
    skip_space,
)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's turn, split into its parts."""

    content: str
    """The text without reasoning and without calls that could be parsed."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()
    """Malformed calls. Their text stays in `content`."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The parts of an answer that a stream may emit after the parts that it has emitted."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """The format in which a family of models writes tool calls."""

    name: str
    """Name of the format, as in `environment.skyrl_gym.tool_use.dialect`."""
    models: str
    """Models that write this format, for the documentation."""
    open_markers: tuple[str, ...]
    """Markers with which calls begin."""
    read: Reader
    prefix: str
    """Text with which an answer begins that calls any tool."""
    named_prefix: str
    """Text with which an answer begins that calls the tool {name}."""
    begins_answer: Reader | None = None
    """Reader of calls without a marker, with which an answer begins."""
    other_markers: tuple[str, ...] = ()
    """Further texts of the format that a tokenizer may define as special tokens."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that decoding must keep (`data.chat.decode_answer`)."""
        return (*self.open_markers, *self.other_markers)


_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _in_markers(
    name: str, models: str, markers: tuple[str, str], read_body: BodyReader, prefix: str, named_prefix: str, *more: str
) -> ToolFormat:
    return ToolFormat(
        name=name,
        models=models,
        open_markers=markers[:1],
        read=block_reader(*markers, read_body),
        prefix=markers[0] + prefix,
        named_prefix=markers[0] + named_prefix,
        other_markers=(*markers[1:], *more),
    )


def _deepseek(name: str, models: str, prefix: str, named_prefix: str) -> ToolFormat:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return ToolFormat(
        name=name,
        models=models,
        open_markers=(begin,),
        read=block_reader(begin, end, read_deepseek_calls, is_close_optional=True),
        prefix=begin + DEEPSEEK_MARKERS[0] + prefix,
        named_prefix=begin + DEEPSEEK_MARKERS[0] + named_prefix,
        other_markers=(end, *DEEPSEEK_MARKERS),
    )


_MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral 7B v0.3, Mistral Nemo, Mistral Small 3.1",
    open_markers=("[TOOL_CALLS]",),
    read=read_mistral_calls,
    prefix="[TOOL_CALLS]",
    named_prefix='[TOOL_CALLS] [{"name": "{name}", "arguments":',
    begins_answer=json_answer_reader,  # decoding may have dropped the special token
    other_markers=("[ARGS]", "[CALL_ID]"),
)
_FORMATS = (
    _in_markers(
        "hermes",
        "Qwen 2.5, Qwen 3, Hermes, SmolLM3, Granite 4",
        (_TOOL_CALL, _TOOL_CALL_END),
        read_json_body,
        "\n",
        '\n{"name": "{name}", "arguments":',
    ),
    _in_markers(
        "qwen3_coder",
        "Qwen3-Coder, Qwen 3.5, Nemotron 3",
        (_TOOL_CALL, _TOOL_CALL_END),
        read_tagged_function,
        "\n<function=",
        "\n<function={name}>\n",
    ),
    _in_markers(
        "glm",
        "GLM-4.5, GLM-4.6, GLM-4.7",
        (_TOOL_CALL, _TOOL_CALL_END),
        read_glm_call,
        "",
        "{name}",
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat(
        name="llama",
        models="Llama 3.1, 3.2, 3.3",
        open_markers=("<|python_tag|>",),
        read=lambda source, start: json_answer_reader(source, start + len("<|python_tag|>")),
        prefix='{"name": "',
        named_prefix='{"name": "{name}", "parameters":',
        begins_answer=json_answer_reader,
    ),
    _MISTRAL,
    replace(
        _MISTRAL,
        name="mistral_args",
        models="Mistral Small 3.2, Ministral 3, Magistral, Devstral",
        named_prefix="[TOOL_CALLS]{name}",
    ),
    _deepseek(
        "deepseek_v3",
        "DeepSeek V3, DeepSeek-R1",
        "function<｜tool▁sep｜>",
        "function<｜tool▁sep｜>{name}\n```json\n",
    ),
    _deepseek(
        "deepseek_v31",
        "DeepSeek V3.1",
        "",
        "{name}<｜tool▁sep｜>",
    ),
    ToolFormat(
        name="harmony",
        models="gpt-oss",
        open_markers=(),
        read=lambda source, start: ([], start),  # `AnswerStream` splits the answer into messages
        prefix="<|channel|>commentary to=functions.",
        named_prefix="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        other_markers=("<|call|>",),
    ),
    _in_markers(
        "gemma4",
        "Gemma 4",
        ("<|tool_call>", "<tool_call|>"),
        gemma_body_reader('<|"|>'),
        "call:",
        "call:{name}{",
        '<|"|>',
    ),
    _in_markers(
        "functiongemma",
        "FunctionGemma",
        ("<start_function_call>", "<end_function_call>"),
        gemma_body_reader("<escape>"),
        "call:",
        "call:{name}{",
        "<escape>",
    ),
    _in_markers(
        "lfm2", "LFM2, LFM2.5", ("<|tool_call_start|>", "<|tool_call_end|>"), read_python_calls, "[", "[{name}("
    ),
)
TOOL_FORMATS: dict[str, ToolFormat] = {tool_format.name: tool_format for tool_format in _FORMATS}
"""Name -> format."""


def parse_answer(
    text: str,
    tool_format: ToolFormat | None,
    reasoning_opening: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ModelAnswer:
    """Split a model's turn into reasoning, content and tool calls.

    A call in reasoning is not a call. A call that cannot be parsed stays in the content, and is listed in `errors`.
    White space around reasoning and calls is removed.

    Args:
        text: Text of the turn, as `data.chat.decode_answer` returns it.
        tool_format: Format of the calls; None if the turn has none.
        reasoning_opening: End of the prompt that opens reasoning (`data.chat.get_reasoning_opening`).
        tools: Definitions of the tools. Formats in which every argument is a text convert arguments by their schemas.
    """
    stream = AnswerStream(tool_format, reasoning_opening, tools)
    stream.update(text, is_complete=True)
    return stream.answer()


def find_calls(
    text: str, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]] | None = None
) -> list[ToolCall | ParseError]:
    """Return the calls of a model's turn, first to last, with a ParseError in the place of each malformed call.

    See `parse_answer` for the arguments.
    """
    stream = AnswerStream(tool_format, tools=tools)
    stream.update(text, is_complete=True)
    return stream.items


class AnswerStream:
    """Splits an answer into reasoning and content while it is sampled.

    Example:
        stream = AnswerStream(TOOL_FORMATS["hermes"])
        stream.update("Let me look.\n<tool")    # AnswerDelta(reasoning="", content="Let me look.")
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_opening: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        """Create a stream. See `parse_answer` for the arguments."""
        self._format = tool_format
        self._schemas = _get_schemas(tools or ())
        self._position = 0
        """Number of characters that have been split."""
        self._reasoning, self._content = _Joined(), _Joined()
        self.items: list[Item] = []
        """Calls and malformed calls in the order of the text, after the last update."""
        opening = reasoning_opening.strip()
        self._open_marker = opening if opening in CLOSE_MARKERS else None
        """Marker of the block of reasoning that is open."""
        self._is_harmony: bool | None = True if opening.endswith(HARMONY_MESSAGE) else None
        self._message = self._open_message(opening, 0) if self._is_harmony else None
        """Message of gpt-oss that is open."""
        self._wrapper: str | None = None
        """Closing marker of the answer; "" if an opening marker may follow."""
        self._is_start = True
        """True if the content has no text yet."""
        markers = tool_format.open_markers if tool_format else ()
        names = sorted((*_REASONING_MARKERS, *markers), key=len, reverse=True)
        self._events = re.compile("|".join(map(re.escape, names)))
        self._prefixes = _proper_prefixes((*names, *(close_marker for _, close_marker in ANSWER_WRAPPERS)))

    def update(self, text: str, *, is_complete: bool = False) -> AnswerDelta:
        """Return the reasoning and content that can be emitted now.

        Text that may become part of a marker or of a call is held back. From the first call on, everything is.

        Args:
            text: All text that has been sampled.
            is_complete: True if nothing follows. Everything that was held back is then returned, except calls.
        """
        end = len(text)
        while not is_complete and end > self._position and text[end - 1] == "\ufffd":  # an incomplete character
            end -= 1
        if self._is_harmony is None:
            self._is_harmony = self._detect_harmony(text, is_complete)
        if self._is_harmony is not None:
            split = self._split_harmony if self._is_harmony else self._split
            split(Source(text, self._schemas), end, is_complete)
        if is_complete and not any(isinstance(item, ToolCall) for item in self.items):
            self._content.flush()
        return AnswerDelta(self._reasoning.take(), self._content.take())

    def answer(self) -> ModelAnswer:
        """Return the parsed answer, after the last update."""
        calls = tuple(item for item in self.items if isinstance(item, ToolCall))
        errors = tuple(item for item in self.items if isinstance(item, ParseError))
        return ModelAnswer(str(self._content), str(self._reasoning), calls, errors)

    def _detect_harmony(self, text: str, is_complete: bool) -> bool | None:
        """Return True if the answer is in gpt-oss's format, or None if more text is needed to know."""
        if self._open_marker is not None:
            return False
        if self._format is not None and self._format.name == "harmony":
            return True
        if is_complete:
            return HARMONY_PATTERN.match(text) is not None
        begin = text[:_HARMONY_WINDOW].lstrip()
        if begin.startswith((HARMONY_CHANNEL, HARMONY_START)):
            return True
        return None if any(name.startswith(begin) for name in (HARMONY_CHANNEL, HARMONY_START)) else False

    # -- Reasoning between markers -----------------------------------------------------------------------------------

    def _split(self, source: Source, end: int, is_complete: bool) -> None:
        text = source.text
        while True:
            if self._open_marker is not None:
                close_marker = CLOSE_MARKERS[self._open_marker]
                closed = text.find(close_marker, self._position, end)
                limit = (
                    closed if closed >= 0 else self._limit(text, end, is_complete, _proper_prefixes((close_marker,)))
                )
                self._reasoning.add(text[self._position : limit])
                self._position = limit
                if closed < 0:
                    return
                self._close_reasoning(closed + len(close_marker))
            if self._wrapper == "" and not self._read_wrapper(text, end, is_complete):
                return
            if self._is_start and not self._read_start(source, end, is_complete):
                return
            match = self._events.search(text, self._position, end)
            limit = match.start() if match else self._limit(text, end, is_complete, self._prefixes)
            closed = text.find(self._wrapper, self._position, limit) if self._wrapper else -1
            if closed >= 0 and skip_space(text, closed + len(self._wrapper or ""), end) == end:
                self._add_content(text[self._position : closed])
                self._position = end if is_complete else closed
                return
            self._add_content(text[self._position : limit])
            self._position = limit
            if match is None:
                return
            if match[0] not in _REASONING_MARKERS:
                if not is_complete:
                    return
                self._read_calls(source, match)
            elif match.start() > 0 and text[match.start() - 1] in QUOTES and match.end() == end and not is_complete:
                return
            elif is_quoted(text, *match.span()):
                self._add_content(match[0])
                self._position = match.end()
            elif match[0] in CLOSE_MARKERS:
                self._open_marker, self._position = match[0], match.end()
                self._reasoning.begin_block()
            else:  # the prompt opened this block, so that everything before was reasoning
                self._reasoning.begin_block()
                self._reasoning.add(str(self._content))
                self._reasoning.take()
                self._content, self.items = _Joined(), []
                self._close_reasoning(match.end())

    def _limit(self, text: str, end: int, is_complete: bool, prefixes: frozenset[str]) -> int:
        """Return the position before which the text has no part of a marker."""
        if not is_complete:
            longest = max(map(len, prefixes), default=0)
            for start in range(max(self._position, end - longest), end):
                if text[start:end] in prefixes:
                    return start
        return end

    def _close_reasoning(self, position: int) -> None:
        self._open_marker, self._position, self._is_start, self._wrapper = None, position, True, ""
        self._content.skips_space = True

    def _add_content(self, text: str) -> None:
        self._content.add(text)
        if text and not text.isspace():
            self._is_start, self._wrapper = False, self._wrapper or None

    def _read_wrapper(self, text: str, end: int, is_complete: bool) -> bool:
        """Skip the marker that opens an answer. Returns False if more text is needed."""
        begin = skip_space(text, self._position, end)
        for open_marker, close_marker in ANSWER_WRAPPERS:
            if text.startswith(open_marker, begin, end):
                self._wrapper, self._position = close_marker, begin + len(open_marker)
                return True
            if not is_complete and open_marker.startswith(text[begin:end]):
                return False
        self._wrapper = None
        return True

    def _read_start(self, source: Source, end: int, is_complete: bool) -> bool:
        """Read the calls of an answer that consists of calls without a marker. Returns False if more text is needed."""
        if self._format is None or self._format.begins_answer is None:
            return True
        begin = skip_space(source.text, self._position, end)
        if begin == end:
            return is_complete
        self._is_start = False
        if source.text[begin] not in "{[" or source.text.startswith(self._format.open_markers, begin):
            return True
        if not is_complete:
            self._is_start = True
            return False
        items, after = self._format.begins_answer(source, begin)
        if items:
            self._record(source.text, items, begin, after)
        return True

    def _read_calls(self, source: Source, match: re.Match[str]) -> None:
        assert self._format is not None
        items, after = self._format.read(source, match.start())
        if items:
            self._record(source.text, items, match.start(), after)
        else:
            self._add_content(match[0])
            self._position = match.end()

    def _record(self, text: str, items: list[Item], start: int, end: int) -> None:
        """Record the calls that were read between two positions."""
        items = [reject_unwritable(item) for item in items]
        self.items += items
        parsed = {item.raw for item in items if isinstance(item, ToolCall)}
        if parsed:
            self._content.begin_block()
            for raw in dict.fromkeys(item.raw for item in items if item.raw not in parsed):
                self._content.add(raw)
        else:
            self._add_content(text[start:end])
        self._position = end

    # -- gpt-oss -----------------------------------------------------------------------------------------------------

    def _split_harmony(self, source: Source, end: int, is_complete: bool) -> None:
        text = source.text
        while self._position < end:
            if self._message is None:
                begin = text.find(HARMONY_MESSAGE, self._position, end)
                if begin < 0:
                    if is_complete and self._position == 0 and not HARMONY_PATTERN.match(text):
                        self._content.add(text)
                    return
                message = self._open_message(text[self._position : begin], self._position)
                if message.tool and not is_complete:
                    return
                if message.part is not None:
                    message.part.begin_block(skips_space=message.part is self._reasoning)
                self._message, self._position = message, begin + len(HARMONY_MESSAGE)
            match = ENDS_MESSAGE.search(text, self._position, end)
            limit = match.start() if match else self._limit(text, end, is_complete, _HARMONY_PREFIXES)
            body = text[self._position : limit]
            if self._message.tool:
                raw = text[self._message.start : match.end() if match else end]
                call = reject_unwritable(make_call(self._message.tool, body, raw))
                self.items.append(call)
                if isinstance(call, ParseError):
                    self._content.begin_block()
                    self._content.add(raw)
            elif self._message.part is not None:
                self._message.part.add(body)
            self._position = limit
            if match is None:
                return
            self._message = None
            self._position = match.start() if match[0] == HARMONY_START else match.end()

    def _open_message(self, header: str, start: int) -> _HarmonyMessage:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and self._format is not None and self._format.name == "harmony":
            return _HarmonyMessage(start, recipient[1].removeprefix("functions."), None)
        parts = {"analysis": self._reasoning, HARMONY_FINAL_CHANNEL: self._content, "commentary": self._content}
        return _HarmonyMessage(start, "", parts.get(channel[1]) if channel else None)


@dataclass(frozen=True)
class _HarmonyMessage:
    """A message of gpt-oss."""

    start: int
    """Position of its header."""
    tool: str
    """Name of the tool that it calls; "" if it calls none."""
    part: _Joined | None
    """Part of the answer that its text belongs to."""


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Joined:
    """A text of several blocks, without white space around each."""

    def __init__(self) -> None:
        self.skips_space = False
        """True if white space that follows is left out."""
        self._parts: list[str] = []
        self._space: list[str] = []
        """White space that may be at the end of a block."""
        self._num_taken = 0

    def __str__(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        if self.skips_space:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._parts += [*self._space, stripped]
            self._space.clear()
            self.skips_space = False
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def begin_block(self, skips_space: bool = True) -> None:
        """Separate the text that follows from the text before."""
        self._space = ["\n\n"] if self._parts else []
        self.skips_space = skips_space or bool(self._parts)

    def flush(self) -> None:
        """Add the white space at the end."""
        self._parts += self._space
        self._space.clear()

    def take(self) -> str:
        """Return the text that was added since the last call."""
        new = "".join(self._parts[self._num_taken :])
        self._num_taken = len(self._parts)
        return new


@cache
def _proper_prefixes(markers: tuple[str, ...]) -> frozenset[str]:
    return frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))


_REASONING_MARKERS = frozenset(CLOSE_MARKERS) | frozenset(CLOSE_MARKERS.values())
_HARMONY_PREFIXES = _proper_prefixes(("<|end|>", "<|return|>", "<|call|>", "<|start|>"))
_HARMONY_WINDOW = 64


def _get_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return name of a tool -> JSON schema of its arguments."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def forced_call_prefix(tool_format: ToolFormat, name: str | None = None, reasoning_opening: str = "") -> str:
    """Return the text with which an answer must begin so that it calls a tool.

    `data.chat.encode_forced_call` returns its token ids.

    Args:
        tool_format: The format of the model.
        name: Name of the tool; None for any tool.
        reasoning_opening: End of the prompt that opens reasoning, which the text closes.
    """
    prefix = tool_format.prefix if name is None else tool_format.named_prefix.replace("{name}", name)
    opening = reasoning_opening.strip()
    if opening.endswith(HARMONY_MESSAGE):
        return f"{HARMONY_END}{HARMONY_START}assistant{prefix}"
    return f"\n{CLOSE_MARKERS[opening]}\n\n{prefix}" if opening in CLOSE_MARKERS else prefix
