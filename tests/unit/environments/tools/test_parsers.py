from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.environments.tools.parsers import (
    DIALECTS,
    MAX_CALLS,
    STYLES,
    ParseError,
    ToolCall,
    parse_calls,
    render_tools,
    tool_tags,
)

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
TAGS = {"python": "code"}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def read(text: str, style: str) -> list[tuple[str, Any]]:
    return [
        (item.name, item.arguments) if isinstance(item, ToolCall) else ("error", item.reason)
        for item in parse_calls(text, style, TAGS)
    ]


ADDED = [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("xml", "I compute.\n<python>\nprint(1)\n</python>", [("python", {"code": "print(1)"})]),
        (
            "xml",
            "<python>  x</python> and <python>y</python>",
            [("python", {"code": "  x"}), ("python", {"code": "y"})],
        ),
        ("xml", f"<tool_call>{CALL}</tool_call>", ADDED),
        ("xml", "<answer>42</answer> <b>no</b> a < b > c", []),
        ("xml", "<python><python>1</python></python>", [("python", {"code": "<python>1"})]),
        ("xml", "<think><python>1</python></think> <python>2</python>", [("python", {"code": "2"})]),
        ("xml", "so I think </think><python>2</python>", [("python", {"code": "2"})]),
        ("xml", "<think>maybe <python>1</python>", []),
        ("json", CALL, ADDED),
        ("json", f"Let me add.\n{CALL}", ADDED),
        ("json", f"Let me add.\n```json\n{CALL}\n```\nand wait", ADDED),
        ("json", f"```json\n[{CALL}, {CALL}]\n```", ADDED * 2),
        ("json", f"```\n{CALL}\n```\n```\n{CALL}\n```", ADDED * 2),
        ("json", "The answer is {42}.\n{x}", []),
        ("json", '{"answer": 42}', []),
        ("native", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", ADDED * 2),
        ("native", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', ADDED),
        ("native", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
        ("native", '{"name": "add", "parameters": {"a": 1, "b": 2}}', ADDED),
        ("native", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}; ' + CALL, ADDED * 2),
        ("native", f"[TOOL_CALLS] [{CALL}]", ADDED),
        ("native", f"[{CALL}]", ADDED),
        ("native", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', ADDED),
        ("native", 'The format is {"name": "add"}', []),
        ("native", "[1, 2, 3]", []),
    ],
)
def test_calls_are_parsed(style: str, text: str, calls: list[Any]):
    assert read(text, style) == calls


@pytest.mark.parametrize(
    ("style", "text", "reason"),
    [
        ("xml", "<python>print(1)", "<python> is not closed by </python>"),
        ("xml", "<tool_call>{oops}</tool_call>", "not valid JSON"),
        ("xml", "<tool_call></tool_call>", "is empty"),
        ("native", "<tool_call>[1]</tool_call>", '{"name"'),
        ("native", '<tool_call>{"name": 3}</tool_call>', '{"name"'),
        ("native", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("native", '<tool_call>{"name": "a", "arguments": "[1"}</tool_call>', "not valid JSON"),
        ("native", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "not valid JSON"),
        ("native", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "not a finite number"),
        ("native", "<tool_call>" + "[" * 100_000 + "</tool_call>", "too deep"),
        ("native", '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ("json", '{"name": "add", "arguments": {"a": 1', "not valid JSON"),
        ("native", '[TOOL_CALLS]add[ARGS]{"a": 1', "not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(style: str, text: str, reason: str):
    (error,) = parse_calls(text, style, TAGS)
    assert isinstance(error, ParseError)
    assert reason in error.reason and len(error.reason) < 300


def test_calls_are_counted():
    found = parse_calls("<python>1</python>" * 1000, "xml", TAGS)
    assert len(found) == MAX_CALLS + 1
    assert isinstance(found[-1], ParseError) and "More than" in found[-1].reason
    with pytest.raises(ValueError, match="style='yaml' is not a known style"):
        parse_calls("", "yaml")


HOSTILE = st.lists(
    st.sampled_from(
        [
            *("{}[]\"':,\\\n` <>/a1\ud800\0"),
            *("<python>", "</python>", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
            *("```", "```json\n", '"name": "x"', '"arguments": {', "<|python_tag|>", CALL),
        ]
    ),
    max_size=60,
).map("".join)


@given(text=HOSTILE | st.text(), style=st.sampled_from(STYLES))
@settings(max_examples=400)
def test_parsing_never_raises(text: str, style: str):
    for item in parse_calls(text, style, TAGS):
        assert isinstance(item, ToolCall | ParseError)
        if isinstance(item, ToolCall):
            assert isinstance(item.name, str) and isinstance(item.arguments, dict)
            json.dumps(item.arguments, allow_nan=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
UNAMBIGUOUS_JSON = JSON.filter(
    lambda value: not any(mark in json.dumps(value) for mark in ("tool_call", "think", "```"))
)


@given(
    name=st.from_regex(r"\A[a-z_]{1,20}\Z"),
    arguments=st.dictionaries(st.text(max_size=5), UNAMBIGUOUS_JSON, max_size=3),
)
@settings(max_examples=150)
def test_every_format_round_trips(name: str, arguments: dict[str, Any]):
    call = json.dumps({"name": name, "arguments": arguments})
    llama = json.dumps({"name": name, "parameters": arguments})
    texts = {
        "xml": [f"<tool_call>\n{call}\n</tool_call>"],
        "json": [call, f"so:\n```json\n{call}\n```"],
        "native": [f"<tool_call>\n{call}\n</tool_call>", llama, f"[TOOL_CALLS] [{call}]"],
    }
    for style, formatted in texts.items():
        for text in formatted:
            assert read(text, style) == [(name, arguments)], text


UNITS = ["<python>", "</python>", "<tool_call>", "[TOOL_CALLS]", "{", "[", '{"a":', '{"name":"', "```\n", "<think>"]
UNITS += ["\n{", "[TOOL_CALLS]x[ARGS]", "<tool_call>{", '{"b":"x","a":', " ", "\\", '"', "<"]


@pytest.mark.parametrize("style", STYLES)
def test_parsing_takes_linear_time(style: str):
    """Parse a megabyte of each unit. Parsing again from every opening tag would take minutes to hours."""
    started = time.process_time()
    for unit in UNITS:
        parse_calls(unit * (10**6 // len(unit)), style, TAGS)
    assert time.process_time() - started < 20


def test_only_tools_with_one_string_have_tags():
    assert tool_tags([PYTHON, ADD]) == {"python": "code"}


@pytest.mark.parametrize(("style", "dialect"), [*((s, "hermes") for s in STYLES), *(("native", d) for d in DIALECTS)])
def test_rendered_instructions_match_the_parser(style: str, dialect: str):
    instructions = render_tools([PYTHON, ADD], style, dialect)
    assert "Runs Python." in instructions and "Adds two numbers." in instructions
    if style == "xml":
        start = instructions.index("<python>")
        assert read(instructions[start : instructions.index("</python>") + 9], style) == [("python", {"code": "code"})]
    elif style == "json":
        assert "```json" in instructions
    else:
        marker = {"hermes": "<tool_call>", "llama": '"parameters"', "mistral": "[TOOL_CALLS]"}[dialect]
        assert marker in instructions


def test_unknown_style_or_dialect_is_rejected():
    for style, dialect in (("yaml", "hermes"), ("native", "klingon")):
        with pytest.raises(ValueError, match="choose a style of"):
            render_tools([ADD], style, dialect)
