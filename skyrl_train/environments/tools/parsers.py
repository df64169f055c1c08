"""Parser of the tool calls in a model's text, and prompts that describe to a model how to write calls.

Three styles:

    xml     <python>print(6 * 7)</python>             a tag named after a tool, if the tool takes one string; and
            <tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>
    json    {"name": "python", "arguments": {...}}    in a ```json fence; without one, from the first line outside
            other fences that begins with an object or a list of objects
    native  the model's own format, one of `data.tool_formats.TOOL_FORMATS`

Calls are parsed only outside the model's reasoning (`reasoning.final_answer`). A malformed call becomes a `ParseError`,
which the environment shows to the model; everything else is plain text. The text is untrusted: parsing takes time
linear in its length, and no text makes it raise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.data.tool_call_syntax import calls_in_json
from skyrl_train.data.tool_formats import (
    TOOL_FORMATS,
    ParseError as ParseError,
    ToolCall as ToolCall,
    find_calls,
)
from skyrl_train.environments.fenced_blocks import find_fenced_blocks, text_outside

MAX_CALLS = 16
"""Maximum number of calls in one message; a further call is a ParseError and ends parsing."""
STYLES = ("xml", "json", "native")
DIALECTS = ("hermes", "llama", "mistral")
"""Formats of native calls that `render_tools` describes. The text shows which of them a message has."""
CALL_FENCES = ("", "json", "tool_call", "tool_code")
"""Languages of the code fences that may contain calls; fences of other languages contain code."""
OBJECT_LINE = re.compile(r"^[ \t]*(?=\{\s*[\"']|\[\s*\{)", re.MULTILINE)
"""Start of a line that begins with an object or a list of objects; "[1]" and "{x}" are prose."""


def parse_calls(
    text: str,
    style: str,
    tags: Mapping[str, str] | None = None,
    *,
    dialect: str = "hermes",
    schemas: Sequence[Mapping[str, Any]] | None = None,
) -> list[ToolCall | ParseError]:
    """Return the calls of one message, first to last, with a ParseError in the place of each malformed call.

    Args:
        text: The model's message, including its reasoning, which is skipped.
        style: "xml", "json" or "native".
        tags: Only for style "xml": mapping from a tag to the argument that gets the tag's text; see `tool_tags`. None:
            only <tool_call> is read.
        dialect: Only for style "native": name of a format in `TOOL_FORMATS`. Each of "hermes", "llama" and "mistral"
            stands for all three.
        schemas: Only for style "native": the tools in OpenAI's format. Formats in which every argument is a text
            convert arguments by their schemas.

    Returns:
        At most 16 items, which `ToolBox.run` runs. If the message has more, one ParseError follows them.

    Raises:
        ValueError: `style` or `dialect` is unknown.

    Example:
        sk.parse_calls("<lookup>Bern</lookup>", "xml", {"lookup": "city"})
        # [ToolCall(name='lookup', arguments={'city': 'Bern'}, raw='<lookup>Bern</lookup>')]
    """
    parsed: Iterable[ToolCall | ParseError]
    if style == "xml":
        parsed = _tagged(final_answer(text), {**(tags or {}), "tool_call": ""})
    elif style == "json":
        parsed = _json_calls(final_answer(text))
    elif style == "native":
        parsed = _native(text, dialect, schemas)
    else:
        raise ValueError(f"style={style!r} is not a known style; choose one of {STYLES}.")
    calls = list(islice(parsed, MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[MAX_CALLS] = ParseError(f"More than {MAX_CALLS} tool calls in one message.", "")
    return calls


def tool_tags(schemas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the `tags` of `parse_calls`: for every tool with exactly one required argument, a string, its name."""
    tags = {}
    for function in (schema["function"] for schema in schemas):
        parameters = function["parameters"]
        required = parameters.get("required", ())
        if len(required) == 1 and parameters["properties"][required[0]].get("type") == "string":
            tags[function["name"]] = required[0]
    return tags


def _tagged(text: str, tags: Mapping[str, str]) -> Iterator[ToolCall | ParseError]:
    """Yield the calls in blocks <tag>...</tag>. Blocks inside a block are not parsed."""
    opening = re.compile(f"<({'|'.join(map(re.escape, tags))})>")
    at = 0
    while opened := opening.search(text, at):
        closing = f"</{opened[1]}>"
        end = text.find(closing, opened.end())
        if end < 0:  # the rest belongs to this block: continuing after the tag would take quadratic time
            yield ParseError(f"{opened[0]} is not closed by {closing}.", text[opened.start() :])
            return
        at = end + len(closing)
        body, raw = text[opened.end() : end], text[opened.start() : at]
        if argument := tags[opened[1]]:
            yield ToolCall(opened[1], {argument: body.strip("\r\n")}, raw)
        else:
            yield from calls_in_json(body, raw)


def _json_calls(text: str) -> Iterator[ToolCall | ParseError]:
    """Yield the calls in fences; without any, those from the first line outside fences that begins with an object."""
    has_calls, fenced = False, find_fenced_blocks(text)
    for fence in fenced:
        if fence.language in CALL_FENCES:
            for call in calls_in_json(fence.body, fence.body, is_strict=False):
                has_calls = True
                yield call
    rest = "" if has_calls else text_outside(text, fenced)
    if opened := OBJECT_LINE.search(rest):
        yield from calls_in_json(rest[opened.end() :], rest[opened.end() :], is_strict=False)


def _native(text: str, dialect: str, schemas: Sequence[Mapping[str, Any]] | None) -> list[ToolCall | ParseError]:
    if dialect not in TOOL_FORMATS:
        raise ValueError(f"dialect={dialect!r} is not a known format; choose one of {tuple(TOOL_FORMATS)}.")
    if dialect != "harmony":  # there, calls are messages like the answer
        text = final_answer(text)
    if dialect in DIALECTS:
        dialect = "hermes" if "<tool_call>" in text else "mistral" if "[TOOL_CALLS]" in text else "llama"
    return find_calls(text, TOOL_FORMATS[dialect], schemas)


# ------------------------------------------------------------------------------------------------- prompts

_HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_LLAMA = """Given the following functions, please respond with a JSON for a function call with its proper arguments \
that best answers the given prompt.

Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. \
Do not use variables.

{tools}"""

_MISTRAL = """You can call these tools:
{tools}

To call tools, write [TOOL_CALLS] and a JSON list of {{"name": ..., "arguments": {{...}}}}."""

_JSON = """You can call these tools:
{tools}

To call one, end your message with a fenced block:
```json
{{"name": "<tool>", "arguments": {{...}}}}
```"""

_XML_CALLS = """To call any other tool:
<tool_call>
{"name": "<tool>", "arguments": {...}}
</tool_call>"""


def render_tools(schemas: Sequence[Mapping[str, Any]], style: str, dialect: str = "hermes") -> str:
    """Return the part of the system prompt that lists the tools and says how to write calls for `parse_calls`.

    Args:
        schemas: The tools in OpenAI's format (`Tool.schema`).
        style: One of `STYLES`; `parse_calls` must get the same one.
        dialect: Only for style "native". For "hermes" (Qwen 2.5, Hermes) and "llama" (Llama 3.1) the text is the one
            that these models' chat templates write for `tools=`. For "mistral" it is a description, because Mistral's
            template marks tools with control tokens, which no message may contain.

    Raises:
        ValueError: The style or the dialect is unknown.
    """
    if style == "xml":
        return _render_xml(schemas)
    templates = {"hermes": _HERMES, "llama": _LLAMA, "mistral": _MISTRAL}
    if style == "native" and dialect in templates:
        indent = 4 if dialect == "llama" else None
        between = "\n\n" if dialect == "llama" else "\n"
        rendered = between.join(json.dumps(schema, ensure_ascii=False, indent=indent) for schema in schemas)
        return templates[dialect].format(tools=rendered)
    if style == "json":
        return _JSON.format(tools="\n".join(json.dumps(s["function"], ensure_ascii=False) for s in schemas))
    raise ValueError(
        f"style={style!r} with dialect={dialect!r} is unknown; choose a style of {STYLES} and a dialect of {DIALECTS}."
    )


def _render_xml(schemas: Sequence[Mapping[str, Any]]) -> str:
    tags = tool_tags(schemas)
    parts = ["You can call these tools."]
    others = []
    for function in (schema["function"] for schema in schemas):
        name = function["name"]
        if name in tags:
            parts.append(f"{function['description']} To call it:\n<{name}>\n{tags[name]}\n</{name}>")
        else:
            others.append(json.dumps(function, ensure_ascii=False))
    if others:
        parts.append("\n".join(others))
        parts.append(_XML_CALLS)
    return "\n\n".join(parts)
