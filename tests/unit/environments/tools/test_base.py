from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

import pytest

from skyrl_train.environments.tools.argument_validation import ArgumentValidator
from skyrl_train.environments.tools.base import Tool, ToolBox, ToolError, sanitize, truncate_middle
from skyrl_train.errors import ConfigError

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class Echo(Tool):
    name = "echo"
    description = "Says it again."
    parameters = TEXT
    closed = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        return arguments["text"]

    async def close(self) -> None:
        self.closed += 1


class Does(Echo):
    """Does what it was made with."""

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


def test_a_call_is_answered_and_the_tools_that_were_used_are_closed_once():
    used, unused = Echo(), Does(lambda: "x")
    box = ToolBox([used, unused])
    assert box.call("echo", {"text": "hi"}).text == "hi"
    assert box.call("echo", {"text": "hi"}).error is None
    assert [schema["function"]["name"] for schema in box.schemas()] == ["echo", "does"]
    box.close()
    box.close()
    assert (used.closed, unused.closed) == (1, 0)


def test_a_box_that_nobody_called_starts_no_thread():
    before = threading.active_count()
    box = ToolBox([Echo()])
    assert threading.active_count() == before
    box.close()


def test_names_are_unique():
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
def test_what_a_model_gets_wrong_is_a_text(name: Any, arguments: Any, error: str, text: str):
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
def test_whatever_a_tool_raises_is_a_text_and_the_box_goes_on(action: Any, error: str, text: str):
    box = ToolBox([Does(action), Echo()])
    result = box.call("does", {"text": ""})
    assert result.error == error
    assert text in result.text and len(result.text) < 1000
    assert box.call("echo", {"text": "still here"}).text == "still here"
    box.close()


def test_a_tool_that_waits_too_long_is_cancelled():
    cancelled = []

    async def wait() -> str:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    box = ToolBox([Does(wait, deadline_s=1.0), Echo()])
    assert box.call("echo", {"text": "its loop runs"}).error is None
    assert box.call("does", {"text": ""}).error == "timeout"
    assert box.call("echo", {"text": "still here"}).text == "still here"
    assert box.call("does", {"text": ""}).error == "timeout"
    assert cancelled == [True, True]
    box.close()


def test_a_tool_that_blocks_its_loop_is_given_up_and_the_others_go_on():
    free = threading.Event()
    box = ToolBox([Does(lambda: free.wait(600), deadline_s=0.2), Echo()])
    thread = None
    try:
        result = box.call("does", {"text": ""})
        thread = next(t for t in threading.enumerate() if t.name == "tools")
        assert result.error == "timeout"
        assert box.call("echo", {"text": "still here"}).text == "still here"
        assert "not available any more" in box.call("does", {"text": ""}).text
    finally:
        free.set()
        box.close()
    thread.join(30)
    assert not thread.is_alive()


def test_a_tool_that_does_not_close_holds_up_nothing_for_long():
    class Clings(Echo):
        async def close(self) -> None:
            await asyncio.sleep(600)

    import skyrl_train.environments.tools.base as base

    patience, base.CLOSE_TIMEOUT_S = base.CLOSE_TIMEOUT_S, 0.1
    try:
        box = ToolBox([Clings()])
        box.call("echo", {"text": ""})
        started = time.monotonic()
        box.close()
        assert time.monotonic() - started < 60
    finally:
        base.CLOSE_TIMEOUT_S = patience


def test_errors_in_closing_are_passed_over():
    class Breaks(Echo):
        async def close(self) -> None:
            raise ValueError("broken")

    box = ToolBox([Breaks()])
    box.call("echo", {"text": ""})
    box.close()


def test_a_long_result_loses_its_middle_and_says_so():
    box = ToolBox([Echo()])
    text = box.call("echo", {"text": "a" * 10_000 + "b" * 10_000}).text
    assert text.startswith("a" * 4096 + "\n[... 11808 characters left out ...]\n") and text.endswith("\n" + "b" * 4096)
    assert (
        truncate_middle("abc", 3) == "abc" and truncate_middle("abcdef", 3) == "ab\n[... 3 characters left out ...]\nf"
    )
    box.close()


@pytest.mark.fault("F24")
def test_results_carry_no_control_characters_and_can_be_encoded():
    every = "".join(map(chr, range(0x100))) + "\ud800\udfff" + "é\r\n<script>[red]"
    text = sanitize(every)
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
def test_arguments_are_of_their_types(type_: Any, good: list[Any], bad: list[Any]):
    check = ArgumentValidator({"properties": {"x": {"type": type_} if type_ else {}}})
    assert [value for value in good if check.find_problem({"x": value})] == []
    assert [value for value in bad if not check.find_problem({"x": value})] == []


def test_arguments_are_of_the_choices_where_there_are_some():
    check = ArgumentValidator({"properties": {"unit": {"enum": ["km", "mile"]}}})
    assert check.find_problem({"unit": "km"}) is None
    assert 'must be one of ["km", "mile"], not "inch"' in str(check.find_problem({"unit": "inch"}))
    assert ArgumentValidator({"additionalProperties": True}).find_problem({"any": 1}) is None
