from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Compose, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv

from skyrl_train.environments.tasks.countdown import CountdownEnv
from skyrl_train.environments.tools import mcp
from skyrl_train.environments.tools.browser import PROGRAMS
from skyrl_train.environments.tools.url_policy import UrlNotAllowed, UrlPolicy
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict import (
    BrowserTransform,
    ExecuteToolsInOrder,
    JSONCallParser,
    MCPToolTransform,
    NativeCallParser,
    PythonExecutorService,
    PythonInterpreter,
    SimpleToolTransform,
    ToolRegistry,
    XMLBlockParser,
)
from skyrl_train.tensordict.envs import tools
from tests.support.chat_answers import answered, chats
from tests.support.web_server import Response, web_server

SERVER = str(Path(__file__).parents[2] / "environments" / "tools" / "mcp_server.py")
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: scripts/sandbox_tools")
needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="needs Chromium: scripts/browser_tools"
)


def blocks(*codes: str) -> str:
    return "\n".join(f"```python\n{code}\n```" for code in codes)


class Talk:
    """A TorchRL environment with one tool, and what follows answers of its rows."""

    def __init__(self, *transforms: Any, rows: int = 1):
        self.env = TransformedEnv(ChatEnv(batch_size=(rows,)), Compose(*transforms))
        self.root: TensorDictBase = self.env.reset(TensorDict(query=["?"] * rows, batch_size=[rows]))
        self.before = chats(self.root)

    def say(self, *answers: str) -> list[list[str]]:
        """The messages of tools that follow, for each row."""
        _, self.root = self.env.step_and_maybe_reset(answered(self.root, *answers))
        following = []
        for messages in chats(self.root):
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            assert {message["role"] for message in messages[last + 1 :]} <= {"tool"}
            following.append([message["content"] for message in messages[last + 1 :]])
        return following


@needs_bubblewrap
@pytest.mark.defect("D36")
def test_blocks_of_python_run_isolated_and_with_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("A_SECRET", "hunter2")
    talk = Talk(PythonInterpreter(timeout=60.0), rows=3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spy = "import os; print(os.environ.get('A_SECRET'), os.path.exists('/root'), os.getuid() != 0)"
    warns = "import warnings; warnings.warn('careful'); print(6 * 7)"
    spied, failed, none = talk.say(blocks(spy, warns), blocks("print('a' * 100_000)", "1 / 0"), "no code")
    assert spied[0] == "Code block 1 executed successfully:\nNone False True"
    assert spied[1].startswith("Code block 2 executed successfully:\n42") and "careful" in spied[1]
    assert failed[0].startswith("Code block 1 ") and len(failed[0]) < 10_000
    assert failed[1].startswith("Code block 2 failed:\nTraceback") and none == []
    talk.env.close()
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
@pytest.mark.defect("D36")
def test_a_session_keeps_functions_and_no_line_it_prints_ends_it():
    transform = PythonInterpreter(persistent=True, timeout=60.0)
    talk = Talk(transform, rows=2)
    first = "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nprint('---END---')\nprint('after it')"
    assert talk.say(blocks(first), blocks("x = 1"))[0][0].endswith("\n---END---\nafter it")
    lines = "print(f(5))\nfor i in range(7_000): print(i)"  # at 10 ms a line it would take longer than the limit
    again, other = talk.say(blocks(lines), blocks("print(f(5))"))
    assert again[0].startswith("Code block 1 executed successfully:\n120\n0\n1")
    assert other[0].startswith("Code block 1 failed:") and "NameError" in other[0]
    children = len(psutil.Process().children(recursive=True))
    assert children > 0
    talk.env.reset(TensorDict(query=["?"] * 2, batch_size=[2]))
    assert len(psutil.Process().children(recursive=True)) < children
    talk.env.close()


def running(word: str) -> bool:
    """A descendant with this argument; those that end meanwhile are none."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline():
                return True
    return False


@needs_bubblewrap
@pytest.mark.defect("D36")
def test_a_block_that_does_not_end_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    talk = Talk(PythonInterpreter(timeout=1.0))
    code = "import subprocess\nsubprocess.Popen(['sleep', '987'])\nwhile True: pass"
    assert talk.say(blocks(code))[0][0].startswith("Code block 1 failed:\n[timed out after 1 s]")
    assert not running("987")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.defect("D36")
def test_code_runs_nowhere_without_a_sandbox_or_consent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bubblewrap
    code = blocks(f"open({str(tmp_path / 'escaped')!r}, 'w')")
    for sandbox in (None, {"kind": "unsafe_local"}):
        talk = Talk(PythonInterpreter(sandbox=sandbox))
        with pytest.raises(ConfigError, match=r"bwrap|i_know_this_runs_model_code_on_this_machine"):
            talk.say(code)
        talk.env.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.defect("D36")
def test_sessions_and_limits_hold_wherever_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    consent = {"kind": "unsafe_local", "i_know_this_runs_model_code_on_this_machine": True}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    talk = Talk(PythonInterpreter(persistent=True, timeout=60.0, sandbox=consent))
    first = "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nprint('---END---')\nprint(f(5))"
    warns = "import warnings; warnings.warn('careful'); print(f(3))"
    texts = talk.say(blocks(first, warns, "print('a' * 100_000)"))[0]
    assert texts[0] == "Code block 1 executed successfully:\n---END---\n120"
    assert texts[1].startswith("Code block 2 executed successfully:\n6")
    assert len(texts[2]) < 10_000
    talk.env.close()
    talk = Talk(PythonInterpreter(timeout=1.0, sandbox=consent))
    endless = "import subprocess\nsubprocess.Popen(['sleep', '986'])\nwhile True: pass"
    assert talk.say(blocks(endless))[0][0].startswith("Code block 1 failed:\n[timed out after 1 s]")
    talk.env.close()
    assert not running("986")
    assert list(tmp_path.iterdir()) == []


def test_reasoning_and_finished_rows_run_nothing():
    talk = Talk(PythonInterpreter())
    assert talk.say(f"<think>{blocks('1')}</think> done") == [[]]
    talk = Talk(StepCounter(1), PythonInterpreter())
    stepped = talk.env.step(answered(talk.root, blocks("1")))
    assert [message["role"] for message in chats(stepped["next"])[0]] == ["user", "assistant"]


def test_tools_need_a_conversation():
    with pytest.raises(RuntimeError, match="history"):
        TransformedEnv(ChatEnv(input_mode="text"), Compose(PythonInterpreter()))
    with pytest.raises(ValueError, match="slurm"):
        PythonInterpreter(services="slurm")
    with pytest.raises(ValueError, match="persistent"):
        PythonInterpreter(services="ray", persistent=True)


def add(a: int, b: int) -> dict[str, int]:
    return {"result": a + b}


def test_rows_run_functions_of_this_process():
    talk = Talk(SimpleToolTransform({"add": add}), rows=3)
    call = "<tool>add\n{}</tool>"
    right = call.format('{"a": 2, "b": 3}')
    first, second, none = talk.say(right * 2, call.format("[") + call.format('{"c": 1}'), "no call")
    assert first == ["Tool add executed successfully:\n{'result': 5}"] * 2 and none == []
    assert [text.partition(":")[0] for text in second] == ["Tool add failed"] * 2
    assert "valid JSON" in second[0] and "unexpected keyword argument 'c'" in second[1]
    parsed = Talk(SimpleToolTransform({"add": add}, parser=XMLBlockParser()))
    calls = ('{"a": 1, "b": 1}', "[1, 2]", '"12"')
    answer = "".join(f'<tool name="add">{arguments}</tool>' for arguments in calls)
    assert parsed.say(answer + '<tool name="no">{}</tool>')[0] == [
        "Tool add executed successfully:\n{'result': 2}",
        *["Tool add failed:\nThe arguments must be a JSON object."] * 2,
        "Tool no failed:\nThere is no tool 'no'; known tools: add.",
    ]


def test_native_calls_run_and_errors_are_shown():
    talk = Talk(SimpleToolTransform({"add": add}, parser=NativeCallParser("hermes")))
    (shown,) = talk.say('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><tool_call>{</tool_call>')
    assert shown[0] == "Tool add executed successfully:\n{'result': 5}"
    assert shown[1].startswith("Tool call failed:\nThe tool call is not valid JSON")
    schema = {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    parsed = NativeCallParser("glm", [schema])(
        "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>!"
    )
    assert parsed["text"] == "!" and [(call.tool, call.args) for call in parsed["calls"]] == [("add", {"a": 2})]
    with pytest.raises(ValueError, match="dialect='harmony' is not supported"):
        NativeCallParser("harmony")


def test_function_that_does_not_return_is_abandoned():
    talk = Talk(SimpleToolTransform({"wait": threading.Event().wait}, timeout=0.2))
    assert "timed out after 0.2 s" in talk.say('<tool>wait\n{"timeout": 5}</tool>')[0][0]
    (thread,) = [one for one in threading.enumerate() if one.name == "tool wait"]
    assert thread.daemon  # others would have to return before the process can end


class Service:
    def __init__(self, name: str, answer: Any):
        self.name, self.answer = name, answer
        self.schema_in: dict[str, Any] = {}
        self.schema_out: dict[str, Any] = {}

    def __call__(self, **given: Any) -> Any:
        return self.answer(**given)


@pytest.mark.parametrize("stop", [False, True])
def test_services_run_in_order_and_see_the_row(stop: bool):
    seen: list[Any] = []

    def look(_state: Any, word: str) -> Any:
        seen.append((word, _state["query"]))
        return {"word": word}

    registry = ToolRegistry([Service("look", look), Service("fail", lambda **given: 1 / 0)])
    talk = Talk(ExecuteToolsInOrder(registry, XMLBlockParser(), stop_on_error=stop))
    answer = '<tool name="look" tag="A">{"word": "a"}</tool><tool name="fail">{}</tool>'
    (shown,) = talk.say(answer + '<tool name="look">{"word": "b"}</tool><tool name="away">{}</tool>')[0]
    expected = [
        "<tool_results>",
        'Tool look (call 1) [A] succeeded: {"word": "a"}',
        "Tool fail (call 2) failed: division by zero",
        'Tool look (call 3) succeeded: {"word": "b"}',
        "Tool away (call 4) failed: 'Unknown tool: away'",
        "</tool_results>",
    ]
    assert shown.split("\n") == (expected[:3] + expected[-1:] if stop else expected)
    assert seen == [("a", "?"), ("b", "?")][: 1 if stop else 2]


@pytest.mark.parametrize("text", ["42", "[1]", '{"tools": [1, {"tool": 2}, {"tool": "a", "args": 3}]}', "[" * 10_000])
def test_no_text_breaks_the_json_parser(text: str):
    assert JSONCallParser()(text)["calls"] == []


def test_many_calls_and_long_results_are_cut():
    registry = ToolRegistry([Service("talk", lambda: "a" * 100_000)])
    transform = ExecuteToolsInOrder(registry, XMLBlockParser(), pass_state_to_tools=False)
    (shown,) = Talk(transform).say('<tool name="talk">{}</tool>' * 20)[0]
    assert shown.count("succeeded") == 16 and len(shown) < 200_000
    assert "the others were not run" in shown


@needs_bubblewrap
def test_partial_reset_ends_only_the_sessions_of_its_rows():
    transform = PythonInterpreter(persistent=True, timeout=60.0)
    talk = Talk(transform, rows=2)
    talk.say(blocks("x = 1"), blocks("x = 2"))
    mask = torch.tensor([[True], [False]])
    talk.root = talk.env.reset(talk.root.set("_reset", mask))
    lost, kept = talk.say(blocks("print(x)"), blocks("print(x)"))
    assert "NameError" in lost[0] and kept[0].endswith("\n2")
    copied = transform.clone()
    copied.close()  # has no sessions of the original
    assert talk.say("none", blocks("print(x)"))[1][0].endswith("\n2")
    talk.env.close()


@needs_bubblewrap
def test_blocks_run_in_a_registered_service(monkeypatch: pytest.MonkeyPatch):
    async def execute(code: str) -> dict[str, Any]:
        return PythonExecutorService(timeout=60.0).execute(code)

    actor = SimpleNamespace(execute=SimpleNamespace(remote=execute))
    asked: list[dict[str, Any]] = []

    def services(**given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"mine": actor}

    monkeypatch.setattr(tools, "get_services", services)
    talk = Talk(PythonInterpreter(services="ray", service_name="mine"), rows=2)
    worked, failed = talk.say(blocks("print(6 * 7)", "pass"), blocks("1 / 0"))
    assert worked == ["Code block 1 executed successfully:\n42", "Code block 2 executed successfully:\n[no output]"]
    assert failed[0].startswith("Code block 1 failed:\nTraceback") and "ZeroDivisionError" in failed[0]
    assert asked == [{"backend": "ray"}]  # TorchRL registers services in a namespace of its own


@needs_bubblewrap
def test_service_runs_every_call_in_its_own_sandbox():
    service = PythonExecutorService(pool_size=1, timeout=60.0)
    assert service.execute("x = 1; print(x)") == {"success": True, "stdout": "1\n", "stderr": "", "returncode": 0}
    failed = service.execute("print(x)")
    assert not failed["success"] and "NameError" in failed["stderr"] and failed["returncode"] == 1


@pytest.mark.defect("D38")
def test_tools_of_a_server_are_described_called_by_any_name_and_read_as_text():
    pytest.importorskip("mcp")
    transform = MCPToolTransform({"my-server": {"command": sys.executable, "args": [SERVER, "stdio"]}}, timeout=60.0)
    talk = Talk(transform, rows=2)
    system, asked = talk.before[0]
    assert system["role"] == "system" and asked["content"] == "?"
    assert "my-server.add: Add two numbers." in system["content"] and '"integer"' in system["content"]
    called = '<tool>my-server.add\n{"a": 2, "b": 3}</tool><tool>add\n{"a": 1, "b": 1}</tool>'
    wrong = "<tool>my-server.fail\n{}</tool><tool>my-server.add\nnot json</tool><tool>my-server.no-tool\n{}</tool>"
    right, failed = talk.say(called, wrong)
    names = ["my-server.add", "my-server.add"]
    assert right == [f"Tool {name} executed successfully:\n{sum}" for name, sum in zip(names, "52", strict=True)]
    assert [text.partition(":")[0] for text in failed] == [
        "Tool my-server.fail failed",
        "Tool my-server.add failed",
        "Tool my-server.no-tool failed",
    ]
    talk.env.close()


@pytest.mark.defect("D38")
def test_a_server_that_cannot_be_reached_is_reported_at_once():
    pytest.importorskip("mcp")
    with pytest.raises(ValueError, match=r"servers\.s"):
        MCPToolTransform({"s": {"command": sys.executable, "args": ["-c", "raise SystemExit(3)"]}})


class Client:
    """A fake of the parts of the SDK's client that are used."""

    def __init__(self) -> None:
        self.tools = {"add-up": "Adds.", "hang": "Never answers."}
        self.cancelled = 0

    async def list_tools(self, cursor: Any) -> Any:
        schema = {"type": "object", "properties": {"numbers": {"type": "array"}}}
        listed = [SimpleNamespace(name=n, description=d, input_schema=schema) for n, d in self.tools.items()]
        return SimpleNamespace(tools=listed, next_cursor=None)

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> Any:
        if tool == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        text = str(sum(arguments["numbers"]))
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)], is_error=False)


@pytest.mark.fault("F25")
@pytest.mark.defect("D38")
def test_tools_of_servers_are_shown_called_read_and_ended_without_the_sdk_too(monkeypatch: pytest.MonkeyPatch):
    client = Client()

    @asynccontextmanager
    async def connected(server: Any) -> AsyncIterator[Client]:
        if server.name == "away":
            raise ConnectionError("nobody there")
        yield client

    monkeypatch.setattr(mcp, "connect", connected)
    monkeypatch.setitem(sys.modules, "mcp", ModuleType("mcp"))
    with pytest.raises(ConfigError, match="nobody there"):
        MCPToolTransform({"away": {"url": "http://127.0.0.1:1/mcp"}})
    servers = {"my-server": {"url": "http://127.0.0.1:1/mcp", "tools": ["add-up"]}}
    talk = Talk(MCPToolTransform(servers, timeout=60.0))
    system = talk.before[0][0]["content"]
    assert "my-server.add-up: Adds." in system and '"numbers"' in system and "hang" not in system
    call = '<tool>{}\n{{"numbers": [2, 3]}}</tool>'
    assert talk.say(call.format("add-up"))[0] == ["Tool my-server.add-up executed successfully:\n5"]
    assert talk.say(call.format("my-server.hang"))[0][0].startswith("Tool my-server.hang failed:")  # not allowed
    client.tools["another"] = "Was not there."
    assert "has changed its tools" in talk.say(call.format("add-up"))[0][0]
    talk.env.close()
    talk = Talk(MCPToolTransform({"late": {"url": "http://127.0.0.1:1/mcp"}}, timeout=0.5))
    assert "timed out" in talk.say(call.format("hang"))[0][0]
    talk.env.close()
    assert client.cancelled == 1


@pytest.mark.defect("D37")
def test_domains_are_compared_by_their_labels_and_ports():
    guard = UrlPolicy(["example.com", "example.org:8080"])
    for url in ("http://example.com/", "https://www.example.com/a", "http://example.org:8080/"):
        guard.check_url(url)
    for url in ("http://evilexample.com/", "http://example.com:8080/", "http://example.com@other.org/"):
        with pytest.raises(UrlNotAllowed):
            guard.check_url(url)


@needs_chromium
@pytest.mark.defect("D37")
def test_every_row_has_a_browser_of_its_own_and_redirects_are_checked():
    pytest.importorskip("playwright")
    with web_server(lambda request: Response(b"<title>Inside</title>secret")) as inside:

        def answer(request: Any) -> Response:
            if request.path == "/away":
                return Response(status=302, headers={"Location": f"{inside.url}/"})
            return Response(f"<title>Page</title>at {request.path} <a href='{inside.url}/'>in</a>".encode())

        with web_server(answer) as outside:
            transform = BrowserTransform(["example.com"], timeout=60.0, allow_private=[outside.at])
            talk = Talk(transform, rows=2)
            goto = '<tool>browser\n{{"action": "navigate", "url": "{}"}}</tool>'
            talk.say(*(goto.format(f"{outside.url}/{row}") for row in range(2)))
            read = '<tool>browser\n{"action": "extract"}</tool>'
            shown = talk.say(read, read)
            assert ["at /0" in shown[0][0], "at /1" in shown[1][0]] == [True, True]
            away = talk.say(
                goto.format(f"{outside.url}/away"), '<tool>browser\n{"action": "click", "selector": "a"}</tool>'
            )
            assert away[0][0].startswith("Tool browser failed:") and "number" in away[1][0]
            clicked = talk.say("nothing", '<tool>browser\n{"action": "click", "element": 1}</tool>')[1][0]
            assert "secret" not in clicked
            talk.env.close()
        assert inside.requests == []


@pytest.mark.defect("D39")
def test_an_expression_of_towers_is_refused_without_being_calculated():
    env = CountdownEnv({}, {"reward_spec": {"ground_truth": {"target": 1, "numbers": [9, 9, 9, 9]}}})
    assert env.step("<answer>9**9**9**9</answer>").reward == 0.0
