from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from skyrl_train.environments.tools.argument_validation import ArgumentValidator
from skyrl_train.environments.tools.base import Tool, ToolBox, ToolError, sanitize, truncate_middle
from skyrl_train.environments.tools.parsers import parse_calls
from skyrl_train.errors import ConfigError

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Echo(Tool):
    name = "echo"
    description = "Returns its argument."
    parameters = TEXT
    closed = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        return arguments["text"]

    async def close(self) -> None:
        self.closed += 1


class RunAction(Echo):
    """A tool that runs a given action."""

    name = "does"

    def __init__(self, action: Any, deadline_s: float = 60.0):
        self.action = action
        self.deadline_s = deadline_s

    async def call(self, arguments: dict[str, Any]) -> Any:
        result = self.action()
        return await result if asyncio.iscoroutine(result) else result


def raises(error: BaseException) -> Any:
    def action() -> None:
        raise error

    return action


def test_call_returns_result_and_close_is_idempotent():
    used, unused = Echo(), RunAction(lambda: "x")
    box = ToolBox([used, unused])
    assert box.call("echo", {"text": "hi"}).text == "hi"
    assert box.call("echo", {"text": "hi"}).error is None
    assert [schema["function"]["name"] for schema in box.schemas()] == ["echo", "does"]
    box.close()
    box.close()
    assert (used.closed, unused.closed) == (1, 0)


def test_tool_box_runs_parsed_calls():
    box = ToolBox([Echo()])
    calls = parse_calls("<echo>hi</echo> <tool_call>{</tool_call>", "xml", {"echo": "text"})
    first, second = (box.run(call) for call in calls)
    box.close()
    assert (first.text, first.error) == ("hi", None)
    assert second.text.startswith("The tool call is not valid JSON") and second.error == "unreadable"


def test_unused_tool_box_starts_no_thread():
    before = threading.active_count()
    box = ToolBox([Echo()])
    assert threading.active_count() == before
    box.close()


def test_tool_box_rejects_duplicate_names():
    with pytest.raises(ConfigError, match="Two tools of the episode have the name 'echo'"):
        ToolBox([Echo(), Echo()])


@pytest.mark.parametrize(
    ("name", "arguments", "error", "text"),
    [
        ("shell", {}, "unknown_tool", "no tool 'shell'; known tools: echo"),
        ("", {}, "unknown_tool", "known tools: echo"),
        (["echo"], {}, "unknown_tool", "known tools: echo"),
        ("\x1b[2J" * 1000, {}, "unknown_tool", "known tools"),
        ("echo", {}, "bad_arguments", "'text' is missing"),
        ("echo", {"text": 3}, "bad_arguments", "must be of type string, not integer: 3."),
        ("echo", {"text": "a", "path": "b"}, "bad_arguments", "no argument 'path'; there are: text"),
        ("echo", "a", "bad_arguments", "must be an object, not string"),
    ],
)
def test_model_mistake_becomes_text(name: Any, arguments: Any, error: str, text: str):
    box = ToolBox([Echo()])
    result = box.call(name, arguments)
    assert result.error == error
    assert text in result.text and "\x1b" not in result.text and len(result.text) < 300


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [
        (raises(ToolError("no such file")), "tool_error", "no such file"),
        (raises(ValueError("bad")), "ValueError", "does failed: ValueError: bad"),
        (raises(ValueError("x" * 10**6)), "ValueError", "xxx"),
        (raises(TimeoutError("its own")), "TimeoutError", "its own"),
        (raises(SystemExit(3)), "SystemExit", "3"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt", "failed"),
        (raises(asyncio.CancelledError()), "CancelledError", "was cancelled"),
        (lambda: None, "TypeError", "returned NoneType, not text"),
    ],
)
def test_tool_exception_becomes_text(action: Any, error: str, text: str):
    box = ToolBox([RunAction(action), Echo()])
    result = box.call("does", {"text": ""})
    assert result.error == error
    assert text in result.text and len(result.text) < 1000
    assert box.call("echo", {"text": "still here"}).text == "still here"
    box.close()


def test_slow_tool_is_canceled():
    cancelled = []

    async def wait() -> str:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    box = ToolBox([RunAction(wait, deadline_s=1.0), Echo()])
    assert box.call("echo", {"text": "its loop runs"}).error is None
    assert box.call("does", {"text": ""}).error == "timeout"
    assert box.call("echo", {"text": "still here"}).text == "still here"
    assert box.call("does", {"text": ""}).error == "timeout"
    assert cancelled == [True, True]
    box.close()


def test_tool_that_blocks_event_loop_is_abandoned():
    released = threading.Event()
    box = ToolBox([RunAction(lambda: released.wait(600), deadline_s=0.2), Echo()])
    thread = None
    try:
        result = box.call("does", {"text": ""})
        thread = next(t for t in threading.enumerate() if t.name == "tools")
        assert result.error == "timeout"
        assert box.call("echo", {"text": "still here"}).text == "still here"
        assert "not available any more" in box.call("does", {"text": ""}).text
    finally:
        released.set()
        box.close()
    thread.join(30)
    assert not thread.is_alive()


def test_hanging_close_is_abandoned_after_timeout():
    class HangsOnClose(Echo):
        async def close(self) -> None:
            await asyncio.sleep(600)

    import skyrl_train.environments.tools.base as base

    original_timeout, base.CLOSE_TIMEOUT_S = base.CLOSE_TIMEOUT_S, 0.1
    try:
        box = ToolBox([HangsOnClose()])
        box.call("echo", {"text": ""})
        started = time.monotonic()
        box.close()
        assert time.monotonic() - started < 60
    finally:
        base.CLOSE_TIMEOUT_S = original_timeout


def test_errors_while_closing_are_ignored():
    class RaisesOnClose(Echo):
        async def close(self) -> None:
            raise ValueError("broken")

    box = ToolBox([RaisesOnClose()])
    box.call("echo", {"text": ""})
    box.close()


def test_long_result_is_truncated_in_the_middle():
    box = ToolBox([Echo()])
    text = box.call("echo", {"text": "a" * 10_000 + "b" * 10_000}).text
    assert text.startswith("a" * 4096 + "\n[... 11808 characters left out ...]\n") and text.endswith("\n" + "b" * 4096)
    assert (
        truncate_middle("abc", 3) == "abc" and truncate_middle("abcdef", 3) == "ab\n[... 3 characters left out ...]\nf"
    )
    box.close()


@pytest.mark.fault("F24")
def test_sanitize_removes_unsafe_characters():
    all_characters = "".join(map(chr, range(0x100))) + "\ud800\udfff" + "é\r\n<script>[red]"
    text = sanitize(all_characters)
    text.encode()
    assert not set(text) & ({chr(c) for c in (*range(32), *range(0x7F, 0xA0))} - {"\n", "\t"})
    assert text.endswith("é\n<script>[red]")
    assert sys.getsizeof(text) < 10_000


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        ("integer", [1, 2.0, 10**30], [1.5, "1", True, None, float("inf"), float("nan")]),
        ("number", [1, 1.5], ["1", False, float("inf")]),
        ("boolean", [True], [1, "true"]),
        ("array", [[]], [{}, "a"]),
        ("object", [{}], [[], "a"]),
        (["string", "null"], ["a", None], [1]),
        ([], ["a", 1, True], []),
    ],
)
def test_argument_types_are_checked(type_: Any, good: list[Any], bad: list[Any]):
    check = ArgumentValidator({"properties": {"x": {"type": type_} if type_ else {}}})
    assert [value for value in good if check.find_problem({"x": value})] == []
    assert [value for value in bad if not check.find_problem({"x": value})] == []


def test_argument_enum_is_checked():
    check = ArgumentValidator({"properties": {"unit": {"enum": ["km", "mile"]}}})
    assert check.find_problem({"unit": "km"}) is None
    assert 'must be one of ["km", "mile"], not "inch"' in str(check.find_problem({"unit": "inch"}))
    assert ArgumentValidator({"additionalProperties": True}).find_problem({"any": 1}) is None
