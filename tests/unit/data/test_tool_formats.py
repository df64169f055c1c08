"""Answers are split into reasoning, content and tool calls in the format of each model family."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config import choices
from skyrl_train.data.chat import (
    decode_answer,
    decode_response,
    detect_tool_format,
    encode_forced_call,
    get_reasoning_opening,
    render_conversation,
    render_prompt,
)
from skyrl_train.data.reasoning import REASONING_FORMATS
from skyrl_train.data.tool_formats import (
    TOOL_FORMATS,
    AnswerStream,
    ModelAnswer,
    find_calls,
    forced_call_prefix,
    parse_answer,
)
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.tool_templates import FAMILIES

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City."},
                    "days": {"type": "integer"},
                    "share": {"type": "number"},
                    "is_metric": {"type": "boolean"},
                    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "options": {"type": "object"},
                    "tags": {"type": "array"},
                },
            },
        },
    }
]
ARGUMENTS = {
    "city": "Zürich, 東京 {x} <b>",
    "days": 3,
    "share": -0.5,
    "is_metric": True,
    "unit": None,
    "options": {"a": {"b": [1, {"c": "ü"}]}},
    "tags": ["one", "two"],
}
USER: dict[str, Any] = {"role": "user", "content": "Weather?"}


def call(arguments: dict[str, Any], index: int = 0, name: str = "get_weather") -> dict[str, Any]:
    return {"id": f"abcdefgh{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed(answer: ModelAnswer) -> list[tuple[str, dict[str, Any]]]:
    return [(item.name, item.arguments) for item in answer.tool_calls]


def written_answer(family: str, message: dict[str, Any]) -> tuple[str, str]:
    """Return the text that a model is trained to write for a message, and the opening of reasoning before it."""
    tokenizer, options = FAMILIES[family].tokenizer(), {"tools": TOOLS}
    tool_format = detect_tool_format(tokenizer, options)
    ids, mask = render_conversation(tokenizer, [USER, {"role": "assistant", "content": "", **message}], options)
    start = mask.index(True)
    return decode_answer(tokenizer, ids[start:], tool_format), get_reasoning_opening(tokenizer, ids[:start])


def answer_of(family: str, message: dict[str, Any]) -> ModelAnswer:
    text, opening = written_answer(family, message)
    return parse_answer(text, TOOL_FORMATS[family], opening, TOOLS)


def test_every_format_has_a_template():
    assert list(FAMILIES) == list(TOOL_FORMATS) == list(choices.TOOL_FORMATS)


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_format_is_detected(family: str):
    assert detect_tool_format(FAMILIES[family].tokenizer()) is TOOL_FORMATS[family]


def test_templates_without_calls_have_no_format():
    tokenizer = byte_tokenizer()
    assert detect_tool_format(tokenizer) is None
    tokenizer.chat_template = None
    assert detect_tool_format(tokenizer) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_template_writes_are_parsed(family: str):
    calls = [call(ARGUMENTS, 0), call({"city": "Bern"}, 1)]
    calls = calls[: FAMILIES[family].calls_per_turn]
    answer = answer_of(family, {"tool_calls": calls})
    assert parsed(answer) == [("get_weather", item["function"]["arguments"]) for item in calls]
    assert (answer.content, answer.reasoning, answer.errors) == ("", "", ())
    if family in ("mistral", "mistral_args"):  # the others do not write ids
        assert [item.id for item in answer.tool_calls] == [item["id"] for item in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_call_without_arguments_is_parsed(family: str):
    assert parsed(answer_of(family, {"tool_calls": [call({}, name="now")]})) == [("now", {})]


@pytest.mark.parametrize("family", [name for name, entry in FAMILIES.items() if entry.has_content])
def test_reasoning_and_text_before_call_are_split(family: str):
    calls = [call({"city": "Bern"})]
    message = {"content": "Let me look.", "tool_calls": calls}
    assert answer_of(family, message).content == "Let me look."
    message["reasoning_content"] = "I need <tool_call>, [TOOL_CALLS] and {}."
    answer = answer_of(family, message)
    assert parsed(answer) == [("get_weather", {"city": "Bern"})]
    assert (answer.content, answer.reasoning) == ("Let me look.", message["reasoning_content"])


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_prefix_begins_with_special_tokens(family: str):
    tokenizer = FAMILIES[family].tokenizer()
    tool_format = TOOL_FORMATS[family]
    for name in (None, "get_weather"):
        ids = encode_forced_call(tokenizer, tool_format, name)
        assert decode_answer(tokenizer, ids, tool_format) == forced_call_prefix(tool_format, name)
        markers = [token for token in tool_format.markers if token in forced_call_prefix(tool_format, name)]
        assert {tokenizer.convert_tokens_to_ids(token) for token in markers} <= set(ids)
    ids = encode_forced_call(tokenizer, tool_format, "x<|im_end|>")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids


REST_OF_FORCED_CALL = {
    "hermes": ' {"city": "Bern"}}\n</tool_call>',
    "qwen3_coder": "<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
    "glm": "\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>",
    "llama": ' {"city": "Bern"}}',
    "mistral": ' {"city": "Bern"}}]',
    "mistral_args": '[ARGS]{"city": "Bern"}',
    "deepseek_v3": '{"city": "Bern"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '{"city": "Bern"}<|call|>',
    "gemma4": 'city:<|"|>Bern<|"|>}<tool_call|>',
    "functiongemma": "city:<escape>Bern<escape>}<end_function_call>",
    "lfm2": "city='Bern')]<|tool_call_end|>",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_forced_call_is_parsed(family: str, opening: str):
    tool_format = TOOL_FORMATS[family]
    if opening and family == "harmony":
        opening = "<|channel|>analysis<|message|>"
    text = forced_call_prefix(tool_format, "get_weather", opening) + REST_OF_FORCED_CALL[family]
    answer = parse_answer(text, tool_format, opening, TOOLS)
    assert parsed(answer) == [("get_weather", {"city": "Bern"})]
    assert (answer.content, answer.reasoning) == ("", "")


MALFORMED = {
    "hermes": '<tool_call>\n{"name": "a", "arguments": {"x": 1}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=a>\n<parameter=x>\n1\n</function>\n</tool_call>",
    "glm": "<tool_call>a\n<arg_key>x</arg_key>\n</tool_call>",
    "llama": '{"name": "a", "parameters": {"x": 1}',
    "mistral": '[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}',
    "mistral_args": '[TOOL_CALLS]a[ARGS]{"x": 1',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{\n```",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a{}<｜tool▁calls▁end｜>",
    "harmony": '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x": 1<|call|>',
    "gemma4": '<|tool_call>call:a{x:<|"|>1}<tool_call|>',
    "functiongemma": "<start_function_call>call:a{x:y}<end_function_call>",
    "lfm2": "<|tool_call_start|>[a(1)]<|tool_call_end|>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_malformed_call_stays_in_content(family: str):
    answer = parse_answer(MALFORMED[family], TOOL_FORMATS[family], tools=TOOLS)
    assert answer.tool_calls == () and len(answer.errors) == 1
    assert answer.content == MALFORMED[family]
    assert answer.errors[0].reason.endswith(".") and answer.errors[0].raw in MALFORMED[family]


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 101 + "]" * 101])
def test_arguments_can_be_written_as_json(value: str):
    for name, text in (
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": %s}}</tool_call>'),
        ("harmony", '<|channel|>commentary to=functions.a<|message|>{"x": %s}<|call|>'),
        ("lfm2", "<|tool_call_start|>[a(x=%s)]<|tool_call_end|>"),
    ):
        answer = parse_answer(text % value, TOOL_FORMATS[name])
        assert answer.tool_calls == () and answer.content == text % value and len(answer.errors) == 1
        assert parse_answer(text % '"\\ud83d\\ude42"', TOOL_FORMATS["hermes"]).errors == ()


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        ("plain ", "plain ", "", []),
        ("<think>a</think>\n\nb", "b", "a", []),
        ("a\n</think>\n\nb", "b", "a", []),
        ('<tool_call>{"name": "no"}</tool_call>\n</think>b', "b", "", []),
        ("<think>a", "", "a", []),
        ("<think>a</think>b<think>c</think>d", "bd", "a\n\nc", []),
        ("`<think>` opens reasoning", "`<think>` opens reasoning", "", []),
        (
            '<think><tool_call>{"name": "no"}</tool_call></think><tool_call>{"name": "yes"}</tool_call>',
            "",
            None,
            ["yes"],
        ),
        (
            'a <tool_call> in prose </think> <tool_call>{"name": "yes"}</tool_call>',
            "",
            "a <tool_call> in prose",
            ["yes"],
        ),
        (
            'x\n<tool_call>{"name": "a"}</tool_call>\ny\n<tool_call>{"name": "b"}</tool_call>\n',
            "x\n\ny",
            "",
            ["a", "b"],
        ),
        ('<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>', "", "", ["a"]),
        ('<tool_call>{"name": "a", "arguments": {"x": "<think>"}}</tool_call>!', "!", "", ["a"]),
        ('<tool_call>{"name": "a"}</tool_call><tool_call>{</tool_call>', "<tool_call>{</tool_call>", "", ["a"]),
        ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>", "b", "a", []),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            "b",
            "a",
            [],
        ),
    ],
)
def test_answer_is_split(text: str, content: str, reasoning: str | None, names: list[str]):
    answer = parse_answer(text, TOOL_FORMATS["hermes"])
    assert answer.content == content and [item.name for item in answer.tool_calls] == names
    assert reasoning is None or answer.reasoning == reasoning


def test_prompt_opens_reasoning():
    hermes = TOOL_FORMATS["hermes"]
    assert parse_answer("a\n</think>\n\nb", hermes, "<think>\n") == ModelAnswer("b", "a")
    assert parse_answer("a", hermes, "<think>\n") == ModelAnswer("", "a")
    assert parse_answer("a<|end|>", TOOL_FORMATS["harmony"], "<|channel|>analysis<|message|>") == ModelAnswer("", "a")


@pytest.mark.parametrize("family", [*FAMILIES, None])
@pytest.mark.parametrize("entry", REASONING_FORMATS, ids=lambda entry: entry.open_marker)
def test_every_reasoning_format_is_split(entry: Any, family: str | None):
    tool_format = TOOL_FORMATS[family] if family else None
    if family != "harmony":
        text = f"{entry.open_marker}\nwell\n{entry.close_marker}\n\nyes"
        assert parse_answer(text, tool_format) == ModelAnswer("yes", "well")


def test_harmony_messages_are_split_by_channel():
    text = (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|call|>"
    )
    answer = parse_answer(text, TOOL_FORMATS["harmony"])
    assert (answer.content, answer.reasoning) == ("Wait.", "a")
    assert parsed(answer) == [("f", {"x": 1}), ("g", {})]
    assert parse_answer("no header", TOOL_FORMATS["harmony"]).content == "no header"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, "x", "x"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, "[1]", [1]),
        ({}, "text", "text"),
        ({}, "9" * 5000, "9" * 5000),
    ],
)
def test_text_arguments_are_converted_by_schema(schema: dict[str, Any], text: str, value: Any):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    for family, body in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"),
        ("glm", f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        assert parsed(parse_answer(body, TOOL_FORMATS[family], tools=[tool])) == [("f", {"x": value})]
        assert parsed(parse_answer(body, TOOL_FORMATS[family])) == [("f", {"x": text})]


def test_tagged_argument_keeps_text_like_tags():
    code = "a\n</parameter>\n<b>\n\n"
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{code}\n</parameter>\n</function>\n</tool_call>"
    assert parsed(parse_answer(text, TOOL_FORMATS["qwen3_coder"])) == [("f", {"x": code})]


def test_decoding_keeps_markers_that_are_control_tokens():
    tokenizer = FAMILIES["mistral_args"].tokenizer()
    ids = tokenizer.encode('[TOOL_CALLS]f[ARGS]{"x": 1}<|im_end|>', add_special_tokens=False)
    assert decode_response(tokenizer, ids) == 'f{"x": 1}'
    assert decode_answer(tokenizer, ids, TOOL_FORMATS["mistral_args"]) == '[TOOL_CALLS]f[ARGS]{"x": 1}'
    assert decode_answer(tokenizer, ids, None) == 'f{"x": 1}'


def test_continued_conversation_keeps_call_tokens():
    """The tokens of a sampled call begin the prompt of the next turn, with the template's own spelling."""
    tokenizer = FAMILIES["hermes"].tokenizer()
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call({"city": "Bern"})]}]
    ids, _ = render_conversation(tokenizer, messages, {"tools": TOOLS})
    longer = render_prompt(tokenizer, [*messages, {"role": "tool", "content": "sunny"}], {"tools": TOOLS})
    assert longer[: len(ids)] == ids


# -- Streams -----------------------------------------------------------------------------------------------------------


def streamed(text: str, family: str | None, cuts: list[int]) -> tuple[AnswerStream, str, str]:
    stream = AnswerStream(TOOL_FORMATS[family] if family else None, tools=TOOLS)
    deltas = [stream.update(text[:cut]) for cut in sorted({cut for cut in cuts if cut < len(text)})]
    deltas.append(stream.update(text, is_complete=True))
    return stream, "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_emit_text_before_calls_at_once(family: str):
    written, _ = written_answer(family, {"tool_calls": [call({"city": "Bern"})]})
    head = {"llama": "", "harmony": "<|channel|>analysis<|message|>well<|end|><|start|>assistant"}.get(
        family, "<think>\nwell\n</think>\n\nLet me look. "
    )
    stream = AnswerStream(TOOL_FORMATS[family])
    seen = [stream.update((head + written)[:end]) for end in range(len(head + written))]
    content, reasoning = ("".join(getattr(delta, name) for delta in seen) for name in ("content", "reasoning"))
    assert content == ("" if family in ("llama", "harmony") else "Let me look.")
    assert reasoning == ("" if family == "llama" else "well")
    assert stream.update(head + written, is_complete=True).content == ""
    assert len(stream.answer().tool_calls) == 1


def test_stream_holds_back_incomplete_characters():
    stream = AnswerStream(TOOL_FORMATS["hermes"])
    assert stream.update("Z\ufffd").content == "Z"
    assert stream.update("Zü").content == "ü"


PIECES = [
    *("{}[]\"':,\\\n` <>/a1\ud800\ufffd"),
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
    *("<|END_RESPONSE|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<function=f>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *(
        "</arg_value>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json\n",
    ),
    *(
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "assistant",
        "analysis",
        "final",
        " to=functions.f",
    ),
    *("<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "<|tool_call_start|>", "<|tool_call_end|>", "f(x='a')"),
    *('"name": "f"', '{"name": "f", "arguments": {"x": 1}}'),
]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
FORMATS = st.sampled_from([*TOOL_FORMATS, None])


@given(text=HOSTILE, family=FORMATS, cuts=st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=600, deadline=None)
def test_streams_equal_complete_answers(text: str, family: str | None, cuts: list[int]):
    expected = parse_answer(text, TOOL_FORMATS[family] if family else None, tools=TOOLS)
    stream, reasoning, content = streamed(text, family, cuts)
    assert stream.answer() == expected
    complete = AnswerStream(TOOL_FORMATS[family] if family else None, tools=TOOLS)
    delta = complete.update(text, is_complete=True)
    if (delta.reasoning, delta.content) == (expected.reasoning, expected.content):  # no block closes what none opened
        assert (reasoning, content) == (expected.reasoning, expected.content)


@given(text=HOSTILE | st.text(), family=st.sampled_from(list(TOOL_FORMATS)))
@settings(max_examples=300, deadline=None)
def test_no_text_raises(text: str, family: str):
    answer = parse_answer(text, TOOL_FORMATS[family], tools=TOOLS)
    for item in answer.tool_calls:
        assert isinstance(item.name, str) and isinstance(item.arguments, dict)
    assert len(find_calls(text, TOOL_FORMATS[family])) >= len(answer.tool_calls)


UNITS = [
    *PIECES,
    "<tool_call>{",
    '<tool_call>["',
    '<tool_call>{"</tool_call>',
    "<tool_call><think></think>",
    "<think>{",
]
UNITS += [
    "</think>{",
    '<tool_call>{"<think></think>',
    " \n",
    "call:f{a",
    "[TOOL_CALLS]{<think></think>",
    "<tool_call>f ",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_parsing_takes_linear_time(family: str):
    """Time that grows with the square of the length would take minutes for some unit."""
    started = time.process_time()
    for unit in UNITS:
        text = unit * (30_000 // len(unit))
        parse_answer(text, TOOL_FORMATS[family], tools=TOOLS)
        parse_answer(text + "</think></tool_call>", TOOL_FORMATS[family], tools=TOOLS)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("family", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"</tool_call>'),
        ("hermes", '<tool_call>{"<think></think>'),
        ("llama", "<think></think>{"),
        ("mistral", "[TOOL_CALLS]{<think></think>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    ],
)
def test_failing_calls_take_linear_time(family: str, unit: str):
    started = time.process_time()
    parse_answer(unit * (1_000_000 // len(unit)) + "</tool_call>", TOOL_FORMATS[family])
    assert time.process_time() - started < 5


def test_long_streams_take_linear_time():
    started = time.process_time()
    text = "<think>" + "word " * 40_000
    stream = AnswerStream(TOOL_FORMATS["hermes"])
    for end in range(0, len(text), 20):
        stream.update(text[:end])
    assert time.process_time() - started < 5
