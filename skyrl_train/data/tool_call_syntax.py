"""Readers of tool calls: each reads the calls that begin at one position of a text, in the syntax of one kind of model.

The text is untrusted. No text makes a reader raise, and reading a text takes time linear in its length.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.data.reasoning import MARKER_PATTERN

_BETWEEN_VALUES = re.compile(r"[^\s;,]")
_MAX_EXTENSIONS = 8
"""Number of closing markers within the strings of one call."""
_MAX_ATTEMPTS = 16
"""Number of attempts to read a call that contains a marker of reasoning, and of messages that begin with an object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed tool call; the tool may not exist, and its arguments are not validated yet."""

    name: str
    arguments: dict[str, Any]
    raw: str
    """The text from which the call was parsed."""
    id: str = ""
    """Id by which a client refers to the call; "" where nobody does."""


@dataclass(frozen=True, slots=True)
class ParseError:
    """A malformed call: its text `raw`, and a sentence for the model that says what is wrong with it."""

    reason: str
    raw: str


Item = ToolCall | ParseError
_MAX_DEPTH = 100
"""Levels of lists and objects in the arguments of a call. Writers of JSON fail from 250 levels on."""


def reject_unwritable(item: Item) -> Item:
    """Return a call, or an error if its arguments cannot be written as JSON in UTF-8 and read again."""
    if isinstance(item, ParseError):
        return item
    if _is_deeper(item.arguments, _MAX_DEPTH):
        return ParseError(f"The arguments of a tool call must not be nested deeper than {_MAX_DEPTH} levels.", item.raw)
    if "\\" in item.raw:  # only an escape sequence stands for half a surrogate pair
        try:
            json.dumps([item.name, item.id, item.arguments], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return ParseError("A tool call must not contain half a surrogate pair.", item.raw)
    return item


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in value)


Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


@dataclass(slots=True)
class Source:
    """A text, with the positions of markers that have been searched for.

    A search from a later position reuses the result of an earlier one, so that repeated searches for a marker that does
    not follow take linear time.
    """

    text: str
    schemas: Schemas = field(default_factory=dict)
    _positions: dict[str, int] = field(default_factory=dict)
    _num_attempts: int = 0

    def find(self, marker: str, start: int) -> int:
        """Return the position of a marker from `start` on, or -1. Later calls have the same or a larger `start`."""
        found = self._positions.get(marker)
        if found is None or 0 <= found < start:
            found = self._positions[marker] = self.text.find(marker, start)
        return found

    def has_reasoning(self, start: int, end: int) -> bool:
        """True if a marker of reasoning begins between two positions."""
        found = self._positions.get("")
        if found is None or 0 <= found < start:
            match = MARKER_PATTERN.search(self.text, start)
            found = self._positions[""] = match.start() if match else -1
        return start <= found < end

    def may_attempt(self) -> bool:
        """True for a limited number of calls."""
        self._num_attempts += 1
        return self._num_attempts <= _MAX_ATTEMPTS


Reader = Callable[[Source, int], tuple[list[Item], int]]
"""A function that receives a text and the position of an opening marker. It returns the calls that begin there, and the
position after them. It returns no calls if the marker is plain text."""


# -- JSON --------------------------------------------------------------------------------------------------------------


def _parse_finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.40} is not a finite number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_parse_finite, parse_float=_parse_finite)


def decode_json(text: str) -> tuple[Any, ParseError | None]:
    """Return the value of a JSON text, or the error with which it cannot be parsed."""
    try:
        return _DECODER.decode(text), None
    except (ValueError, RecursionError) as error:
        return None, ParseError(_describe(error), text)


def _describe(error: Exception) -> str:
    return f"The tool call is not valid JSON: {error if isinstance(error, ValueError) else 'nested too deep'}."


def to_call(value: Any, raw: str) -> Item:
    """Return the call that a JSON value such as {"name": "...", "arguments": {...}} describes."""
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParseError('A tool call must be {"name": "...", "arguments": {...}}.', raw)
    id = value.get("id", value.get("tool_call_id"))
    return make_call(name, value.get("arguments", value.get("parameters", {})), raw, id if isinstance(id, str) else "")


def make_call(name: str, arguments: Any, raw: str, id: str = "") -> Item:
    """Return a call, or an error if its arguments are neither a mapping nor the JSON text of one."""
    if isinstance(arguments, str):  # as in OpenAI's API
        arguments, error = decode_json(arguments)
        if error:
            return ParseError(error.reason, raw)
    if not isinstance(arguments, dict):
        return ParseError(f"The arguments of {name!r:.100} must be a JSON object.", raw)
    return ToolCall(name, arguments, raw, id)


def calls_in_json(text: str, raw: str, *, is_strict: bool = True) -> Iterator[Item]:
    """Yield the calls in consecutive JSON objects and lists of objects.

    Args:
        text: The JSON text.
        raw: Text of the call, for the results.
        is_strict: True if everything must be a call. Otherwise text that has no "name" is plain text.
    """
    position = 0
    while opened := _BETWEEN_VALUES.search(text, position):
        try:
            value, position = _DECODER.raw_decode(text, opened.start())
        except (ValueError, RecursionError) as error:
            if is_strict or (position == 0 and '"name"' in text):
                yield ParseError(_describe(error), raw)
            return
        for item in value if isinstance(value, list) else [value]:
            if is_strict or (isinstance(item, dict) and "name" in item):
                yield to_call(item, raw)
    if is_strict and position == 0:
        yield ParseError("The tool call is empty.", raw)


BodyReader = Callable[[str, str, Schemas], list[Item]]
"""A function that receives the text between two markers, the same text with its markers, and the schemas of the tools.
It returns at least one call or error."""


def block_reader(
    open_marker: str, close_marker: str, read_body: BodyReader, *, is_close_optional: bool = False
) -> Reader:
    """Return a reader of calls between two markers.

    Args:
        open_marker: Marker before the calls.
        close_marker: Marker after the calls.
        read_body: Reader of the text between the markers.
        is_close_optional: True if the calls may also end with the text.
    """

    def read(source: Source, start: int) -> tuple[list[Item], int]:
        text, begin = source.text, start + len(open_marker)
        closed = source.find(close_marker, begin)
        is_open = closed < 0
        if is_open:
            closed = len(text)
        is_interrupted = source.has_reasoning(begin, closed)
        if is_interrupted and (is_open or not source.may_attempt()):
            return [], begin
        if is_open and not is_close_optional:
            return [ParseError(f"{open_marker} is not closed by {close_marker}.", text[start:])], closed
        first: tuple[list[Item], int] | None = None
        for _ in range(_MAX_EXTENSIONS):  # the texts of a call may contain the closing marker
            end = min(closed + len(close_marker), len(text))
            items = read_body(text[begin:closed], text[start:end], source.schemas)
            first = first or (items, end)
            last = items[-1]
            closed = text.find(close_marker, end)
            if closed < 0 or not isinstance(last, ParseError) or "Unterminated string" not in last.reason:
                break
        if is_interrupted and any(isinstance(item, ParseError) for item in items):
            return [], begin
        return (items, end) if isinstance(last, ToolCall) or first is None else first

    return read


def read_json_body(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read JSON objects such as {"name": "...", "arguments": {...}}, or lists of them."""
    return list(calls_in_json(body, raw))


def json_answer_reader(source: Source, start: int) -> tuple[list[Item], int]:
    """Read an answer that consists of JSON objects without a marker. Objects without "name" are plain text."""
    if not source.may_attempt():
        return [], start
    text = source.text[start:].rstrip()
    items = list(calls_in_json(text, text, is_strict=False))
    end = start + len(text)
    if items and isinstance(items[0], ParseError) and source.has_reasoning(start, end):
        return [], start
    return items, end


_SPACE = re.compile(r"\s*")


def skip_space(text: str, start: int, end: int | None = None) -> int:
    """Return the position of the next character that is not white space."""
    match = _SPACE.match(text, start, len(text) if end is None else end)
    return match.end() if match else start


# -- Names and arguments between special tokens ------------------------------------------------------------------------

DEEPSEEK_MARKERS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
"""Markers before a call, before its arguments, and after it."""
_DEEPSEEK_CALL = re.compile("{}(?:([^<]*){}(.*?)(?:{}|\\Z))?".format(*map(re.escape, DEEPSEEK_MARKERS)), re.DOTALL)


def read_deepseek_calls(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read the calls of DeepSeek V3.1, or of V3 and R1, which write "function" and put arguments into a fence."""
    items: list[Item] = []
    for match in _DEEPSEEK_CALL.finditer(body):
        if match[2] is None:
            items.append(ParseError(f"A tool call must have {DEEPSEEK_MARKERS[1]} after the name.", raw))
            continue
        name, fence, fenced = match[2].partition("```")
        if fence and name.strip() and "{" not in name:
            items.append(make_call(name.strip(), fenced.removeprefix("json").strip().removesuffix("```"), match[0]))
        else:
            items.append(make_call(match[1].strip(), match[2], match[0]))
    return items or [ParseError("The tool call is empty.", raw)]


_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?\[ARGS\]")


def read_mistral_calls(source: Source, start: int) -> tuple[list[Item], int]:
    """Read `[TOOL_CALLS]` with a list of objects, or with a name, `[ARGS]` and an object."""
    text, begin = source.text, start + len("[TOOL_CALLS]")
    end = source.find("[TOOL_CALLS]", begin)
    end = len(text) if end < 0 else end
    is_interrupted = source.has_reasoning(begin, end)
    if is_interrupted and not source.may_attempt():
        return [], begin
    raw, head = text[start:end], _MISTRAL_HEAD.match(text, begin, end)
    if head:
        items = [make_call(head[1], text[head.end() : end], raw, head[2] or "")]
    else:
        items = list(calls_in_json(text[begin:end], raw))
    if is_interrupted and any(isinstance(item, ParseError) for item in items):
        return [], begin
    return items, end


# -- Arguments as text between tags ------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_GLM_NAME = re.compile(r"\s*([^\s<{}\[\]]+)\s*")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>")
_GLM_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")


def read_tagged_function(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read `<function=NAME><parameter=KEY>value</parameter></function>`."""
    function = _FUNCTION.match(body)
    if function is None:
        return [ParseError("A tool call must begin with <function=NAME>.", raw)]
    name = function[1].strip()
    arguments, position, error = _read_tagged_arguments(
        body, function.end(), _PARAMETER, _PARAMETER_END, "</parameter>", schemas.get(name)
    )
    if error:
        return [ParseError(error, raw)]
    end = _FUNCTION_END.match(body, position)
    if end is None:
        return [ParseError(f"<function={name}> is not closed by </function>.", raw)]
    if body[end.end() :].strip():
        return [ParseError("A tool call must end with </function>.", raw)]
    return [ToolCall(name, arguments, raw)]


def read_glm_call(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read a name, and `<arg_key>KEY</arg_key><arg_value>value</arg_value>` for each argument."""
    name = _GLM_NAME.match(body)
    if name is None:
        return [ParseError("A tool call must begin with the name of a function.", raw)]
    arguments, position, error = _read_tagged_arguments(
        body, name.end(), _GLM_KEY, _GLM_VALUE_END, "</arg_value>", schemas.get(name[1])
    )
    if error or body[position:].strip():
        return [ParseError(error or "A tool call must consist of a name, <arg_key> and <arg_value>.", raw)]
    return [ToolCall(name[1], arguments, raw)]


def _read_tagged_arguments(
    text: str,
    position: int,
    begin: re.Pattern[str],
    end: re.Pattern[str],
    close_marker: str,
    schema: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], int, str]:
    """Return the arguments, the position after them, and a description of an error or ""."""
    arguments: dict[str, Any] = {}
    while opened := begin.match(text, position):
        closed = end.search(text, opened.end())
        if closed is None:
            return arguments, position, f"{opened[0].strip()} is not closed by {close_marker}."
        key = opened[1].strip()
        arguments[key] = convert_argument(text[opened.end() : closed.start()], key, schema)
        position = closed.end()
    return arguments, position, ""


_INTEGER = re.compile(r"[-+]?\d{1,400}")
_WORDS: Mapping[str, tuple[str, Any]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
"""Text -> (type, value). Some templates write these values as Python does."""


def convert_argument(text: str, key: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value of an argument that is written as text.

    Args:
        text: The text.
        key: Name of the argument.
        schema: JSON schema of the tool's arguments. If it is None, the value is the text.

    Returns:
        The value of a type that the schema allows. If the schema names no type, JSON is parsed. Any other text, and a
        text that has none of the types, is returned unchanged.
    """
    if schema is None:
        return text
    properties = schema.get("properties")
    types = _get_types(properties.get(key) if isinstance(properties, Mapping) else None)
    word = text.strip()
    type_name, value = _WORDS.get(word.lower(), ("", None))
    if type_name in types or (type_name and not types and word in ("True", "False", "None")):
        return value
    if "string" in types:
        return text
    if "integer" in types and _INTEGER.fullmatch(word):
        return int(text)
    if types and not types & {"number", "integer", "array", "object"}:
        return text
    value, error = decode_json(text)
    return text if error else value


def _get_types(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows, or an empty set if it does not name them."""
    if not isinstance(schema, Mapping):
        return set()
    names = schema.get("type")
    types = {names} if isinstance(names, str) else {name for name in names or () if isinstance(name, str)}
    values = schema.get("enum")
    values = [schema["const"]] if "const" in schema else values if isinstance(values, list) else []
    types |= {"string" for value in values if isinstance(value, str)}
    options = [option for name in ("anyOf", "oneOf") for option in schema.get(name) or ()]
    option_types = [_get_types(option) for option in options]
    return types.union(*option_types) if all(option_types) else set()


# -- Other syntaxes ----------------------------------------------------------------------------------------------------

_GEMMA_CALL = re.compile(r"\s*call:([^\s{}]+)\{(.*)\}\s*\Z", re.DOTALL)
_BARE_KEY = re.compile(r"(?<![\w$.-])([\w$.-]++)\s*+:")


def gemma_body_reader(quote: str) -> BodyReader:
    """Return a reader of `call:NAME{key:value}`, whose texts are between two markers.

    Args:
        quote: The marker before and after a text.
    """

    def read(body: str, raw: str, schemas: Schemas) -> list[Item]:
        match = _GEMMA_CALL.match(body)
        if match is None:
            return [ParseError("A tool call must be call:NAME{key:value}.", raw)]
        pieces = match[2].split(quote)
        if len(pieces) % 2 == 0:
            return [ParseError(f"A text that begins with {quote} is not closed by {quote}.", raw)]
        written = [
            json.dumps(piece) if index % 2 else _BARE_KEY.sub(r'"\1":', piece) for index, piece in enumerate(pieces)
        ]
        return [make_call(match[1], "{" + "".join(written) + "}", raw)]

    return read


def read_python_calls(body: str, raw: str, schemas: Schemas) -> list[Item]:
    """Read calls as Python writes them, such as [NAME(key='value')]."""
    if body.lstrip().startswith(("[{", "{")):
        return list(calls_in_json(body, raw))
    try:
        nodes = [node for statement in ast.parse(body.strip()).body for node in _split_statement(statement)]
        calls: list[Item] = [
            ToolCall(
                ast.unparse(node.func), {word.arg: _evaluate(word.value) for word in node.keywords if word.arg}, raw
            )
            for node in nodes
            if isinstance(node, ast.Call) and not node.args
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError, Warning):
        return [ParseError("A tool call must be [NAME(key=value)] with values as Python writes them.", raw)]
    if len(calls) < max(len(nodes), 1):
        return [ParseError("A tool call must be [NAME(key=value)]; all arguments need a key.", raw)]
    return calls


def _split_statement(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr):
        raise ValueError("not an expression")
    return statement.value.elts if isinstance(statement.value, ast.List | ast.Tuple) else [statement.value]


_PYTHON_NAMES: Mapping[str, Any] = {"true": True, "false": False, "null": None}


def _evaluate(node: ast.expr) -> Any:
    """Return the JSON value that an expression of literals stands for. Raises ValueError if it is something else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("not a finite number")
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = _evaluate(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_evaluate(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_evaluate, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    raise ValueError("not a literal")
