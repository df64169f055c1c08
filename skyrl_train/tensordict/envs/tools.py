"""Transforms that give the model of a ChatEnv tools: they run its calls and append the results as messages."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.envs import Compose, EnvBase
from torchrl.envs.llm.transforms import JSONCallParser as _JSONCallParser, ToolCall, ToolRegistry
from torchrl.envs.llm.transforms.tools import LLMToolParser, ParseResult, ToolTransformBase
from torchrl.services import get_services

from skyrl_train.data.reasoning import final_answer
from skyrl_train.data.tool_formats import (
    TOOL_FORMATS,
    ParseError,
    ToolCall as NativeCall,
    find_calls,
    parse_answer,
)
from skyrl_train.environments.fenced_blocks import PYTHON_LANGUAGES, extract_blocks
from skyrl_train.environments.tools.base import Tool, ToolBox, ToolError, ToolResult, sanitize, truncate_middle
from skyrl_train.environments.tools.browser import BrowserTool
from skyrl_train.environments.tools.mcp import McpTool, list_server_tools
from skyrl_train.environments.tools.parsers import MAX_CALLS
from skyrl_train.environments.tools.python import PythonTool
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, SandboxResult
from skyrl_train.tensordict.envs.conversation import last_response, part, value_of
from skyrl_train.tensordict.envs.rows import chat_setting, reset_rows, rows_of
from skyrl_train.tensordict.ragged import nested_stack

MAX_WORKERS = 16
"""Maximum number of rows whose tools run concurrently."""
TOOL_BLOCK = re.compile(r"<tool>\s*([\w.-]+)[ \t]*\n((?:(?!<tool>).)*?)</tool>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call in an answer; for a call that cannot be read, `wrong` is the message for the model."""

    shown_as: str
    """The name of the call in its result."""
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    wrong: str | None = None


class ToolTransform(ToolTransformBase, ABC):  # type: ignore[misc]
    """A transform that runs the calls of the model's last answer and appends a message of role `tool_role` for each.

    A call in the answer's reasoning does not count (`reasoning.final_answer`). Every row has its own tools, which are
    closed when the row is reset and when the environment is closed; rows run concurrently. A model's mistakes and a
    tool's exceptions become texts for the model. Rows without a call, and rows that are done, get no message.
    Subclasses define `make_tools` and `parse_calls`, and may override `format_result`.

    Attaching it to an environment of another mode than "history" raises RuntimeError.
    """

    def __init__(self, tool_name: str = "tool"):
        super().__init__()
        self.tool_role = tool_name
        self._boxes: dict[int, ToolBox] = {}

    def make_tools(self) -> list[Tool]:
        """Return new tools for one row."""
        return []

    @abstractmethod
    def parse_calls(self, text: str) -> list[ParsedCall]:
        """Return the tool calls in one answer, first to last. A call that cannot be parsed has `wrong` set."""

    def format_result(self, call: ParsedCall, result: ToolResult) -> str:
        """Return the text of the message that shows the result of a call to the model."""
        outcome = "executed successfully" if result.error is None else "failed"
        return f"{call.shown_as} {outcome}:\n{result.text}"

    def described(self) -> str | None:
        """Return a description of the tools for the system message, or None for no description."""
        return None

    def set_container(self, container: Compose | EnvBase) -> None:
        """Attach the transform to an environment, or to a composition of transforms.

        Raises:
            RuntimeError: The environment's input_mode is not "history".
        """
        super().set_container(container)
        mode = chat_setting(self, "input_mode", "history")
        if mode != "history":
            raise RuntimeError(f"{type(self).__name__} needs a ChatEnv with input_mode='history', got {mode!r}.")

    def clone(self) -> ToolTransform:
        """Return a copy without an environment, which has its own tools."""
        copied: ToolTransform = super().clone()
        copied._boxes = {}
        return copied

    def close(self) -> None:
        """Close the tools of all rows."""
        self._close(list(self._boxes))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        rows = rows_of(tensordict_reset)
        begun = reset_rows(tensordict, len(rows))
        self._close([place for place, reset in enumerate(begun) if reset])
        words = self.described()
        if words is None:
            return tensordict_reset
        for row, reset in zip(rows, begun, strict=True):
            if reset and (prompt := part(row, "history", "prompt")) is not None:
                first, *rest = prompt.unbind(0)
                begin, rest = (f"{first.content}\n\n", rest) if first.role == "system" else ("", [first, *rest])
                _set_prompt(row, [type(prompt)(role="system", content=begin + words), *rest])
        return nested_stack(rows, tensordict_reset.batch_size)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rows = rows_of(next_tensordict)
        role, tokenizer = chat_setting(self, "policy_role", "assistant"), chat_setting(self, "tokenizer", None)
        work = []
        for place, (before, row) in enumerate(zip(rows_of(tensordict), rows, strict=True)):
            done = row.get("done", None)
            text = None if done is not None and bool(done.any()) else last_response(before, tokenizer, role)
            if found := self.parse_calls(final_answer(text)) if text else []:
                work.append((place, before, found))
        if not work:
            return next_tensordict
        with ThreadPoolExecutor(min(len(work), MAX_WORKERS)) as pool:
            answers = list(pool.map(lambda item: self._answers(*item), work))
        for (place, _, _), texts in zip(work, answers, strict=True):
            prompt = part(rows[place], "history", "prompt")
            results = [type(prompt)(role=self.tool_role, content=text) for text in texts]
            _set_prompt(rows[place], [*prompt.unbind(0), *results])
        return nested_stack(rows, next_tensordict.batch_size)

    def _answers(self, place: int, before: TensorDictBase, calls: Sequence[ParsedCall]) -> list[str]:
        """Run the calls of one row, and return the texts of their messages."""
        texts = []
        for call in calls[:MAX_CALLS]:
            if call.wrong is None and place not in self._boxes:
                self._boxes[place] = ToolBox(self.make_tools())
            wrong = None if call.wrong is None else ToolResult(call.wrong, "bad_arguments")
            result = wrong or self._boxes[place].call(call.name, dict(call.arguments or {}))
            texts.append(self.format_result(call, result))
        return [*texts, *_surplus(calls)]

    def _close(self, places: Sequence[int]) -> None:
        for place in places:
            if (box := self._boxes.pop(place, None)) is not None:
                box.close()


class PythonInterpreter(ToolTransform):
    """A tool transform that runs each closed ```python block of the last answer in a sandbox.

    The messages are "Code block 1 executed successfully:" or "Code block 1 failed:", followed by the block's output. A
    block fails if it raises, exits with a status other than 0, or exceeds a limit; a warning on stderr is just output.

    Args:
        tokenizer: Accepted without effect, as in TorchRL.
        tool_name: Role of the messages.
        persistent: True to keep variables until the row is reset; otherwise every block runs in a new session.
        timeout: Seconds for one block.
        services: "ray" to run blocks in a `PythonExecutorService` that is registered with
            `torchrl.services.get_services`; its limits and sandbox apply.
        service_name, namespace: Name of that service, and its Ray namespace if it is not the default of `get_services`.
        sandbox: Settings as in `environment.skyrl_gym.sandbox`; bubblewrap by default. Nothing of this process's
            environment variables, files or network is visible inside.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: str | None = None,
        service_name: str = "python_executor",
        namespace: str | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ):
        if services not in (None, "ray"):
            raise ValueError(
                f"services={services!r} is not a known backend. Choose 'ray', or None for local sandboxes."
            )
        if services == "ray" and persistent:
            raise ValueError("persistent=True needs a session per row, which a service has not. Leave out services.")
        super().__init__(tool_name)
        self.persistent, self.timeout, self.sandbox = persistent, timeout, sandbox
        self.python_service = None
        if services == "ray":
            where = {} if namespace is None else {"namespace": namespace}  # None would not be the default one
            self.python_service = get_services(backend="ray", **where)[service_name]

    def make_tools(self) -> list[Tool]:
        if self.python_service is not None:
            return [_ServiceBlocks(self.python_service)]
        return [_Blocks(persistent=self.persistent, wall_s=self.timeout, sandbox=self.sandbox)]

    def parse_calls(self, text: str) -> list[ParsedCall]:
        blocks = extract_blocks(text, PYTHON_LANGUAGES)
        return [ParsedCall(f"Code block {number}", "python", {"code": code}) for number, code in enumerate(blocks, 1)]


class PythonExecutorService:
    """A service that runs Python code in sandboxes, for the environments of several processes.

    Register it as an actor: `get_services(backend="ray").register("python_executor", PythonExecutorService,
    pool_size=8, num_cpus=8, max_concurrency=8)`, and use it with `PythonInterpreter(services="ray")`. Every call has
    its own sandbox: nothing of a call is visible to later ones.

    Args:
        pool_size: Maximum number of sandboxes that run at a time.
        timeout: Seconds for one call.
        sandbox: Settings as in `environment.skyrl_gym.sandbox`; bubblewrap by default.
    """

    def __init__(self, pool_size: int = 32, timeout: float = 10.0, sandbox: Mapping[str, Any] | None = None):
        self.timeout = timeout
        self._sandbox = Sandbox.from_config(sandbox, Limits(wall_s=timeout, cpu_s=timeout))
        self._free = threading.Semaphore(pool_size)

    def execute(self, code: str) -> dict[str, Any]:
        """Run code and return its "success", "stdout", "stderr" and "returncode"."""
        with self._free:
            ran = self._sandbox.run({"main.py": code.encode("utf-8", "replace")}, [PYTHON, "-I", "-u", "main.py"])
        stderr = ran.stderr
        if ran.timed_out or ran.killed_by is not None:
            stderr += f"[timed out after {self.timeout:g} s]" if ran.timed_out else f"[stopped: {ran.killed_by} limit]"
        return {"success": not _failed(ran), "stdout": ran.stdout, "stderr": stderr, "returncode": ran.returncode}


class _Blocks(PythonTool):
    def rendered(self, outcome: SandboxResult) -> str:
        text = super().rendered(outcome)
        if _failed(outcome):
            raise ToolError(text)
        return text


class _ServiceBlocks(Tool):
    """The python tool of a PythonExecutorService in a Ray actor."""

    name, description, parameters = PythonTool.name, PythonTool.description, PythonTool.parameters
    deadline_s = 3600.0  # the service has its own limit, but may have to wait for a free sandbox

    def __init__(self, service: Any):
        self._service = service

    async def call(self, arguments: dict[str, Any]) -> str:
        result = await self._service.execute.remote(arguments["code"])
        text = "\n".join(text.rstrip("\n") for text in (result["stdout"], result["stderr"]) if text.strip("\n"))
        if not result["success"]:
            raise ToolError(text or f"[exit status {result['returncode']}]")
        return text or "[no output]"


class _CallTransform(ToolTransform):
    """A tool transform for calls with a name and JSON arguments.

    Without a parser, a call is written as <tool>name, a line break, the arguments as JSON, </tool>. With `describe`,
    the system message explains it, followed by `description`.
    """

    describe, description = False, ""

    def __init__(self, tool_name: str, pattern: str | re.Pattern[str] | None, parser: LLMToolParser | None = None):
        super().__init__(tool_name)
        self.pattern = TOOL_BLOCK if pattern is None else re.compile(pattern, re.DOTALL)
        if self.pattern.groups < 2:
            raise ValueError(f"tool_call_pattern={self.pattern.pattern!r} must have two groups: name and arguments.")
        self.parser = parser

    def parse_calls(self, text: str) -> list[ParsedCall]:
        if isinstance(self.parser, NativeCallParser):
            return [
                ParsedCall("call", wrong=item.reason)
                if isinstance(item, ParseError)
                else self.to_call(item.name, item.arguments)
                for item in self.parser.find_calls(text)
            ]
        if self.parser is not None:
            return [self._checked(call.tool, call.args) for call in self.parser(text)["calls"]]
        return [self._parsed(*match.group(1, 2)) for match in self.pattern.finditer(text)]

    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        """Return the tool call for a call's name and arguments."""
        return ParsedCall(name, name, arguments)

    def described(self) -> str | None:
        return f"{_HOW}\n\n{self.description}" if self.describe else None

    def format_result(self, call: ParsedCall, result: ToolResult) -> str:
        return f"Tool {super().format_result(call, result)}"

    def _parsed(self, name: str, body: str) -> ParsedCall:
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            return ParsedCall(name, wrong="Failed to parse tool arguments: they are not valid JSON.")
        return self._checked(name, arguments)

    def _checked(self, name: str, arguments: Any) -> ParsedCall:
        if isinstance(arguments, dict | None):
            return self.to_call(name, arguments or {})
        return ParsedCall(name, wrong="The arguments must be a JSON object.")


class SimpleToolTransform(_CallTransform):
    """A tool transform for functions of this process, which run without a sandbox.

    Args:
        tools: Functions by name; a call's arguments are keyword arguments, and `str` of the result is shown.
        tool_schemas: Accepted without effect, as in TorchRL: describe the tools in the system prompt.
        parser: A parser such as `XMLBlockParser` or `NativeCallParser`; by default calls are blocks like
            <tool>name, a line break, {json}</tool>.
        tool_call_pattern: A pattern with two groups, the name and the arguments, instead of that of blocks.
        tool_name: Role of the messages.
        timeout: Seconds for a call; a function that takes longer is abandoned.
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        parser: LLMToolParser | None = None,
        tool_call_pattern: str | re.Pattern[str] | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
    ):
        super().__init__(tool_name, tool_call_pattern, parser)
        self.tools, self.tool_schemas, self.timeout = dict(tools), dict(tool_schemas or {}), timeout

    def make_tools(self) -> list[Tool]:
        return [_Function(name, function, self.timeout) for name, function in self.tools.items()]


class _Function(Tool):
    description = ""
    parameters = {"type": "object", "additionalProperties": True}  # noqa: RUF012

    def __init__(self, name: str, function: Callable[..., Any], timeout: float):
        self.name, self.function, self.deadline_s = name, function, timeout

    async def call(self, arguments: dict[str, Any]) -> str:
        answer: Future[Any] = Future()

        def run() -> None:
            answer.set_running_or_notify_cancel()
            try:
                answer.set_result(self.function(**arguments))
            except BaseException as error:
                answer.set_exception(error)

        # A thread of a pool would keep the process from ending while an abandoned function runs.
        threading.Thread(target=run, name=f"tool {self.name}", daemon=True).start()
        return str(await asyncio.wrap_future(answer))


class ExecuteToolsInOrder(_CallTransform):
    """A tool transform for the services of a `ToolRegistry`: one message shows the results of all calls of an answer.

    Args:
        registry: The services, which run in this process without a sandbox. A service gets a call's arguments as
            keyword arguments and returns a mapping, which is shown as JSON.
        parser: Parser of the calls, such as `XMLBlockParser`, `JSONCallParser` or `NativeCallParser`.
        stop_on_error: True to leave out the calls after one that fails.
        pass_state_to_tools: Also pass `_state`: the row's columns, such as its question, as plain values.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        parser: LLMToolParser,
        stop_on_error: bool = False,
        pass_state_to_tools: bool = True,
    ):
        super().__init__("tool", None, parser)
        self.registry, self.stop_on_error, self.pass_state_to_tools = registry, stop_on_error, pass_state_to_tools

    def parse_calls(self, text: str) -> list[ParsedCall]:
        calls = []
        for number, call in enumerate(self.parser(text)["calls"], 1):  # type: ignore[misc]
            tag = f" [{call.tag}]" if call.tag else ""
            calls.append(ParsedCall(f"{call.tool} (call {number}){tag}", call.tool, call.args))
        return calls

    def _answers(self, place: int, before: TensorDictBase, calls: Sequence[ParsedCall]) -> list[str]:
        lines, state = [], {}
        if self.pass_state_to_tools:
            plain = {key for key, value in before.items() if isinstance(value, str) or hasattr(value, "tolist")}
            state = {"_state": {key: value_of(before, key) for key in plain - {"_reset"}}}
        for call in calls[:MAX_CALLS]:
            try:
                result = self.registry.get(call.name)(**dict(call.arguments or {}), **state)
                text, failed = json.dumps(result, default=str, ensure_ascii=False), False
            except Exception as error:
                text, failed = str(error) or type(error).__name__, True
            shown = truncate_middle(sanitize(text), Tool.max_output)
            lines.append(f"Tool {call.shown_as} {'failed' if failed else 'succeeded'}: {shown}")
            if failed and self.stop_on_error:
                break
        return ["\n".join(["<tool_results>", *lines, *_surplus(calls), "</tool_results>"])]


class JSONCallParser(_JSONCallParser):  # type: ignore[misc]
    """TorchRL's parser of {"message": ..., "tools": [{"tool": ..., "args": ...}]}, which no text makes raise.

    Text that is not such an object has no calls, and entries that are not calls are left out.
    """

    def __call__(self, response: str | dict[str, Any]) -> ParseResult:
        given: Any = response
        if isinstance(response, str):
            try:
                given = json.loads(response)
            except (ValueError, RecursionError):
                given = None
        if not isinstance(given, dict):
            return ParseResult(text=response, calls=[], meta={"count": 0})
        entries = given.get("tools")
        calls = list(filter(_is_call, entries)) if isinstance(entries, list) else []
        return super().__call__({**given, "tools": calls})  # type: ignore[no-any-return]


class NativeCallParser:
    """A parser of calls in a model's own format, such as <tool_call>{"name": "add", "arguments": {...}}</tool_call>.

    Args:
        dialect: Name of the format: one of `data.tool_formats.TOOL_FORMATS`, except "harmony", whose calls are not in
            the final answer.
        schemas: The tools in OpenAI's format. Formats in which every argument is a text convert arguments by them.

    Raises:
        ValueError: The dialect is unknown, or "harmony".
    """

    def __init__(self, dialect: str = "hermes", schemas: Sequence[Mapping[str, Any]] = ()):
        dialects = [name for name in TOOL_FORMATS if name != "harmony"]
        if dialect not in dialects:
            raise ValueError(f"dialect={dialect!r} is not supported; choose one of {dialects}.")
        self.tool_format, self.schemas = TOOL_FORMATS[dialect], schemas

    def find_calls(self, text: str) -> list[NativeCall | ParseError]:
        """Return the calls of an answer, first to last, with a ParseError in the place of each malformed call."""
        return find_calls(text, self.tool_format, self.schemas)

    def __call__(self, response: str | dict[str, Any]) -> ParseResult:
        answer = parse_answer(response if isinstance(response, str) else "", self.tool_format, tools=self.schemas)
        calls = [ToolCall(call.name, call.arguments, None) for call in answer.tool_calls]
        return ParseResult(text=answer.content, calls=calls, meta={"count": len(calls)})


class MCPToolTransform(_CallTransform):
    """A tool transform for the tools of MCP servers, called as <tool>server.tool, a line break, {json}, </tool>.

    A name without a server belongs to the first server. The system message lists the tools with their schemas
    (`describe`). Connection failures raise ConfigError immediately; a call that exceeds `timeout` is cancelled.

    Args:
        servers: Name -> {"command", "args", "env"} or {"url"}, and "tools", the ones that may be called; by default all
            that the server currently has. See `environments.tools.mcp.Server`.
        tool_call_pattern: A pattern with two groups: the name and the arguments.
    """

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any]],
        tool_call_pattern: str | re.Pattern[str] | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
        describe: bool = True,
    ):
        super().__init__(tool_name, tool_call_pattern)
        if not servers:
            raise ValueError("servers={} must name at least one MCP server.")
        self.servers = {
            name: entry if "tools" in entry else {**entry, "tools": list_server_tools(name, entry)}
            for name, entry in servers.items()
        }
        self.timeout, self.describe = timeout, describe
        self.description = self.make_tools()[0].description

    def make_tools(self) -> list[Tool]:
        return [McpTool(self.servers, self.timeout)]

    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        full = name if name.partition(".")[0] in self.servers else f"{next(iter(self.servers))}.{name}"
        return ParsedCall(full, "mcp", {"tool": full, "arguments": arguments})


class BrowserTransform(_CallTransform):
    """A tool transform with a browser for every row, called as <tool>browser, a line break, {"action": ...}, </tool>.

    The actions are BrowserTool's: goto (also "navigate") with "url", click and type with "element" (its number in the
    page's listing), read (also "extract" and "scroll", because the whole page is read), back. There are no selectors.

    Args:
        allowed_domains: Domains, including all their subdomains, as "name" or "name:port"; None: every public name.
            Redirects and everything that pages load are checked too. Addresses of this machine or its networks need
            `allow_private`.
        headless: Only True.
        timeout: Seconds for a call.
        tokenizer: Accepted without effect, as in TorchRL.
    """

    ALIASES: Mapping[str, str] = {"navigate": "goto", "extract": "read", "scroll": "read"}
    description = f"- browser: {BrowserTool.description} Arguments: {json.dumps(BrowserTool.parameters)}"

    def __init__(
        self,
        allowed_domains: Sequence[str] | None = None,
        headless: bool = True,
        timeout: float = 30.0,
        tokenizer: Any = None,
        tool_name: str = "tool",
        allow_private: Sequence[str] = (),
        describe: bool = True,
    ):
        if not headless:
            raise ValueError("headless=False is not supported: the browsers of a batch have no screen.")
        super().__init__(tool_name, None)
        self.allowed_domains = ["*"] if allowed_domains is None else list(allowed_domains)
        self.allow_private, self.timeout, self.describe = allow_private, timeout, describe
        self.make_tools()  # fails now if it cannot work

    def make_tools(self) -> list[Tool]:
        return [BrowserTool(self.allowed_domains, self.allow_private, timeout=self.timeout)]

    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        action = arguments.get("action")
        if "selector" in arguments:
            return ParsedCall(name, wrong='There are no selectors: name the element by its number, {"element": 3}.')
        if isinstance(action, str) and action in self.ALIASES:
            kept = {key: value for key, value in arguments.items() if key == "url"}
            arguments = {**kept, "action": self.ALIASES[action]}
        return super().to_call(name, arguments)


_HOW = """You can call tools. To call one, write its name, a line break, and its arguments as JSON:
<tool>NAME
{"argument": "value"}</tool>"""


def _failed(outcome: SandboxResult) -> bool:
    raised = re.search(r"^Traceback \(most recent call last\)", outcome.stderr, re.MULTILINE) is not None
    return bool(outcome.returncode or outcome.timed_out or outcome.killed_by or raised)


def _is_call(entry: Any) -> bool:
    """True if an entry of a JSON answer names a tool and its arguments."""
    return isinstance(entry, dict) and isinstance(entry.get("tool"), str) and isinstance(entry.get("args", {}), dict)


def _surplus(calls: Sequence[ParsedCall]) -> list[str]:
    words = f"More than {MAX_CALLS} calls in one message: the others were not run."
    return [words] if len(calls) > MAX_CALLS else []


def _set_prompt(row: TensorDictBase, turns: Sequence[Any]) -> None:
    container = row.get("history").copy()
    container.prompt = lazy_stack(list(turns))
    row.set("history", container)
