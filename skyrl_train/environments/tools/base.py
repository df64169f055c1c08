"""The tool interface, and the ToolBox of an episode, which turns every error of a model's call into a text."""

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
from skyrl_train.environments.tools.parsers import ParseError, ToolCall
from skyrl_train.errors import ConfigError, EnvironmentFailure

CLOSE_TIMEOUT_S = 5.0
"""Time that all tools of a ToolBox together have to close."""
CANCEL_TIMEOUT_S = 1.0
"""Time that a canceled call has to release the event loop, before the loop is abandoned."""
MAX_ERROR_CHARS = 500
"""Maximum number of characters of an exception's message that the model sees."""
UNSAFE_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters that terminals obey (all but tab and line feed), and lone surrogates, which tokenizers reject."""


class ToolError(Exception):
    """An error that ends a tool call; the model sees its message as the call's result."""


class BadArguments(ToolError):
    """An error in a call's arguments that `Tool.call` itself finds, beyond what the JSON schema checks."""


class Tool(ABC):
    """A tool that a model may call in an episode. One object serves one episode, one call at a time.

    `parameters` is the JSON schema of the arguments, which form an object. `call` runs on the episode's own event
    loop, so blocking code must go through `asyncio.to_thread`. The model writes the arguments, so they are untrusted,
    but they have been validated against all of `parameters`. Arguments that the schema does not name are rejected,
    unless the schema allows them (`additionalProperties`).
    """

    name: str
    description: str
    parameters: dict[str, Any]
    deadline_s: float = 30.0
    """Maximum duration of one call, in seconds of wall time."""
    max_output: int = 8192
    """Maximum number of characters of a result; the middle of a longer result is left out."""
    from_row: tuple[str, ...] = ()
    """Names of the settings that a dataset row may override; all others come only from the configuration."""
    sandboxed: bool = False
    """True if the constructor also takes `sandbox`, which gets the value of `environment.skyrl_gym.sandbox`."""

    @classmethod  # noqa: B027 (most tools need nothing)
    def check(cls, **settings: Any) -> None:
        """Check the settings and this machine before a run starts.

        Args:
            settings: The arguments that the constructor will get.

        Raises:
            ConfigError: The settings cannot work, or this machine lacks something that they need.
        """

    @abstractmethod
    async def call(self, arguments: dict[str, Any]) -> str:
        """Run the tool and return its result as text for the model.

        Raises:
            ToolError: The call failed; the model sees the message.
        """

    async def close(self) -> None:  # noqa: B027 (most tools hold nothing)
        """Release the tool's resources. The default does nothing.

        The ToolBox calls this once, when the episode ends, if the tool was called.
        """

    def schema(self) -> dict[str, Any]:
        """Return the tool's name, description and parameters in the format of OpenAI's API and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call: a text for the model, also when the call failed."""

    text: str
    error: str | None = None
    """The kind of failure: "unreadable" (the call could not be parsed), "unknown_tool", "bad_arguments", "timeout",
    "tool_error" (a ToolError), or the class name of another exception. None if the call succeeded."""


def tool_call_record(name: str, arguments: Any, error: str | None = None) -> ToolCallRecord:
    """Return the record of a call for `StepOutput.tool_calls`.

    Args:
        name: Name of the tool.
        arguments: The call's arguments; a value that is not a string is written as JSON.
        error: Kind of failure (`ToolResult.error`), or None if the call succeeded.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": text} | ({} if error is None else {"error": error})


class ToolBox:
    """The tools of one episode, with a synchronous interface for environments.

    Calls run on an event loop in a daemon thread, which the first call starts. If a tool blocks this loop past its
    deadline, both the tool and the loop are abandoned, and the other tools continue on a new loop.

    Args:
        tools: The episode's tools.

    Raises:
        ConfigError: Two tools have the same name.

    Example:
        box = sk.ToolBox([sk.make_tool("python")])
        results = [box.run(call) for call in sk.parse_calls(action, "json")]
        box.close()
    """

    def __init__(self, tools: Sequence[Tool]):
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(
                    f"Two tools of the episode have the name {tool.name!r}; give one of them another name."
                )
            self._tools[tool.name] = tool
        self._used: set[str] = set()
        self._stuck: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def schemas(self) -> list[dict[str, Any]]:
        """Return the `schema()` of every tool, in the order of the constructor's argument."""
        return [tool.schema() for tool in self._tools.values()]

    def run(self, call: ToolCall | ParseError) -> ToolResult:
        """Run one item of the list that `parse_calls` returns. A malformed call results in the reason.

        Args:
            call: The parsed call, which `call` runs, or the error of a malformed one.

        Raises:
            EnvironmentFailure: As `call` raises it, like ConfigError and RuntimeError.
        """
        if isinstance(call, ParseError):
            return ToolResult(call.reason, "unreadable")
        return self.call(call.name, call.arguments)

    def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one call and block until it ends or exceeds the tool's deadline.

        A model's mistakes (an unknown tool, bad arguments), timeouts and exceptions of the tool become texts for the
        model.

        Args:
            name: Name of the tool, as the model wrote it.
            arguments: The call's arguments; they are validated against the tool's schema first.

        Raises:
            EnvironmentFailure: The tool failed for a reason that the model did not cause. The model must not be
                trained on such a failure, so this error is not turned into a text.
            ConfigError: The tool's settings or its schema cannot work.
            RuntimeError: `close` was called before.
        """
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(sanitize(f"There is no tool {name!r:.100}; known tools: {known}."), "unknown_tool")
        if problem := argument_validator(tool).find_problem(arguments):
            return ToolResult(sanitize(f"{tool.name}: {problem}"), "bad_arguments")
        if tool.name in self._stuck:
            return ToolResult(f"{tool.name} timed out before and is not available any more.", "timeout")
        if self._closed:
            raise RuntimeError("This ToolBox is closed. No tool can be called after close().")
        self._used.add(tool.name)
        return self._within_deadline(tool, arguments)

    def _within_deadline(self, tool: Tool, arguments: dict[str, Any]) -> ToolResult:
        future = self._submit(_call_tool(tool, arguments))
        try:
            return future.result(tool.deadline_s)
        except CancelledError:  # the tool itself, or a library that it uses, canceled the call
            return ToolResult(f"{tool.name} failed: it was cancelled.", "CancelledError")
        except TimeoutError:
            future.cancel()
        try:
            self._submit(asyncio.sleep(0)).result(CANCEL_TIMEOUT_S)
        except TimeoutError:
            self._stuck.add(tool.name)
            self._abandon_loop()
        return ToolResult(f"{tool.name} timed out after {tool.deadline_s:g} s.", "timeout")

    def close(self) -> None:
        """Close the tools that were called, and stop the event loop. Ignore errors and timeouts of closing tools."""
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
        """Stop using the loop. Its thread ends when the call that blocks it returns; nothing waits for that."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._thread = None


def argument_validator(tool: Tool) -> ArgumentValidator:
    """Return the validator of a tool's arguments.

    Raises:
        ConfigError: The tool's `parameters` are not a valid JSON schema.
    """
    try:
        return ArgumentValidator(tool.parameters)
    except SchemaError as error:
        raise ConfigError(f"The parameters of the tool {tool.name!r} are not a usable JSON schema: {error}.") from error


async def _call_tool(tool: Tool, arguments: dict[str, Any]) -> ToolResult:
    """Call a tool and return its result, also for SystemExit, which would end the loop of all tools."""
    try:
        text = await tool.call(arguments)
        if not isinstance(text, str):
            raise TypeError(
                f"{tool.name} returned {type(text).__name__}, not text. Return a string from its call method."
            )
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
    """Run the loop of a ToolBox in its thread until it is stopped, then cancel the tasks that are left."""
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
    """Return `text` with control characters replaced by U+FFFD, so that it can be tokenized, logged and displayed."""
    return UNSAFE_CHARACTERS.sub("\ufffd", text.replace("\r\n", "\n"))


def truncate_middle(text: str, limit: int) -> str:
    """Return `text`, with a note of the number of characters left out in place of its middle if it exceeds `limit`."""
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - limit // 2 :]}"
