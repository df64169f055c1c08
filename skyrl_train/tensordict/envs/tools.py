"""Transforms that give the model of a ChatEnv tools: they run its calls and append the results as messages."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.fenced_blocks import PYTHON_LANGUAGES, extract_blocks
from skyrl_train.environments.tools.base import Tool, ToolBox, ToolError, ToolResult
from skyrl_train.environments.tools.browser import BrowserTool
from skyrl_train.environments.tools.mcp import McpTool, list_server_tools
from skyrl_train.environments.tools.parsers import MAX_CALLS
from skyrl_train.environments.tools.python import PythonTool
from skyrl_train.environments.tools.sandbox import SandboxResult
from skyrl_train.tensordict.envs.base import TensorDictEnv, Transform
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.envs.conversation import conversation, last_response, messages_of, part

MAX_WORKERS = 16
"""Maximum number of rows whose tools run concurrently."""
SERVICE_NAME = "python_executor"
"""TorchRL's default."""
TOOL_BLOCK = re.compile(r"<tool>\s*([\w.-]+)[ \t]*\n((?:(?!<tool>).)*?)</tool>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call in an answer; for a call that cannot be read, `wrong` is the message for the model."""

    shown_as: str
    """The name of the call in its result."""
    name: str = ""
    arguments: Mapping[str, Any] | None = None
    wrong: str | None = None


class ToolTransform(Transform, ABC):
    """A transform that runs the calls of the model's last answer and appends a message of role `tool_name` for each.

    A call in the answer's reasoning does not count (`reasoning.final_answer`). Every episode has its own tools, which
    are closed when it ends; rows run concurrently. A model's mistakes and a tool's exceptions become texts for the
    model. Rows without a call, and rows that are done, get no message. Subclasses define `make_tools`, `parse_calls`
    and `format_result`.

    Attaching it to anything but a ChatEnv in history mode raises RuntimeError.
    """

    def __init__(self, tool_name: str = "tool"):
        self.tool_name = tool_name
        self._boxes: dict[int, ToolBox] = {}

    @abstractmethod
    def make_tools(self) -> list[Tool]:
        """Return new tools for one episode."""

    @abstractmethod
    def parse_calls(self, text: str) -> list[ParsedCall]:
        """Return the tool calls in one answer, first to last. A call that cannot be parsed has `wrong` set."""

    @abstractmethod
    def format_result(self, call: ParsedCall, result: ToolResult) -> str:
        """Return the text of the message that shows the result of a call to the model."""

    def described(self) -> str | None:
        """Return a description of the tools for the system message, or None for no description."""
        return None

    def attach(self, environment: TensorDictEnv) -> None:
        """Attach the transform to an environment.

        Raises:
            RuntimeError: The environment is not a ChatEnv with input_mode="history".
        """
        if not isinstance(environment, ChatEnv) or environment.input_mode != "history":
            raise RuntimeError(f"{type(self).__name__} needs a ChatEnv with input_mode='history'.")
        super().attach(environment)

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        words = self.described()
        if words is None:
            return root
        rows = list(root.unbind(0))
        for row in rows:
            row.set("history", conversation(_with_system(messages_of(part(row, "history", "prompt")), words)))
        return lazy_stack(rows)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        rows = list(following.unbind(0))
        role, tokenizer = (getattr(self.environment, name, None) for name in ("policy_role", "tokenizer"))
        work: list[tuple[TensorDictBase, int, list[ParsedCall]]] = []
        for before, row in zip(root.unbind(0), rows, strict=True):
            text = None if bool(row["done"].any()) else last_response(before, tokenizer, role or "assistant")
            if found := self.parse_calls(final_answer(text)) if text else []:
                work.append((row, int(row["episode"]), found))
        if not work:
            return following
        with ThreadPoolExecutor(min(len(work), MAX_WORKERS)) as pool:
            answers = list(pool.map(lambda item: self._answers(item[1], item[2]), work))
        for (row, _, _), messages in zip(work, answers, strict=True):
            prompt = messages_of(part(row, "history", "prompt"))
            row.set("history", conversation([*prompt, *messages]))
        return lazy_stack(rows)

    def end_episodes(self, episodes: Sequence[int] | None) -> None:
        for episode in list(self._boxes) if episodes is None else episodes:
            if (box := self._boxes.pop(episode, None)) is not None:
                box.close()

    def _answers(self, episode: int, calls: Sequence[ParsedCall]) -> list[Message]:
        texts = []
        for call in calls[:MAX_CALLS]:
            if call.wrong is not None:
                result = ToolResult(call.wrong, "bad_arguments")
            else:
                if episode not in self._boxes:
                    self._boxes[episode] = ToolBox(self.make_tools())
                result = self._boxes[episode].call(call.name, dict(call.arguments or {}))
            texts.append(self.format_result(call, result))
        if len(calls) > MAX_CALLS:
            texts.append(f"More than {MAX_CALLS} calls in one message: the others were not run.")
        return [{"role": self.tool_name, "content": text} for text in texts]


class PythonInterpreter(ToolTransform):
    """A tool transform that runs each closed ```python block of the last answer in a sandbox.

    Every block runs in a new session or, with `persistent`, in the episode's session.

    The messages are "Code block 1 executed successfully:" or "Code block 1 failed:", followed by the block's output. A
    block fails if it raises, exits with a status other than 0, or exceeds a limit; a warning on stderr is just output.

    Args:
        timeout: Seconds for one block.
        sandbox: Settings as in `environment.skyrl_gym.sandbox`; bubblewrap by default. Nothing of this process's
            environment variables, files or network is visible inside.
        services, service_name, namespace: Only the defaults: here, every episode has its own sandbox where the
            environment runs.
        tokenizer: Accepted without effect, for compatibility with TorchRL: blocks are read from the conversation.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        tool_name: str = "tool",
        persistent: bool = False,
        timeout: float = 10.0,
        services: str | None = None,
        service_name: str = SERVICE_NAME,
        namespace: str | None = None,
        sandbox: Mapping[str, Any] | None = None,
    ):
        if services is not None:
            raise ValueError(
                f"services={services!r} is not supported. Leave it out: every episode has its own sandbox."
            )
        if service_name != SERVICE_NAME or namespace is not None:
            given = f"service_name={service_name!r}, namespace={namespace!r}"
            raise ValueError(f"{given}: leave them out; there is no service, every episode has its own sandbox.")
        super().__init__(tool_name)
        self.persistent, self.timeout, self.sandbox = persistent, timeout, sandbox

    def make_tools(self) -> list[Tool]:
        return [_Blocks(persistent=self.persistent, wall_s=self.timeout, sandbox=self.sandbox)]

    def parse_calls(self, text: str) -> list[ParsedCall]:
        blocks = extract_blocks(text, PYTHON_LANGUAGES)
        return [ParsedCall(f"Code block {number}", "python", {"code": code}) for number, code in enumerate(blocks, 1)]

    def format_result(self, call: ParsedCall, result: ToolResult) -> str:
        how = "executed successfully" if result.error is None else "failed"
        return f"{call.shown_as} {how}:\n{result.text}"


class _Blocks(PythonTool):
    def rendered(self, outcome: SandboxResult) -> str:
        text = super().rendered(outcome)
        raised = re.search(r"^Traceback \(most recent call last\)", outcome.stderr, re.MULTILINE) is not None
        if outcome.returncode or outcome.timed_out or outcome.killed_by or raised:
            raise ToolError(text)
        return text


class _BlockTools(ToolTransform):
    """A tool transform for calls written as <tool>name, a line break, the arguments as JSON, </tool>."""

    def __init__(self, tool_name: str, pattern: str | re.Pattern[str] | None, describe: bool):
        super().__init__(tool_name)
        self.pattern = TOOL_BLOCK if pattern is None else re.compile(pattern, re.DOTALL)
        if self.pattern.groups < 2:
            raise ValueError(f"tool_call_pattern={self.pattern.pattern!r} must have two groups: name and arguments.")
        self.describe = describe

    def parse_calls(self, text: str) -> list[ParsedCall]:
        return [self._parsed(*match.group(1, 2)) for match in self.pattern.finditer(text)]

    @abstractmethod
    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        """Return the tool call for a block's name and arguments."""

    def format_result(self, call: ParsedCall, result: ToolResult) -> str:
        how = "executed successfully" if result.error is None else "failed"
        return f"Tool {call.shown_as} {how}:\n{result.text}"

    def _parsed(self, name: str, body: str) -> ParsedCall:
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            return ParsedCall(name, wrong="The arguments are not valid JSON.")
        if not isinstance(arguments, dict):
            return ParsedCall(name, wrong="The arguments must be a JSON object.")
        return self.to_call(name, arguments)


class MCPToolTransform(_BlockTools):
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
        super().__init__(tool_name, tool_call_pattern, describe)
        if not servers:
            raise ValueError("servers={} must name at least one MCP server.")
        self.servers = {
            name: entry if "tools" in entry else {**entry, "tools": list_server_tools(name, entry)}
            for name, entry in servers.items()
        }
        self.timeout = timeout
        self._description = self.make_tools()[0].description

    def make_tools(self) -> list[Tool]:
        return [McpTool(self.servers, self.timeout)]

    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        full = name if name.partition(".")[0] in self.servers else f"{next(iter(self.servers))}.{name}"
        return ParsedCall(full, "mcp", {"tool": full, "arguments": arguments})

    def described(self) -> str | None:
        return f"{_HOW}\n\n{self._description}" if self.describe else None


class BrowserTransform(_BlockTools):
    """A tool transform with a browser for every row.

    The call is <tool>browser, a line break, {"action": ..., ...}, </tool>.

    The actions are BrowserTool's: goto (also "navigate") with "url", click and type with "element" (its number in the
    page's listing), read (also "extract" and "scroll", because the whole page is read), back. There are no selectors.

    Args:
        allowed_domains: Domains, including all their subdomains, as "name" or "name:port"; None: every public name.
            Redirects and everything that pages load are checked too. Addresses of this machine or its networks need
            `allow_private`.
        headless: Only True.
        timeout: Seconds for a call.
        tokenizer: Accepted without effect, for compatibility with TorchRL: calls are read from the conversation.
    """

    ALIASES: Mapping[str, str] = {"navigate": "goto", "extract": "read", "scroll": "read"}

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
        super().__init__(tool_name, None, describe)
        self._make: Callable[[], Tool] = lambda: BrowserTool(
            ["*"] if allowed_domains is None else list(allowed_domains), allow_private, timeout=timeout
        )
        self._make()  # fails now if it cannot work

    def make_tools(self) -> list[Tool]:
        return [self._make()]

    def to_call(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        action = arguments.get("action")
        if "selector" in arguments:
            return ParsedCall(name, wrong='There are no selectors: name the element by its number, {"element": 3}.')
        if isinstance(action, str) and action in self.ALIASES:
            kept = {key: value for key, value in arguments.items() if key == "url"}
            arguments = {**kept, "action": self.ALIASES[action]}
        return ParsedCall(name, name, arguments)

    def described(self) -> str | None:
        if not self.describe:
            return None
        return f"{_HOW}\n\n- browser: {BrowserTool.description} Arguments: {json.dumps(BrowserTool.parameters)}"


_HOW = """You can call tools. To call one, write its name, a line break, and its arguments as JSON:
<tool>NAME
{"argument": "value"}</tool>"""


def _with_system(messages: list[Message], words: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{words}"}, *messages[1:]]
    return [{"role": "system", "content": words}, *messages]
