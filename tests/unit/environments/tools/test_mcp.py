from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.environments.tools import mcp
from skyrl_train.environments.tools.base import ToolBox, ToolError, ToolResult
from skyrl_train.environments.tools.mcp import McpServer, McpTool, ToolListing, fingerprint
from skyrl_train.errors import ConfigError
from tests.support.process_state import wait_for_exit
from tests.unit.environments.tools.test_argument_validation import listening

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
ALLOWED = ["add", "volume", "calls", "big", "hang", "cancelled", "fail", "environment", "change", "stray", "die"]


def stdio(how: str = "stdio", **settings: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [SERVER, how], "tools": ALLOWED, **settings}


@contextmanager
def http() -> Iterator[dict[str, Any]]:
    with subprocess.Popen([sys.executable, SERVER, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield {"url": f"http://127.0.0.1:{int(process.stdout.readline())}/mcp", "tools": ALLOWED}
        finally:
            process.kill()


@contextmanager
def server_of(kind: str) -> Iterator[dict[str, Any]]:
    if kind == "http":
        with http() as entry:
            yield entry
    else:
        yield stdio()


@contextmanager
def box(*, timeout: float = 60.0, **servers: Any) -> Iterator[ToolBox]:
    opened = ToolBox([McpTool(servers, timeout)])
    try:
        yield opened
    finally:
        opened.close()


def call(opened: ToolBox, tool: str, **arguments: Any) -> ToolResult:
    return opened.call("mcp", {"tool": tool, "arguments": arguments})


@pytest.mark.fault("F25")
@pytest.mark.parametrize("kind", ["stdio", "http"])
def test_only_allowed_tools_of_server_are_called(kind: str):
    with server_of(kind) as entry, box(s=entry) as opened:
        (schema,) = opened.schemas()
        assert "- s.add: Add two numbers." in schema["function"]["description"]
        assert "secret" not in schema["function"]["description"]
        assert call(opened, "s.add", a=2, b=3) == ToolResult("5")

        for name in ("s.secret", "other.add", "add", "s.", "s.add.add"):
            assert call(opened, name).error == "bad_arguments"

        assert call(opened, "s.add", a="two").error == "bad_arguments"
        failed = call(opened, "s.fail")
        assert (failed.error, "luck" in failed.text, "\x1b" in failed.text) == ("tool_error", True, False)

        truncated = call(opened, "s.big")
        assert truncated.error is None and "left out" in truncated.text and len(truncated.text) < 8300
        assert call(opened, "s.add", a=20, b=3) == ToolResult("23")


def test_arguments_are_validated_before_calling_server():
    with box(s=stdio()) as opened:
        boxes = [{"size": 2, "inside": [{"size": 3}]}]
        assert call(opened, "s.volume", boxes=boxes, unit="m") == ToolResult("5 m")
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"boxes": [{"size": 1, "inside": [{}]}]}, "'boxes[0].inside[0].size' is missing."),
            ({"boxes": [{"size": 1}, {"size": 0}]}, "'boxes[1].size' must be at least 1, not 0."),
            ({"boxes": [{"size": "3"}]}, "'boxes[0].size' must be of type integer"),
            ({"boxes": [], "unit": "mile"}, """'unit' must be one of ["cm", "m"], not "mile"."""),
            ({}, "'boxes' is missing."),
        ]
        for wrong, message_part in mistakes:
            result = call(opened, "s.volume", **wrong)
            assert (result.error, result.text.startswith("s.volume: the argument")) == ("bad_arguments", True)
            assert message_part in result.text
        assert call(opened, "s.calls") == ToolResult("1")


def test_remote_schema_reference_is_never_fetched():
    with listening() as (url, asked):
        entry = stdio("fetching", env={"REFERS_TO": f"{url}/schema"}) | {"tools": ["add"]}
        with pytest.raises(ConfigError, match=r"servers\.s\.tools: .*'add' .* other documents are not fetched; leave"):
            McpTool({"s": entry})
    assert asked == []


def test_concurrent_first_use_pins_one_listing(monkeypatch: pytest.MonkeyPatch):
    listings: list[dict[str, Any]] = []
    meet = threading.Barrier(2)

    def first_listing(server: McpServer) -> ToolListing:
        with suppress(threading.BrokenBarrierError):
            meet.wait(0.2)  # both threads arrive here if nothing prevents it
        listings.append({"add": {"description": f"version {len(listings)}", "parameters": {}}})
        return listings[-1]

    monkeypatch.setattr(mcp, "_first_listing", first_listing)
    server = McpServer("of two threads", ("add",), command=sys.executable)
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(mcp.pinned_tools, [server, server])
    assert one is other and len(listings) == 1


@pytest.mark.fault("F25")
@pytest.mark.parametrize("name", ["s.secret", "other.add", "s.", "s.add.add"])
def test_call_rejects_tools_that_are_not_allowed(name: str):
    with pytest.raises(ToolError, match="not an allowed tool"):
        asyncio.run(McpTool({"s": stdio()}).call({"tool": name, "arguments": {}}))


@pytest.mark.fault("F25")
@pytest.mark.defect("D38")
def test_hanging_call_times_out_and_next_succeeds():
    tool = McpTool({"s": stdio()})
    opened = ToolBox([tool])
    assert call(opened, "s.add", a=2, b=3) == ToolResult("5")  # the server has started
    tool.deadline_s = 2.0
    assert call(opened, "s.hang").error == "timeout"
    tool.deadline_s = 60.0
    assert call(opened, "s.add", a=2, b=3) == ToolResult("5")
    assert call(opened, "s.cancelled") == ToolResult("1")
    opened.close()


@pytest.mark.fault("F25")
@pytest.mark.parametrize("what", ["description", "list"])
def test_changed_tool_list_is_rejected(what: str):
    with box(s=stdio()) as opened:
        assert call(opened, "s.change", what=what) == ToolResult("changed")
        for _ in range(2):
            refused = call(opened, "s.add", a=2, b=3)
            assert (refused.error, "has changed its tools" in refused.text) == ("tool_error", True)


def test_crashed_server_is_restarted_at_next_call():
    with box(s=stdio()) as opened:
        assert call(opened, "s.die").error == "tool_error"
        assert call(opened, "s.add", a=2, b=3) == ToolResult("5")


def test_server_inherits_no_environment_and_ends_with_episode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with box(s=stdio(env={"OWN": "1"})) as opened:
        pid, *names = call(opened, "s.environment").text.split()
        assert "OWN" in names and "PATH" in names and not {"WANDB_API_KEY", "SKYRL_TEST_SESSION"} & set(names)
        assert psutil.pid_exists(int(pid))
    assert wait_for_exit(int(pid))


@pytest.mark.defect("detached-children-outlive-environment")
def test_server_children_in_other_sessions_are_killed():
    with box(s=stdio()) as opened:
        pid = int(call(opened, "s.stray").text)
        assert psutil.pid_exists(pid)
    assert wait_for_exit(pid)


@pytest.mark.fault("F25")
def test_unresponsive_server_is_killed_with_episode():
    entry = stdio("stubborn")
    entry["tools"] = ["environment", "block"]
    tool = McpTool({"s": entry})
    opened = ToolBox([tool])
    pid = int(call(opened, "s.environment").text.split()[0])
    tool.deadline_s = 2.0
    assert call(opened, "s.block").error == "timeout"
    opened.close()
    assert wait_for_exit(pid)


@pytest.mark.fault("F25")
def test_fingerprint_mismatch_is_a_config_error():
    tool = McpTool({"s": stdio()})
    digest = fingerprint(tool.pinned["s"])
    assert McpTool({"s": stdio(sha256=digest)}).pinned == tool.pinned
    with pytest.raises(ConfigError, match=rf"servers\.s\.sha256='00'.*{digest}"):
        McpTool({"s": stdio(sha256="00")})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"tools": ["a"]}, "exactly one of command"),
        ({"command": "sh", "url": "http://x", "tools": ["a"]}, "exactly one of command"),
        ({"command": "sh"}, r"servers\.s\.tools=None"),
        ({"command": "sh", "tools": []}, r"servers\.s\.tools=\[\]"),
        ({"command": "sh", "tools": "all"}, r"servers\.s\.tools='all'"),
        ({"command": "no-such-program", "tools": ["a"]}, "not a program on PATH"),
        ({"url": "localhost:1", "tools": ["a"]}, "not an http://"),
        ({"url": "http://127.0.0.1:1/mcp", "tools": ["a"]}, "did not list its tools"),
        ({"command": "false", "tools": ["a"]}, "did not list its tools"),
        ({"command": "sh", "tols": ["a"]}, "tols"),
        ("sh", "'sh' is not a mapping"),
    ],
)
def test_invalid_server_entry_is_a_config_error(entry: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        McpTool({"s": entry})


def test_missing_server_tool_is_a_config_error():
    with pytest.raises(
        ConfigError, match=r"servers\.s\.tools: the server has no tools \['sub'\]; choose among \['add'"
    ):
        McpTool({"s": stdio() | {"tools": ["add", "sub"]}})
