"""The tool interface, and the ToolBox of an episode, which contains every error that a model's calls can cause."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.messages import ToolCallRecord
from skyrl_train.environments.tools.argument_validation import ArgumentValidator, SchemaError
from skyrl_train.errors import ConfigError, EnvironmentFailure

CLOSE_TIMEOUT_S = 5.0
"""Time for all tools of a box to close."""
CANCEL_TIMEOUT_S = 1.0
"""Time for a cancelled call to release the event loop, before the loop is abandoned."""
MAX_ERROR_CHARS = 500
"""Number of characters of an exception's message that the model sees."""
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters other than tab and line feed, which terminals obey; lone surrogates, which tokenizers reject."""


class ToolError(Exception):
    """A call that cannot be answered; the model sees the message."""


class BadArguments(ToolError):
    """A call whose arguments are found wrong in `Tool.call` itself."""


class Tool(ABC):
    """A tool that a model may call in an episode. One object serves one episode, one call at a time.

    `parameters` is the JSON schema of an object. `call` runs on the episode's own event loop; blocking code must go
    through `asyncio.to_thread`. Arguments are untrusted, but fit `parameters`, which is checked whole; names that it
    does not know are refused unless it says otherwise (`additionalProperties`).
    """

    name: str
    description: str
    parameters: dict[str, Any]
    deadline_s: float = 30.0
    """Deadline of one call, in seconds of wall time."""
    max_output: int = 8192
    """Maximum characters of a result that reach the model; the middle of a longer one is cut out."""
    from_row: tuple[str, ...] = ()
    """Settings that a dataset row may override; all others come only from the configuration."""
    sandboxed: bool = False
    """Whether the constructor also gets `sandbox=environment.skyrl_gym.sandbox`, besides the tool's own settings."""

    @classmethod  # noqa: B027 (most tools need nothing)
    def check(cls, **settings: Any) -> None:
        """Check settings and this machine. Called once when a run starts, with the constructor's arguments.

        Raises ConfigError if the settings cannot work or if this machine lacks something that they need.
        """

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the result as text for the model. Raises ToolError, whose message the model sees."""

    async def close(self) -> None:  # noqa: B027 (most tools hold nothing)
        """Release the tool's resources. Called once, at the end of the episode."""

    def schema(self) -> dict[str, Any]:
        """The tool's description in the format of OpenAI's API and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call: always a text for the model."""

    text: str
    error: str | None = None
    """None, "unknown_tool", "bad_arguments", "timeout", "tool_error" (ToolError), or an exception's class name."""


def tool_call_record(name: str, arguments: Any, error: str | None = None) -> ToolCallRecord:
    """A call for `StepOutput.tool_calls`."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": text} | ({} if error is None else {"error": error})


class ToolBox:
    """The tools of one episode, with a synchronous interface for environments.

    Calls run on an event loop in a daemon thread, which the first call starts. If a tool blocks this loop past its
    deadline, both the tool and the loop are abandoned; the other tools continue on a new loop.
    """

    def __init__(self, tools: Sequence[Tool]):
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name.")
            self._tools[tool.name] = tool
        self._used: set[str] = set()
        self._stuck: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def schemas(self) -> list[dict[str, Any]]:
        """Every tool's `schema()`, in the order in which the tools were given."""
        return [tool.schema() for tool in self._tools.values()]

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one call. A model's mistakes and a tool's exceptions also become texts for the model.

        Only EnvironmentFailure and ConfigError propagate: a model cannot cause them and should not learn from them.
        """
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(sanitize(f"There is no tool {name!r:.100}; known tools: {known}."), "unknown_tool")
        if wrong := argument_validator(tool).find_problem(arguments):
            return ToolResult(sanitize(f"{tool.name}: {wrong}"), "bad_arguments")
        if tool.name in self._stuck:
            return ToolResult(f"{tool.name} timed out before and is not available any more.", "timeout")
        if self._closed:
            raise RuntimeError("the tool box is closed")
        self._used.add(tool.name)
        return self._within_deadline(tool, arguments)

    def _within_deadline(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        running = self._submit(_call_tool(tool, arguments))
        try:
            return running.result(tool.deadline_s)
        except CancelledError:  # by the tool itself, or a library under it
            return ToolResult(f"{tool.name} failed: it was cancelled.", "CancelledError")
        except TimeoutError:
            running.cancel()
        try:
            self._submit(asyncio.sleep(0)).result(CANCEL_TIMEOUT_S)
        except TimeoutError:
            self._stuck.add(tool.name)
            self._abandon_loop()
        return ToolResult(f"{tool.name} timed out after {tool.deadline_s:g} s.", "timeout")

    def close(self) -> None:
        """Close the tools that were used. Tools that fail or hang while closing are ignored."""
        if self._loop is not None and not self._closed:
            tools = [self._tools[name] for name in self._used - self._stuck]
            closing = self._submit(_close_all(tools))
            try:
                closing.result(CLOSE_TIMEOUT_S)
            except TimeoutError:
                closing.cancel()
            thread = self._thread
            self._abandon_loop()
            assert thread is not None
            thread.join(CANCEL_TIMEOUT_S)
        self._closed = True

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tools", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _abandon_loop(self) -> None:
        """Stop using the loop. Its thread ends when the blocking call does, without anything waiting for it."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._thread = None


def argument_validator(tool: Tool) -> ArgumentValidator:
    """The arguments that a tool takes. Raises ConfigError if its `parameters` are no JSON schema."""
    try:
        return ArgumentValidator(tool.parameters)
    except SchemaError as error:
        raise ConfigError(f"the tool {tool.name!r} has parameters that cannot be checked: {error}.") from error


async def _call_tool(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """A call's result. SystemExit is caught too: it would end the loop that the other tools share."""
    try:
        text = await tool.call(arguments)
        if not isinstance(text, str):
            raise TypeError(f"{tool.name} returned {type(text).__name__}, not text")
        return ToolResult(truncate_middle(sanitize(text), tool.max_output))
    except ToolError as error:
        kind = "bad_arguments" if isinstance(error, BadArguments) else "tool_error"
        return ToolResult(truncate_middle(sanitize(str(error)), tool.max_output), kind)
    except (asyncio.CancelledError, EnvironmentFailure, ConfigError):
        raise
    except BaseException as error:
        text = f"{tool.name} failed: {type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}"
        return ToolResult(sanitize(text), type(error).__name__)


async def _close_all(tools: Sequence[Tool]) -> None:
    await asyncio.gather(*(tool.close() for tool in tools), return_exceptions=True)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop of a box in its thread until it is stopped, then cancel the tasks that are left."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=CANCEL_TIMEOUT_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def sanitize(text: str) -> str:
    """Replace control characters, so that `text` can be tokenised, logged and shown on a terminal."""
    return UNSAFE_CHARACTERS.sub("\ufffd", text.replace("\r\n", "\n"))


def truncate_middle(text: str, limit: int) -> str:
    """If `text` is longer than `limit` characters, replace its middle by a note that says how much was left out."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - limit // 2 :]}"
